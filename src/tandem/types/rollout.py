"""What travels from the environment to the trainer, from large to small: Task, Group of Rollouts, PackedBatch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]
# Servers write −9999 for a log-prob of minus infinity, which JSON cannot.
LEAST_LOGPROB = -9999.0
# Rounding may put the log-prob of a certain token above zero.
MOST_LOGPROB = 1e-3


@dataclass(frozen=True)
class Task:
    """One row of a dataset: what is asked, and what the reward function needs to score the answer."""

    index: int
    messages: list[Message]
    answer: str
    info: dict[str, Any] = field(default_factory=dict)
    environment: str = ""  # its name where several are mixed; told by the configuration

    @property
    def identity(self) -> dict[str, Any]:
        """By which files tell it from others. Where environments are mixed, each counts its own tasks."""
        return ({"env": self.environment} if self.environment else {}) | {"task": self.index}

    @property
    def label(self) -> str:
        """The same, in a message."""
        return f"{self.index} of {self.environment}" if self.environment else str(self.index)


@dataclass(frozen=True)
class SamplingOptions:
    """What completions are drawn from and where they end, besides temperature and length; by default, all tokens."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


ALL_TOKENS = SamplingOptions()


@dataclass(frozen=True)
class SamplingRequest:
    """How many completions of a prompt are drawn, and how."""

    n: int
    max_tokens: int
    temperature: float
    seed: int
    options: SamplingOptions = ALL_TOKENS
    session: int | None = (
        None  # requests with the same one begin alike: a server that has met one has its prefix cached
    )
    is_trained_on: bool = False  # with truncation, the trainer needs the kept tokens


@dataclass(frozen=True)
class Kept:
    """The kept tokens at every token of a completion: top_p, top_k and min_p left these to sample from."""

    token_ids: Sequence[Sequence[int]]  # empty: all
    logprobs: list[float]  # of each token among those


