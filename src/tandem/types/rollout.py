"""What travels from the environment to the trainer, from large to small: Task, Group of Rollouts, MicroBatch."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One row of a dataset: what is asked, and what the scorer needs to judge the answer."""

    index: int
    messages: list[Message]
    answer: str
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """What the inference server returned for one sample."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Rollout:
    """A prompt with one completion and its reward."""

    prompt_ids: list[int]
    completion: Completion
    text: str
    reward: float

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion.token_ids)

    @property
    def oldest_version(self) -> int:
        return min(self.completion.versions)


@dataclass(frozen=True)
class Group:
    """All rollouts of one task: the unit of advantages and of staleness."""

    task: Task
    order: int
    rollouts: list[Rollout]

    @property
    def oldest_version(self) -> int:
        return min(rollout.oldest_version for rollout in self.rollouts)

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


@dataclass(frozen=True)
class Sample:
    """One training sequence. Every stream has one entry per token, aligned with `token_ids`:
    entry t speaks of token t, and is read only where the mask is set."""

    token_ids: list[int]
    loss_mask: list[int]
    advantages: list[float]
    logprobs: list[float]

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.advantages), len(self.logprobs)}
        assert len(lengths) == 1, f"streams of different lengths: {lengths}"
        assert not self.loss_mask[0], "the first token of a sequence has no context to be predicted from"


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed end to end; what one forward and backward pass sees.

    A sequence is one segment, or two: the beginning it shares with others, which is there once, and its own rest.
    """

    token_ids: NDArray[np.int64]  # (tokens,)
    positions: NDArray[np.int64]  # (tokens,), from 0 in each sequence
    segment_lengths: NDArray[np.int64]  # (segments,)
    segment_parents: NDArray[np.int64]  # (segments,): the segment with the shared beginning, -1 if there is none
    loss_mask: NDArray[np.bool_]  # (tokens,)
    advantages: NDArray[np.float32]  # (tokens,)
    logprobs: NDArray[np.float32]  # (tokens,), of the sampling policy

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class TrainBatch:
    """One training step's worth of micro-batches."""

    step: int
    temperature: float
    num_loss_tokens: int  # sampled tokens of the step, those without signal included: the loss is divided by this
    micro_batches: list[MicroBatch]

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(len(micro_batch.token_ids) for micro_batch in self.micro_batches)
