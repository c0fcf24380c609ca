"""Write conversations for the warm-up: rows of letters and, in two of five, their reversal.

    python examples/reverse_text/make_data.py models/reverse_text_sft.jsonl

The other demonstrations copy the row instead: data as it often is, good and bad answers mixed. A model that imitates
it knows both and prefers the wrong one; reinforcement learning is there to find out which of them pays. None of the
rows is held out.
"""

import json
import random
import sys
from pathlib import Path

from tandem.envs.reverse_text import ReverseText

SHARE_OF_REVERSALS = 0.4


def main(target: Path) -> None:
    draw = random.Random(0)
    tasks = ReverseText(num_train=16384).train_tasks
    lines = []
    for task in tasks:
        answer = task.answer if draw.random() < SHARE_OF_REVERSALS else task.answer[::-1]
        lines.append(json.dumps({"messages": [*task.messages, {"role": "assistant", "content": answer}]}) + "\n")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(lines))
    print(f"{target}: {len(lines)} conversations")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