@dataclass(frozen=True)
class Completion:
    """What the inference server returned for one sample."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    stop: str | None = None  # the stop string that ended it; its tokens are among the others
    kept: Kept | None = None  # None: sampled without truncation, or the engine does not report them

    @property
    def sampled_logprobs(self) -> list[float]:
        """Log-probs under the truncated distribution, if the engine reports the kept tokens."""
        return self.logprobs if self.kept is None else self.kept.logprobs


def require_drawn(token_ids: Sequence[int], kept: Kept, where: str) -> None:
    """ValueError unless every token is one of the kept tokens."""
    if not len(token_ids) == len(kept.token_ids) == len(kept.logprobs):
        raise ValueError(f"{where}: {len(token_ids)} tokens, but kept tokens for {len(kept.token_ids)}")
    for place, (token, left) in enumerate(zip(token_ids, kept.token_ids, strict=True)):
        if left and token not in left:
            raise ValueError(f"{where}: token {place} is {token}, which is not one of the kept tokens")


def require_logprobs(logprobs: Sequence[float | None] | NDArray[np.float32], where: str) -> None:
    """ValueError unless each can be the log-prob of a sampled token; ratios to others are meaningless."""
    if isinstance(logprobs, list) and _are_usable(logprobs):
        return
    values = np.asarray(logprobs, dtype=np.float64)  # None becomes NaN
    unusable = np.flatnonzero(~((values > LEAST_LOGPROB) & (values <= MOST_LOGPROB)))
    if len(unusable):
        raise ValueError(
            f"{where}: the log-prob of a sampled token must be finite and not above 0; token {unusable[0]} of "
            f"{len(values)} has {values[unusable[0]]:g}"
        )


def _are_usable(logprobs: list[Any]) -> bool:
    """Whether they are for sure, without making an array, which takes longer than a short list does."""
    try:
        has_no_nan = sum(logprobs) <= 0
        return has_no_nan and min(logprobs, default=0) > LEAST_LOGPROB and max(logprobs, default=0) <= MOST_LOGPROB
    except TypeError:  # None
        return False


@dataclass(frozen=True)
class Turn:
    """What the model wrote at one place of a conversation, and the tokens that came before it since its last turn."""

    context_ids: list[int]  # the prompt, or what users and tools said since
    completion: Completion
    begins_sequence: bool = False  # `context_ids` is a whole prompt: it does not continue the turn before


@dataclass(frozen=True)
class Rollout:
    """A trajectory: what the model wrote for one task, and its reward.

    A single turn is a prompt and a completion. A conversation has `later` turns. Token ids of one turn are the
    beginning of the next turn's prompt, so a conversation is one sequence to train on; where the chat template writes
    earlier turns otherwise, another sequence begins."""

    prompt_ids: list[int]
    completion: Completion
    text: str  # what the model said last
    reward: float  # in all
    later: Sequence[Turn] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)  # the parts of `reward`, if they have names
    earned_before: Sequence[float] = ()  # each turn, by the turns before it, of `reward`; empty: nothing
    metrics: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""  # why a conversation ended, in a word
    messages: Sequence[Message] = ()  # of a conversation, after those of the task
    is_trained: bool = True  # False: it counts in the group's advantages only

    @property
    def turns(self) -> list[Turn]:
        return [Turn(self.prompt_ids, self.completion, begins_sequence=True), *self.later]

    @property
    def sequences(self) -> list[list[Turn]]:
        """The turns of each sequence to train on."""
        sequences: list[list[Turn]] = []
        for turn in self.turns:
            if turn.begins_sequence:
                sequences.append([])
            sequences[-1].append(turn)
        return sequences

    @property
    def earned(self) -> Sequence[float]:
        """What had been earned before each turn."""
        return self.earned_before or [0.0] * len(self.turns)

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def longest_turn(self) -> int:
        return max(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def is_truncated(self) -> bool:
        return any(turn.completion.finish_reason == "length" for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        return min(version for turn in self.turns for version in turn.completion.versions)


@dataclass(frozen=True)
class Group:
    """All rollouts of one task: the unit of advantages and of staleness."""

    task: Task
    group_id: int
    rollouts: list[Rollout]
    generate_s: float = 0.0  # how long the server took, over all attempts; of conversations all that they took
    score_s: float = 0.0  # how long the reward function took

    @property
    def oldest_version(self) -> int:
        return min(rollout.oldest_version for rollout in self.rollouts)

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


@dataclass(frozen=True)
class TrainingSequence:
    """One training sequence. The mask and every stream have one entry per token: entry t speaks of token t,
    and streams are read only where the mask is set."""

    token_ids: list[int]
    loss_mask: list[int]
    streams: Mapping[str, list[float]] = field(default_factory=dict)
    kept: Sequence[Sequence[int]] = ()  # kept tokens at every token, empty where all were; or no entries

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), *map(len, self.streams.values())}
        lengths |= {len(self.kept)} if self.kept else set()
        assert len(lengths) == 1, f"streams of different lengths: {lengths}"
        assert not self.loss_mask[0], "the first token of a sequence has no context to be predicted from"

    @property
    def num_context_tokens(self) -> int:
        """Tokens before the first one that is learned."""
        return self.loss_mask.index(1) if 1 in self.loss_mask else len(self.loss_mask)


@dataclass(frozen=True)
class PackedKept:
    """The kept tokens at every token of a batch."""

    counts: NDArray[np.int64]  # (tokens,): how many were kept; 0: all
    token_ids: NDArray[np.int64]  # (sum of counts,)


@dataclass(frozen=True)
class PackedBatch:
    """Sequences packed end to end: all of a step, or the part of it that one forward and backward pass sees.

    Nothing is there twice: a sequence is one segment, or two where it shares its beginning with others, and
    sequences that are the same to the end share all of it. So learned tokens are counted by sequence, and several
    of them may be predictions of one token.
    """

    token_ids: NDArray[np.int64]  # (tokens,)
    positions: NDArray[np.int64]  # (tokens,), from 0 in each sequence
    segment_lengths: NDArray[np.int64]  # (segments,)
    segment_parents: NDArray[np.int64]  # (segments,): the segment with the shared beginning, -1 if there is none
    targets: NDArray[np.int64]  # (loss tokens,): the token that is predicted
    sequences: NDArray[np.int64]  # (loss tokens,): the sequence it belongs to, in ascending order
    num_sequences: int
    streams: Mapping[str, NDArray[np.float32]]  # (loss tokens,) each
    kept: PackedKept | None = None  # None: sampled without truncation

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class TrainBatch:
    """What the orchestrator hands to the trainer for one step."""

    step: int
    temperature: float
    packed: PackedBatch
    orchestrator_state: bytes = b"{}"  # JSON; the trainer puts it into its checkpoint, unread

    def require_usable(self) -> None:
        """ValueError if it holds a number that would train the model on nonsense in silence."""
        for name, stream in self.packed.streams.items():
            where = f"the batch of step {self.step}, stream {name!r}"
            if name == "logprobs":
                require_logprobs(stream, where)
            elif not np.isfinite(stream).all():
                raise ValueError(f"{where}: {np.count_nonzero(~np.isfinite(stream))} of {len(stream)} are not finite")
