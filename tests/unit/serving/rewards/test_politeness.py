"""Strategies that are found, and what they come to."""

import pytest

from tandem.serving.rewards.politeness import STRATEGIES, effect_of, politeness, strategies_in, tone

CASES = [
    ("Could you please help me", ["please", "counterfactual modal", "first person", "second person"], 1.09),
    ("Please help", ["please at the start"], -0.3),
    ("I really appreciate it", ["gratitude", "first person at the start", "factuality"], 0.87 + 0.12 - 0.38 + 0.12),
    ("Hello, thanks a lot", ["gratitude", "greeting"], 0.87 + 0.43 + 0.12),
    ("Nice work, by the way", ["deference", "indirect"], 0.78 + 0.63 + 0.12),
    ("SORRY, perhaps we were wrong", ["apology", "hedge", "first person plural"], 0.36 + 0.14 + 0.08 - 0.5),
    ("Would you", ["counterfactual modal", "second person"], 0.47 + 0.05),
    ("Perhaps", ["hedge"], 0.14),
    ("We hear my song", ["first person plural", "first person"], 0.08 + 0.08),
    ("What is that", ["direct question"], -0.27),
    ("So will you", ["indicative modal", "second person", "direct start"], 0.09 + 0.05 - 0.43),
    ("Your turn", ["second person at the start"], -0.3),
    ("Get lost", ["dismissal"], -1.0),
    ("A whole pleasant thankless sofa", [], 0.12),
]


@pytest.mark.parametrize(("sentence", "expected", "effect"), CASES)
def test_strategies(sentence: str, expected: list[str], effect: float) -> None:
    """The effects are those of table 3 of the paper, or ours, plus that of the words."""
    assert [strategy.name for strategy in strategies_in(sentence)] == expected
    assert effect_of(sentence) == pytest.approx(effect)


def test_every_strategy_is_found_somewhere() -> None:
    assert {name for _, names, _ in CASES for name in names} == {strategy.name for strategy in STRATEGIES}


def test_tone_is_that_of_the_words() -> None:
    assert tone("This is excellent") == 0.12
    assert tone("You are an idiot") == pytest.approx(-0.8)
    assert tone("It is Tuesday") == tone("Sorry") == 0.0


def test_words_that_are_hardly_pleasant_or_unpleasant_are_neither() -> None:
    assert tone("A busy street") == 0.12  # polarity 0.1
    assert tone("An arbitrary number") == -0.1
    assert tone("A broad valley") == tone("A dry valley") == 0.0  # 0.06 and −0.07


def test_a_text_is_the_mean_of_its_sentences() -> None:
    assert politeness("Would you come? It rains.") == pytest.approx(50 + 25 * (0.47 + 0.05) / 2)
    assert politeness("It rains.") == politeness("") == politeness("?!") == 50.0


def test_polite_neutral_and_rude_texts_are_in_this_order() -> None:
    texts = [
        "Shut up, you stupid, useless idiot. You disgust me.",
        "What do you want? So do it.",
        "The train leaves at nine.",
        "Hello! Thank you so much for your help. Could you perhaps look at this, please?",
    ]
    scores = [politeness(text) for text in texts]
    assert scores == sorted(scores)
    assert scores[0] < 30 < scores[1] < 50 == scores[2] and scores[3] > 65


def test_no_text_is_beyond_either_end() -> None:
    assert politeness("So shut up, you stupid, useless idiot, actually.") == 0.0
    assert politeness("Good, thanks, by the way could you please, sorry.") == 100.0
