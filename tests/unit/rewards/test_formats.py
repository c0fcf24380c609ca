"""Forms of a completion that are kept, and nearly kept."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.patience import PATIENCE

from tandem.rewards.formats import check_schema, json_schema, last_fenced, regex, xml
from tandem.rewards.functions import NoAnswer
from tandem.rewards.maths import math


def test_regex() -> None:
    assert regex("so\n#### 4", pattern=r"#### \d") == 1.0
    assert regex("so 4", pattern=r"#### \d") == 0.0
    assert regex(" a\nb ", pattern="a.b", whole=True) == 1.0
    assert regex("a\nb c", pattern="a.b", whole=True) == 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>hm</think><answer>4</answer>", 1.0),
        ("  <think>\nhm\n</think>\n\n<answer>4</answer>\n", 1.0),
        ("<think>hm</think>", 0.0),
        ("hm</think><answer>4</answer>", 0.0),
        ("<think>hm</think>4</answer>", 0.0),
        ("<think> \n</think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>hm</think>", 0.0),
        ("<think>hm</think> so <answer>4</answer>", 0.0),
        ("<think>hm</think><answer>4</answer> done", 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0.0),
        ("<think>hm</think><answer>4", 0.0),
        ("<think>hm</think><answer>4</answer><answer>5</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_xml(completion: str, reward: float) -> None:
    assert xml(completion, tags=["think", "answer"]) == reward


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"age": 3}', 1.0),
        ('Here you are:\n```json\n{"age": 3}\n```\nBye.', 1.0),
        ('{"age": "3"}', 0.0),
        ("{}", 0.0),
        ('{"age": 3', 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema(completion: str, reward: float) -> None:
    assert json_schema(completion, schema=SCHEMA) == reward


def test_json_that_is_nested_too_deeply_does_not_fit() -> None:
    nested = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema("[[], [[]]]", schema=nested) == 1.0
    assert json_schema("[" * 300 + "]" * 300, schema=nested) == 0.0


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, r"\$\.type: 'objekt' is not valid"),
        ({"properties": [1]}, r"\$\.properties: \[1\] is not of type 'object'"),
        ({"items": {"pattern": "("}}, r"\$\.items\.pattern: '\(' is not a 'regex'"),
        ([1], r"\[1\] is not of type 'object', 'boolean'"),
        (["a" * 162], r"^\$: \['a+ … \[1 characters left out\] … .*'boolean'$"),
        (None, "NoneType"),
        ({"$schema": 5}, "int"),
        ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
        ({"$ref": "#"}, "refers to itself without an end"),
    ],
)
def test_what_is_no_schema(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_schema(schema)


def test_schemas() -> None:
    for schema in (SCHEMA, {}, True, {"items": {"$ref": "#"}}):
        check_schema(schema)


def test_the_last_fenced_block() -> None:
    assert last_fenced("```python\na\n``` and ```\nb\n```") == "b\n"
    assert last_fenced("none") is None
    assert last_fenced("~~~c++\r\na\r\n~~~\r\n") == "a\r\n"
    assert last_fenced("````\n```\na\n```\n````") == "```\na\n```\n"
    assert last_fenced("```\na\n~~~\nb\n```") == "a\n~~~\nb\n"
    assert last_fenced("```\n```") == ""
    assert last_fenced("```\na") is None and last_fenced("```\na\n```\n```\nb") == "a\n"


def test_a_block_ends_where_a_line_begins_with_its_fence() -> None:
    assert last_fenced("```py\na = '```'\n    ```\n   ```") == "a = '```'\n    ```\n"
    assert last_fenced("~~~{.line #n}\na ~~~\n~~~~") == "a ~~~\n"
    assert last_fenced("So: ```json\n1\n``` or so") == "1\n"
    assert last_fenced("use ```x``` and\n```py\na\n```") == "a\n"
    assert last_fenced("**Code:**```py\na\n```") == "a\n"
    assert last_fenced("- \n    ```\n    a\n      b\n   c\n    ```") == "a\n  b\n   c\n"


@pytest.mark.parametrize("line", ["a ```\n", "`" * 50_000, "``` b ", "    ```\n", " "])
def test_many_fences_take_no_longer_than_long_texts(line: str) -> None:
    started = time.process_time()
    last_fenced("```\n" + line * (1_000_000 // len(line)))
    assert time.process_time() - started < 2 * PATIENCE


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("$x = 2\\sqrt{2}$", "\\sqrt{8}", 1.0),
        ("The answer is $(x+1)^2$", "$x^2+2x+1$", 1.0),
        ("$(1,\\infty)$", "$x>1$", 1.0),  # an interval may stand for an inequality, though not the other way round
        ("$x>1$", "$(1,\\infty)$", 0.0),
        ("\\boxed{3}", "4", 0.0),
        ("I do not know", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math(completion: str, answer: str, reward: float) -> None:
    assert math(completion, answer) == reward


def test_math_is_compared_in_any_thread_without_a_word(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("parser", "grader"):  # each would say once that it has no time limit
        monkeypatch.setattr(f"math_verify.{module}.TIMEOUT_WARNING_SHOWN", False, raising=False)
    logging.getLogger("math_verify").setLevel(logging.NOTSET)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(math, "so $\\frac{1}{2}$", "\\sqrt{1/4}").result() == 1.0
    assert not caplog.records


def test_an_answer_that_is_no_expression_is_no_zero() -> None:
    with pytest.raises(NoAnswer, match="is no expression"):
        math("4", "")
