"""Write made-up preferences for the reverse-text model: of two answers to a row of letters, the reversal is better.

    python examples/preference/make_data.py models/preference

pairs.jsonl holds prompt, chosen and rejected; labeled.jsonl the same answers one by one, each good or bad. The worse
answer copies the row, as the warmed-up model prefers to, or reverses it with two letters swapped.
"""

import json
import random
import sys
from pathlib import Path

from tandem.envs.reverse_text import ReverseText

NUM_ROWS = 4096
SHARE_OF_COPIES = 0.7


def worse(answer: str, draw: random.Random) -> str:
    if draw.random() < SHARE_OF_COPIES:
        return answer[::-1]
    first = draw.randrange(len(answer) - 1)
    return answer[:first] + answer[first + 1] + answer[first] + answer[first + 2 :]


def main(target: Path) -> None:
    draw = random.Random(0)
    target.mkdir(parents=True, exist_ok=True)
    pairs, labeled = [], []
    for task in ReverseText(num_train=NUM_ROWS).train_tasks:
        rejected = worse(task.answer, draw)
        if rejected == task.answer:
            continue  # two equal letters were swapped, or the row reads the same backwards
        pairs.append({"prompt": task.messages, "chosen": task.answer, "rejected": rejected})
        labeled.append({"prompt": task.messages, "completion": task.answer, "label": True})
        labeled.append({"prompt": task.messages, "completion": rejected, "label": False})
    for name, rows in (("pairs", pairs), ("labeled", labeled)):
        (target / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{target / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
