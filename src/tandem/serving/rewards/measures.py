"""What a text is like, as numbers: length, reading difficulty, lexical diversity, formality. English.

The formulas are published ones; what they count is counted by libraries (extra `goals`): pyphen syllables,
lexicalrichness segments of distinct words, TextBlob parts of speech, all from data within their packages.
"""

import re
from collections import Counter
from functools import cache, lru_cache
from typing import Any

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+(?:[.,]\d+)*")
SENTENCE_END = re.compile(r"[.!?…]+(?=\s|[\"'”’)\]]|$)|\n\s*\n")
# Penn tokens: do n't, it 's, we 've
CONTRACTION = re.compile(r"(?<=\w)(n't|'(?:s|re|ve|ll|d|m))\b", re.IGNORECASE)
# McCarthy and Jarvis: the type-token ratio at which a segment ends.
MTLD_THRESHOLD = 0.72
# Heylighen and Dewaele: what says all in the text, and what leans on the situation. Penn tags, by their beginnings.
FORMAL = ("NN", "JJ", "IN")
CONTEXTUAL = ("PRP", "WP", "EX", "VB", "MD", "RB", "WRB", "UH")
ARTICLES = {"a", "an", "the"}


def words(text: str) -> list[str]:
    return WORD.findall(text)


def sentences(text: str) -> list[str]:
    """Those with words in them."""
    return [part for part in SENTENCE_END.split(text) if WORD.search(part)]


def length(text: str) -> float:
    """Words."""
    return len(words(text))


def reading_difficulty(text: str) -> float:
    """Flesch–Kincaid grade: 0.39 words/sentences + 11.8 syllables/words − 15.59; 0 for a text without words."""
    found = words(text)
    if not found:
        return 0.0
    syllables = sum(num_syllables(word) for word in found)
    return 0.39 * len(found) / len(sentences(text)) + 11.8 * syllables / len(found) - 15.59


def lexical_diversity(text: str) -> float:
    """MTLD: mean length of segments in which the share of distinct words stays above 0.72, read in both directions."""
    from lexicalrichness import LexicalRichness

    found = [word.lower() for word in words(text)]
    if not found:
        return 0.0
    return LexicalRichness(found, preprocessor=None, tokenizer=None).mtld(threshold=MTLD_THRESHOLD)


def formality(text: str) -> float:
    """Heylighen and Dewaele's F: 50 (1 + (formal − contextual words) / words); 50 for a text without words.

    Formal are nouns, adjectives, prepositions and articles; contextual are pronouns, verbs, adverbs and interjections.
    """
    tagged = tag(text)
    if not tagged:
        return 50.0
    counts = Counter(_kind(word, tag) for word, tag in tagged)
    return 50 * (1 + (counts["formal"] - counts["contextual"]) / len(tagged))


def tag(text: str) -> list[tuple[str, str]]:
    """Words with their Penn part-of-speech tags. A contraction is two words."""
    from textblob.en import tag as tag_tokens

    lines = [" ".join(_tokens(sentence)) for sentence in sentences(text)]
    return tag_tokens("\n".join(lines), tokenize=False) if lines else []


@lru_cache(maxsize=100_000)
def num_syllables(word: str) -> int:
    return len(hyphenation().positions(word)) + 1


@cache
def hyphenation() -> Any:
    import pyphen

    return pyphen.Pyphen(lang="en_US")


def _tokens(sentence: str) -> list[str]:
    return [token for word in words(sentence) for token in CONTRACTION.sub(r" \1", word.replace("’", "'")).split()]


def _kind(word: str, tag: str) -> str:
    if tag.startswith(FORMAL) or word.lower() in ARTICLES:
        return "formal"
    return "contextual" if tag.startswith(CONTEXTUAL) else "neither"
