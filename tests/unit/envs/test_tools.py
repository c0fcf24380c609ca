"""Tools: schemas from functions, calls that check their arguments, and the calculator."""

import asyncio
from typing import Literal

import pytest

from tandem.envs.calculator import calculator
from tandem.envs.tools import as_schema, call_tool, function_schema


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, int]:
    """The weather in a city,
    as it will be.

    More that the model need not know.

    Args:
        city: its name
        days (int): how many days ahead

    Returns:
        nothing: of interest
    """
    if city == "Atlantis":
        raise LookupError("no such city")
    return {"degrees": 20 + days}


async def wait(seconds: float) -> str:
    await asyncio.sleep(0)
    return "waited"


def test_a_schema_says_what_signature_and_docstring_say() -> None:
    assert function_schema(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, as it will be.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "days": {"type": "integer", "default": 1, "description": "how many days ahead"},
                    "unit": {"type": "string", "default": "C", "enum": ["C", "F"]},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    assert as_schema({"type": "function"}) == {"type": "function"}


def test_a_function_that_takes_anything_is_no_tool() -> None:
    def anything(*values: int) -> int:
        return sum(values)

    with pytest.raises(ValueError, match="named arguments only; anything has"):
        function_schema(anything)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"city": "Rome"}, '{"degrees":21}'),
        ({"city": "Rome", "days": "2"}, '{"degrees":22}'),
        ({}, "Error: city: Field required"),
        ({"city": "Rome", "unit": "K"}, "Error: unit: Input should be 'C' or 'F'"),
        ({"city": "Rome", "planet": "Mars"}, "Error: planet: Extra inputs are not permitted"),
        ({"city": "Atlantis"}, "Error: no such city"),
    ],
)
def test_what_a_tool_says_is_text_for_the_model_mistakes_included(arguments: dict, said: str) -> None:
    assert asyncio.run(call_tool(weather, arguments)) == said


def test_an_async_tool() -> None:
    assert asyncio.run(call_tool(wait, {"seconds": 1})) == "waited"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("-2**2", "-4"),
        ("7 % 4 // 2", "1"),
        ("05", ""),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    if value:
        assert calculator(expression) == value
    else:
        with pytest.raises(ValueError, match="not an arithmetic expression"):
            calculator(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').getcwd()",
        "9**9**9",
        "2**100000",
        "(1).real",
        "[1]",
        "'a'*9",
        "1e308**2",
        "x",
        "1/0",
        "(" * 150,
        "1" * 300,
    ],
)
def test_the_calculator_does_nothing_else_and_always_ends(expression: str) -> None:
    said = asyncio.run(call_tool(calculator, {"expression": expression}))
    assert said.startswith("Error: ")
