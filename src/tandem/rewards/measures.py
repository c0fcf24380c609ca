"""What a text is like, as numbers: length, reading difficulty, lexical diversity, formality, politeness. Pure; English.

Syllables are pyphen's. Formality and politeness count words and phrases of the lists below, which are ours: they are
quick and easy to explain, and easier to fool than a trained classifier, which can be brought as a goal instead.
"""

import re
from functools import cache, lru_cache
from typing import Any

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*|\d+(?:[.,]\d+)*")
SENTENCE_END = re.compile(r"[.!?…]+(?=\s|[\"'”’)\]]|$)|\n\s*\n")
CONTRACTION = re.compile(r"\w['’](?:s|re|ve|ll|d|m|t)\b", re.IGNORECASE)
# McCarthy and Jarvis: the type-token ratio at which a segment ends.
MTLD_THRESHOLD = 0.72
NEUTRAL, LEAST, MOST = 50.0, 0.0, 100.0


def _listed(text: str) -> frozenset[str]:
    return frozenset(text.split())


FORMAL = _listed(
    "accordingly albeit appropriate approximately concerning consequently constitute demonstrate furthermore hence "
    "henceforth herein however indeed inquire likewise moreover nevertheless nonetheless notwithstanding obtain "
    "pertaining prior pursuant regarding regards require respectively shall subsequently sufficient therefore thereby "
    "thus upon utilize whereas whereby wherein whom"
)
INFORMAL = _listed(
    "anyway awesome bro bucks buddy cool cuz damn dude dunno folks gonna gosh gotta guy guys haha hey hi hmm huh kid "
    "kids kinda lol lots ok okay oops pretty stuff super sorta thing things tons totally um wanna whatever wow yeah "
    "yep yikes yo"
)
PERSONAL = _listed("i me my mine we us our you your yours")
POLITE = (
    *("please", "thank you", "thanks", "sorry", "pardon", "excuse me", "kindly", "grateful", "appreciate"),
    *(
        "could you",
        "would you",
        "may i",
        "might i",
        "would it be",
        "if you don't mind",
        "you're welcome",
        "you are welcome",
    ),
    *("my apologies", "i apologize", "with pleasure", "dear", "best regards", "happy to", "glad to", "much obliged"),
)
IMPOLITE = (
    *("shut up", "stupid", "idiot", "idiotic", "moron", "dumb", "nonsense", "ridiculous", "garbage", "pathetic"),
    *("hate you", "go away", "get lost", "you must", "you had better", "or else", "hurry up", "damn", "hell", "crap"),
    *("whatever", "useless", "lazy", "liar", "loser", "your fault", "i don't care", "none of your business"),
)


def words(text: str) -> list[str]:
    return WORD.findall(text)


def num_sentences(text: str) -> int:
    """At least one where there are words."""
    parts = [part for part in SENTENCE_END.split(text) if WORD.search(part)]
    return len(parts)


def length(text: str) -> float:
    """Words."""
    return float(len(words(text)))


def reading_difficulty(text: str) -> float:
    """Flesch–Kincaid grade: 0.39 words/sentences + 11.8 syllables/words − 15.59; 0 for a text without words."""
    found = words(text)
    if not found:
        return 0.0
    syllables = sum(num_syllables(word.lower()) for word in found)
    return 0.39 * len(found) / num_sentences(text) + 11.8 * syllables / len(found) - 15.59


def lexical_diversity(text: str) -> float:
    """MTLD: mean length of segments in which the share of distinct words stays above 0.72, read in both directions."""
    found = [word.lower() for word in words(text)]
    return (_mtld(found) + _mtld(found[::-1])) / 2 if found else 0.0


def _mtld(found: list[str]) -> float:
    num_segments, seen, size = 0.0, set[str](), 0
    for word in found:
        seen.add(word)
        size += 1
        if len(seen) / size < MTLD_THRESHOLD:
            num_segments, seen, size = num_segments + 1, set(), 0
    if size:  # the part of a segment that is left at the end
        num_segments += (1 - len(seen) / size) / (1 - MTLD_THRESHOLD)
    return len(found) / num_segments if num_segments else float(len(found))


def formality(text: str) -> float:
    """50 + 2 (formal − informal words in a hundred) + 8 (mean letters of a word − 4.7), from 0 to 100.

    Informal are slang, contractions, exclamation marks and, by half, I, we and you.
    """
    found = [word.lower() for word in words(text)]
    if not found:
        return NEUTRAL
    formal = sum(word in FORMAL for word in found)
    personal = sum(word in PERSONAL for word in found)
    informal = sum(word in INFORMAL for word in found) + len(CONTRACTION.findall(text)) + text.count("!")
    balance = 100 * (formal - informal - personal / 2) / len(found)
    letters = sum(map(len, found)) / len(found)
    return _bounded(NEUTRAL + 2 * balance + 8 * (letters - 4.7))


def politeness(text: str) -> float:
    """50 + 25 (polite − impolite phrases in a sentence), from 0 to 100."""
    count = num_sentences(text)
    if not count:
        return NEUTRAL
    plain = text.lower().replace("’", "'")
    balance = len(_phrases(POLITE).findall(plain)) - len(_phrases(IMPOLITE).findall(plain))
    return _bounded(NEUTRAL + 25 * balance / count)


@lru_cache(maxsize=100_000)
def num_syllables(word: str) -> int:
    return len(_hyphenation().positions(word)) + 1


@cache
def _hyphenation() -> Any:
    import pyphen

    return pyphen.Pyphen(lang="en_US")


@cache
def _phrases(listed: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, listed))})\b")


def _bounded(value: float) -> float:
    return min(max(value, LEAST), MOST)
