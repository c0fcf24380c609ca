"""Write conversations for the warm-up: rows of five letters and their reversal, none of them held out.

python examples/reverse_text/make_data.py models/reverse_text_sft.jsonl
"""

import json
import sys
from pathlib import Path

from tandem.envs.reverse_text import ReverseText


def main(target: Path) -> None:
    tasks = ReverseText(min_length=5, max_length=5, num_train=16384).train_tasks
    rows = [{"messages": [*task.messages, {"role": "assistant", "content": task.answer}]} for task in tasks]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{target}: {len(rows)} conversations")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
