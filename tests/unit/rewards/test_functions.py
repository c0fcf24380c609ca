"""Rewards by hand."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.rewards.formats import json_schema, regex, xml
from tandem.rewards.functions import (
    NoAnswer,
    exact_match,
    last_number,
    lcs_ratio,
    length,
    longest_common_subsequence,
    normalized_match,
    numeric,
    positional_match,
)
from tandem.rewards.maths import math


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("abcd", "abcd", 1.0),
        ("abxd", "abcd", 0.75),
        ("ab", "abcd", 0.5),
        ("abcdabcd", "abcd", 0.5),  # extra text costs
        ("bcda", "abcd", 0.0),  # every letter is right, none is in its place
        ("", "abcd", 0.0),
        ("", "", 1.0),
    ],
)
def test_positional_match(completion: str, answer: str, reward: float) -> None:
    assert positional_match(completion, answer) == reward


def test_exact_match() -> None:
    assert exact_match(" abc\n", "abc") == exact_match("abc", "abc ") == 1.0
    assert exact_match("ab c", "abc") == 0.0


def test_what_is_compared_can_be_extracted() -> None:
    pattern = r"<answer>(.*?)</answer>"
    assert exact_match("<answer>1</answer> no: <answer>\n2</answer>", "2", extract=pattern) == 1.0
    assert exact_match("2", "2", extract=pattern) == 0.0
    assert exact_match("so it is 42.", "42", extract=r"\d+") == 1.0
    assert normalized_match("<answer>The End!</answer>", "end", extract=pattern) == 1.0
    assert numeric("12 <answer>7</answer> 13", "7", extract=pattern) == 1.0
    assert numeric("7", "7", extract=pattern) == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The Eiffel-Tower!", "eiffel tower", 1.0),
        ("  an  ANSWER ", "answer", 1.0),
        ("ｆｕｌｌ width", "Full  width.", 1.0),
        ("the", "the", 1.0),
        ("the", "a", 0.0),  # articles are all there is
        ("Paris, France", "Paris", 0.0),
    ],
)
def test_normalized_match(completion: str, answer: str, reward: float) -> None:
    assert normalized_match(completion, answer) == reward


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72.0),
        ("It is $1,234,567.50.", 1234567.5),
        ("#### -3", -3.0),
        ("between 3-5", 5.0),
        ("x = −4", -4.0),
        ("6.02e23 of them", 6.02e23),
        ("costs .5", 0.5),
        ("-.5", -0.5),
        ("x = −.5e1", -5.0),
        ("+.25", 0.25),
        ("between 3-.5", 0.5),
        ("in 2,3", 3.0),
        ("18. ", 18.0),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_within_a_tolerance() -> None:
    assert numeric("so 3.1415", "3.1416") == 0.0
    assert numeric("so 3.1415", "3.1416", tolerance=1e-3) == 1.0
    assert numeric("99", "100", relative=0.01) == 1.0
    assert numeric("98.9", "100", relative=0.01) == 0.0
    assert numeric("-99", "-100", relative=0.01) == 1.0
    assert numeric("I do not know", "5") == 0.0
    assert numeric("She has 8 + 4 = 12 apples.", "8 + 4 = <<8+4=12>>12\n#### 12") == 1.0  # as GSM8K writes answers
    with pytest.raises(NoAnswer, match="the answer of the task, 'blue', has no number"):
        numeric("5", "blue")


def test_infinity_is_near_nothing() -> None:
    assert numeric("1e999", "5", relative=0.1) == 0.0
    assert numeric("1e999", "1e308", relative=10) == 0.0
    for answer in ("1e999", "-1e999", "9" * 400):
        with pytest.raises(NoAnswer, match="is too large for a float"):
            numeric("5", answer, relative=0.1)


@pytest.mark.parametrize(
    ("completion", "options", "reward"),
    [
        ("", {}, 1.0),
        ("one two three", {"least": 3}, 1.0),
        ("one two", {"least": 3}, 0.0),
        ("one two", {"least": 3, "slack": 1}, 0.5),
        ("one two three four", {"most": 3, "slack": 3}, 0.75),
        ("a b c d e f g h", {"most": 3, "slack": 3}, 0.0),
        ("abc", {"least": 2, "most": 3, "unit": "characters"}, 1.0),
        ("abcd", {"least": 2, "most": 3, "unit": "characters"}, 0.0),
    ],
)
def test_length(completion: str, options: dict, reward: float) -> None:
    assert length(completion, "", **options) == reward


def test_lcs_ratio() -> None:
    assert lcs_ratio("abcbdab", "bdcaba") == pytest.approx(2 * 4 / 13)
    assert lcs_ratio("the cat sat", "the dog sat down", unit="words") == pytest.approx(2 * 2 / 7)
    assert lcs_ratio("", "") == 1.0
    assert lcs_ratio("abc", "") == 0.0


@settings(max_examples=100)
@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_longest_common_subsequence_is_that_of_the_usual_table(first: str, second: str) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if a == b else max(table[i][j + 1], table[i + 1][j])
    assert longest_common_subsequence(first, second) == table[-1][-1]


@settings(max_examples=50)
@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_rewards_lie_between_0_and_1_and_only_the_answer_gets_1(completion: str, answer: str) -> None:
    for reward in (positional_match, lcs_ratio):
        assert 0 <= reward(completion, answer) <= 1
        assert (reward(completion, answer) == 1) == (completion == answer)


@settings(max_examples=100)
@given(st.text("0123456789.,-+eE x", max_size=20))
def test_any_text_has_a_last_number_or_none(text: str) -> None:
    number = last_number(text)
    assert (number is None) == (re.search(r"\d", text) is None)


@pytest.mark.parametrize(
    "reward",
    [
        exact_match("4", "4"),
        normalized_match("4", "4"),
        numeric("4", "4"),
        regex("4", pattern="4"),
        xml("<a>4</a>", tags=["a"]),
        json_schema("4", schema={}),
        math("4", "4"),
    ],
)
def test_what_either_holds_or_does_not_is_1_as_a_float(reward: float) -> None:
    assert reward == 1.0 and type(reward) is float
