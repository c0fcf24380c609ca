"""How polite a text is: the strategies of Danescu-Niculescu-Mizil et al. (2013), each with the effect measured there.

People rated requests; the effect of a strategy is in standard deviations of their ratings. Requests have few insults,
so two things are ours: dismissals, and unpleasant words, which count by how unpleasant they are (there −0.13 each).
Which words are pleasant or unpleasant is what TextBlob's lexicon says (extra `goals`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tandem.serving.rewards.measures import sentences, words

NEUTRAL, LEAST, MOST = 50.0, 0.0, 100.0
POINTS = 25.0  # for one standard deviation
POSITIVE_EFFECT = 0.12
UNPLEASANT, PLEASANT = -0.1, 0.1  # polarities, from −1 to 1

APOLOGIES = "sorry|woops|oops|i apologi[sz]e|apologies|forgive me|excuse me|pardon me"
HEDGES = (
    "perhaps maybe possibly probably presumably apparently arguably seemingly somewhat roughly likely unlikely might "
    "may seems? appears? tends? suppose guess think believe feel assume suspect suggest"
)


def _anywhere(phrases: str) -> Callable[[str], bool]:
    """Any of these phrases, which are parted by bars."""
    return partial(_has, re.compile(rf"\b(?:{phrases})\b"))


def _at_start(phrases: str) -> Callable[[str], bool]:
    return partial(_has, re.compile(rf"^(?:{phrases})\b"))


def _after_start(phrases: str) -> Callable[[str], bool]:
    return partial(_has, re.compile(rf"(?<= )(?:{phrases})\b"))


def _has(pattern: re.Pattern[str], sentence: str) -> bool:
    return pattern.search(sentence) is not None


@dataclass(frozen=True)
class Strategy:
    """`is_in` is asked of a sentence in lower case, with one space between words and nothing else."""

    name: str
    effect: float
    is_in: Callable[[str], bool]


STRATEGIES = (
    Strategy("gratitude", 0.87, _anywhere("thanks?|thank you|i (?:really )?appreciate|grateful")),
    Strategy("deference", 0.78, _at_start("great|good|nice|interesting|cool|excellent|awesome")),
    Strategy("indirect", 0.63, _anywhere("by the way|btw")),
    Strategy("please", 0.49, _after_start("please")),
    Strategy("counterfactual modal", 0.47, _anywhere("(?:could|would) you")),
    Strategy("greeting", 0.43, _at_start("hi|hello|hey")),
    Strategy("apology", 0.36, _anywhere(APOLOGIES)),
    Strategy("hedge", 0.14, _anywhere(HEDGES.replace(" ", "|"))),
    Strategy("first person at the start", 0.12, _at_start("i|my|mine|myself")),
    Strategy("indicative modal", 0.09, _anywhere("(?:can|will) you")),
    Strategy("first person plural", 0.08, _anywhere("we|us|our|ours|ourselves")),
    Strategy("first person", 0.08, _after_start("i|me|my|mine|myself")),
    Strategy("second person", 0.05, _after_start("you|your|yours|yourself")),
    Strategy("direct question", -0.27, _at_start("what|why|who|how")),
    Strategy("please at the start", -0.30, _at_start("please")),
    Strategy("second person at the start", -0.30, _at_start("you|your|yours|yourself")),
    Strategy("factuality", -0.38, _anywhere("in fact|the truth|the reality|the point|really|actually|honestly|surely")),
    Strategy("direct start", -0.43, _at_start("so|then|and|but|or")),
    Strategy("dismissal", -1.0, _anywhere("shut up|go away|get lost|hurry up|none of your business")),
)


def politeness(text: str) -> float:
    """50 + 25 (mean effect of a sentence, in standard deviations), from 0 to 100; 50 for a text without words."""
    effects = [effect_of(sentence) for sentence in sentences(text)]
    return min(max(NEUTRAL + POINTS * sum(effects) / len(effects), LEAST), MOST) if effects else NEUTRAL


def effect_of(sentence: str) -> float:
    return sum(strategy.effect for strategy in strategies_in(sentence)) + tone(sentence)


def strategies_in(sentence: str) -> list[Strategy]:
    plain = _plain(sentence)
    return [strategy for strategy in STRATEGIES if strategy.is_in(plain)]


def tone(sentence: str) -> float:
    """The effect of pleasant words, or of unpleasant ones; those of an apology are neither."""
    from textblob.en import polarity

    value: float = polarity(re.sub(rf"\b(?:{APOLOGIES})\b", "", _plain(sentence)))
    if value >= PLEASANT:
        return POSITIVE_EFFECT
    return value if value <= UNPLEASANT else 0.0


def _plain(sentence: str) -> str:
    return " ".join(words(sentence.lower()))
