"""Strategies that are found, and what they come to."""

import pytest

from tandem.rewards.politeness import STRATEGIES, politeness, strategies_in, tone

CASES = [
    ("Could you please help me", ["please", "counterfactual modal", "first person", "second person"]),
    ("Please help", ["please at the start"]),
    ("I really appreciate it", ["gratitude", "first person at the start", "factuality"]),
    ("Hello, thanks a lot", ["gratitude", "greeting"]),
    ("Nice work, by the way", ["deference", "indirect"]),
    ("SORRY, perhaps we were wrong", ["apology", "hedge", "first person plural"]),
    ("What is that", ["direct question"]),
    ("So will you", ["indicative modal", "second person", "direct start"]),
    ("Your turn", ["second person at the start"]),
    ("Get lost", ["dismissal"]),
    ("A whole pleasant thankless sofa", []),
]


@pytest.mark.parametrize(("sentence", "expected"), CASES)
def test_strategies(sentence: str, expected: list[str]) -> None:
    assert [strategy.name for strategy in strategies_in(sentence)] == expected


def test_every_strategy_is_found_somewhere() -> None:
    assert {name for _, names in CASES for name in names} == {strategy.name for strategy in STRATEGIES}


def test_tone_is_that_of_the_words() -> None:
    assert tone("This is excellent") == 0.12
    assert tone("You are an idiot") == pytest.approx(-0.8)
    assert tone("It is Tuesday") == tone("Sorry") == 0.0


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
    assert all(0 <= politeness(text * 50) <= 100 for text in texts)
