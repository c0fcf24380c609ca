"""Texts measured by hand."""

import pytest

from tandem.serving.rewards.measures import (
    formality,
    length,
    lexical_diversity,
    num_syllables,
    reading_difficulty,
    sentences,
    tag,
    words,
)


def test_words_and_sentences() -> None:
    assert words("Don't stop: it’s 3.5 km, Zoë!") == ["Don't", "stop", "it’s", "3.5", "km", "Zoë"]
    assert sentences("One. Two! Three? Four") == ["One", " Two", " Three", " Four"]
    assert len(sentences("3.5 km. \n\n Next")) == 2
    assert sentences("") == sentences("...") == []
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
    assert lexical_diversity("a b a, A b a") == 3.0
    # a b c d a: 4/5; the rest counts as (1 − 0.8) / (1 − 0.72) of a segment
    assert lexical_diversity("a b c d a") == pytest.approx(5 / (0.2 / 0.28))
    assert lexical_diversity("all words differ here") == 4.0
    assert lexical_diversity("") == lexical_diversity("...") == 0.0


def test_words_are_tagged_a_contraction_as_two() -> None:
    assert [tag for _, tag in tag("The cat didn’t sleep.")] == ["DT", "NN", "VBD", "RB", "VB"]
    assert [word for word, _ in tag("Can't we? It's 3.5/4!")] == ["Ca", "n't", "we", "It", "'s", "3.5", "4"]
    assert tag("") == tag("?!") == []


def test_formality_is_heylighen_and_dewaeles() -> None:
    # the, decision, of, the, court: formal; stands: a verb
    assert formality("The decision of the court stands.") == pytest.approx(50 * (1 + (5 - 1) / 6))
    # I, really, do, n't, know: contextual; and: neither
    assert formality("And I really don't know.") == pytest.approx(50 * (1 - 5 / 6))
    talk = "Yeah, I know, and you really should see it, because it is so much better now."
    report = "The rejection of the annual proposal by the members of the board reflects a lack of sufficient funds."
    assert formality(talk) < 30 and formality(report) > 80
    assert formality("") == formality("...") == 50.0
