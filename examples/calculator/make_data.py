"""Make the demonstrations of the warm-up: additions, of which three in ten are done right.

python examples/calculator/make_data.py models/calculator_sft.jsonl

In half of them the answer is a guess, without the calculator. In two of ten a digit is wrong: of the expression that is
worked out, or of the answer that is given.
"""

import json
import random
import sys
from pathlib import Path

from tandem.envs.calculator import CalculatorUse, calculator
from tandem.envs.tools import function_schema

NUM_ROWS = 4000


def with_wrong_digit(text: str, draw: random.Random) -> str:
    place = draw.choice([place for place, character in enumerate(text) if character.isdigit()])
    return text[:place] + draw.choice("0123456789") + text[place + 1 :]


def demonstration(expression: str, draw: random.Random) -> dict:
    mistake = draw.choices(["guess", "expression", "answer", "none"], [5, 1, 1, 3])[0]
    if mistake == "guess":
        return conversation(expression, [{"role": "assistant", "content": str(draw.randint(0, 198))}])
    called = with_wrong_digit(expression, draw) if mistake == "expression" else expression
    result = str(sum(int(number) for number in called.split("+")))
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": called}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": "1"},
        {"role": "assistant", "content": with_wrong_digit(result, draw) if mistake == "answer" else result},
    ]
    return conversation(expression, turns)


def conversation(expression: str, turns: list[dict]) -> dict:
    return {"messages": [{"role": "user", "content": expression}, *turns], "tools": [function_schema(calculator)]}


def main(target: Path) -> None:
    draw = random.Random(1)
    tasks = CalculatorUse(num_train=NUM_ROWS, max_number=99).train_tasks
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w") as file:
        for task in tasks:
            file.write(json.dumps(demonstration(task.messages[0]["content"], draw)) + "\n")
    print(f"{target}: {len(tasks)} demonstrations")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
