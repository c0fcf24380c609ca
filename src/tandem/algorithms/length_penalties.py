"""Penalties on length, before rewards become advantages: DAPO's (https://arxiv.org/abs/2503.14476), and within a group
(Kimi k1.5, https://arxiv.org/abs/2501.12599)."""

from collections.abc import Sequence

from pydantic import Field

from tandem.config.base import Config


class OverlongConfig(Config):
    """Soft penalty on completions close to sampling.max_tokens."""

    buffer_tokens: int = Field(ge=1)
    """The penalty grows linearly over this many tokens before sampling.max_tokens."""

    penalty: float = Field(default=1.0, gt=0)
    """Penalty at sampling.max_tokens, subtracted from the reward."""


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """0 up to max_tokens − buffer_tokens, then linear, up to `penalty` at max_tokens."""
    excess = num_tokens - (max_tokens - buffer_tokens)
    return penalty * min(max(excess / buffer_tokens, 0.0), 1.0)


class LengthPenaltyConfig(Config):
    """Prefer the short ones among the completions of a group."""

    weight: float = Field(default=0.1, gt=0)
    """Added to the reward: from weight / 2 for the shortest completion of the group to -weight / 2 for the longest.
    Completions below orchestrator.solved_reward only lose by it."""


def length_bonuses(lengths: Sequence[int], solved: Sequence[bool]) -> list[float]:
    """½ for the shortest completion of a group down to −½ for the longest; those that are not solved get no bonus."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    bonuses = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [bonus if is_solved else min(0.0, bonus) for bonus, is_solved in zip(bonuses, solved, strict=True)]
