"""Held-out reward of several model directories, greedy, with transformers: one JSON list, the last line.

python benchmarks/held_out.py held_out.jsonl 128 MODEL [MODEL …]
"""

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.rewards.functions import positional_match
from trl_grpo import HeldOut, load_rows


def main(rows_file: str, count: str, *models: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models[0], padding_side="left")
    held_out = HeldOut(load_rows(Path(rows_file))[: int(count)], tokenizer, positional_match, max_new_tokens=16)
    rewards = [held_out.evaluate(AutoModelForCausalLM.from_pretrained(model, dtype="float32")) for model in models]
    print(json.dumps(rewards))


if __name__ == "__main__":
    main(*sys.argv[1:])
