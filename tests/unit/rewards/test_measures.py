"""Texts measured by hand."""

import pytest

from tandem.rewards.measures import (
    FORMAL,
    INFORMAL,
    formality,
    length,
    lexical_diversity,
    num_sentences,
    num_syllables,
    politeness,
    reading_difficulty,
    words,
)


def test_words_and_sentences() -> None:
    assert words("Don't stop: it’s 3.5 km, Zoë!") == ["Don't", "stop", "it’s", "3.5", "km", "Zoë"]
    assert num_sentences("One. Two! Three? Four") == 4
    assert num_sentences("3.5 km. \n\n Next") == 2
    assert num_sentences("") == num_sentences("...") == 0
    assert length("one two") == 2 and length("") == 0


def test_reading_difficulty_is_flesch_and_kincaids() -> None:
    assert [num_syllables(word) for word in ("cat", "running", "computer")] == [1, 2, 3]
    # 9 words in 2 sentences, 10 syllables: "running" has two
    text = "The cat is running. It was on the mat."
    assert reading_difficulty(text) == pytest.approx(0.39 * 9 / 2 + 11.8 * 10 / 9 - 15.59)
    assert reading_difficulty("") == 0.0
    hard = "Institutional ramifications notwithstanding, administrative considerations necessitate reorganization."
    assert reading_difficulty(hard) > reading_difficulty(text) + 10


def test_lexical_diversity_is_mtld() -> None:
    # a b a: 2/3 < 0.72 ends a segment at the third word, so two segments in six words, both ways
    assert lexical_diversity("a b a a b a") == 3.0
    # a b c d a: 4/5; the rest counts as (1 − 0.8) / (1 − 0.72) of a segment
    assert lexical_diversity("a b c d a") == pytest.approx(5 / (0.2 / 0.28))
    assert lexical_diversity("all words differ here") == 4.0
    assert lexical_diversity("") == 0.0


def test_formality() -> None:
    # ten words of 4.7 letters on average, one of them formal: 50 + 2 · 10
    assert formality("therefore aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaaaa") == pytest.approx(70.0)
    texts = ["hey dude, it's gonna be cool!", "We met at noon.", "The committee shall therefore convene."]
    assert formality(texts[0]) < formality(texts[1]) < formality(texts[2])
    assert formality("") == 50.0
    assert not FORMAL & INFORMAL


def test_politeness() -> None:
    assert politeness("Could you please help? I wait.") == pytest.approx(50 + 25 * 2 / 2)
    assert politeness("Shut up.") == 25.0
    assert politeness("Please shut up, you idiot, and go away.") == 0.0
    assert politeness("It rains.") == politeness("") == 50.0
    assert politeness("He was pleased.") == 50.0  # only whole words
