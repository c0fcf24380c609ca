"""Arithmetic with a calculator: the tool, and an environment in which the model has to use it."""

import ast
import operator
import random
from collections.abc import Callable
from typing import Any

from pydantic import Field

from tandem.config.base import Config
from tandem.envs.conversing import use_tools
from tandem.envs.model import Model
from tandem.envs.results import Result
from tandem.types.rollout import Task

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_CHARS = 200
MAX_BITS = 4096  # of a power, which would otherwise keep the process busy for ever
SIGNS = ("+", "-", "*")


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _evaluate(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) * max(1, abs(int(left)).bit_length()) > MAX_BITS:
            raise ValueError("the power is too large")
        return OPERATORS[type(node.op)](left, right)
    raise ValueError("only numbers with + - * / // % ** and parentheses")


class CalculatorArgs(Config):
    num_terms: int = Field(default=2, ge=2)
    max_number: int = Field(default=99, ge=1)
    operators: list[str] = Field(default=["+"], min_length=1)
    num_train: int = Field(default=2048, ge=1)
    num_eval: int = Field(default=128, ge=1)
    max_turns: int = Field(default=4, ge=1)
    seed: int = 0


class CalculatorUse:
    """Work out an expression with the calculator. The reward is 1 for the right answer in the last turn."""

    Args = CalculatorArgs
    tools = (calculator,)

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        if unknown := set(self.args.operators) - set(SIGNS):
            raise ValueError(f"operators: {unknown.pop()!r} is not one of {', '.join(SIGNS)}")
        draw = random.Random(self.args.seed)
        rows = distinct(self._expression, self.args.num_eval + self.args.num_train, draw)
        tasks = [
            Task(index, [{"role": "user", "content": row}], answer=calculator(row)) for index, row in enumerate(rows)
        ]
        self.eval_tasks, self.train_tasks = tasks[: self.args.num_eval], tasks[self.args.num_eval :]

    async def rollout(self, task: Task, model: Model) -> Result:
        played = await use_tools(model, task.messages, self.tools, max_turns=self.args.max_turns)
        return played.result(float(played.ended == "answer" and played.text.strip() == task.answer))

    def _expression(self, draw: random.Random) -> str:
        numbers = [str(draw.randint(0, self.args.max_number)) for _ in range(self.args.num_terms)]
        signs = [draw.choice(self.args.operators) for _ in numbers[1:]]
        return numbers[0] + "".join(sign + number for sign, number in zip(signs, numbers[1:], strict=True))


def distinct(make: Callable[[random.Random], str], count: int, draw: random.Random) -> list[str]:
    """`count` different texts, in the order they were drawn."""
    found: dict[str, None] = {}
    for _ in range(100 * count):
        found[make(draw)] = None
        if len(found) == count:
            return list(found)
    raise ValueError(f"num_train + num_eval = {count} different tasks are needed, but only {len(found)} were found")
