"""What the server asks of an engine, whatever runs the model. No torch.

A request goes in with `submit` from any thread; its result comes back through one call of `on_done`,
from the engine's thread. Every submitted request that is not cancelled is answered, with a result or
with an error. A request with `on_part` is also told of its tokens as they are drawn, before `on_done`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tandem.engine.grammars import Grammar

FinishReason = Literal["stop", "length", "abort"]
UpdateMode = Literal["keep", "wait", "abort"]
"""What becomes of running requests when weights change or the engine is paused. keep: they go on afterwards,
under whatever weights serve then. wait: they end first. abort: they end at once, with what they have."""

TopLogprobs = list[tuple[int, float]]
"""Token ids and their log-probs, the likeliest first."""


class EngineError(RuntimeError):
    """The engine cannot answer: it failed, or it is shutting down."""


class UnusableWeights(EngineError):
    """The weights that serve give no numbers; other weights will."""


class EngineBusy(RuntimeError):
    """Not now: what was asked for contradicts what the engine is doing."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when to stop."""

    max_tokens: int
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0  # least probability, relative to the likeliest token's
    repetition_penalty: float = 1.0  # over prompt and completion
    presence_penalty: float = 0.0  # over the completion
    frequency_penalty: float = 0.0  # over the completion
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    min_tokens: int = 0  # no end before so many
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # the completion ends with the token that completes one of these
    skip_special_tokens: bool = True  # special tokens are no part of the text that `stop` is looked for in
    ignore_eos: bool = False

    @property
    def truncates(self) -> bool:
        """Whether tokens may be cut off that have probability; with temperature 0 only the likeliest has any."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class GenerationRequest:
    """`n` samples of one prompt. The draw of sample i is keyed by (seed, first_index + i, position)."""

    prompt_ids: list[int]
    sampling: Sampling
    n: int = 1
    first_index: int = 0
    adapter: str | None = None  # name of a loaded LoRA adapter
    top_logprobs: int = 0  # so many alternatives to every sampled token
    raw_logprobs: bool = False  # of the model as it is, instead of at the sampling temperature
    kept_tokens: bool = False  # report the kept tokens at every sampled token
    prompt_logprobs: int | None = None  # of every prompt token, with so many alternatives
    grammar: "Grammar | None" = None  # what every sample must follow

    def check_length(self, seq_len: int) -> None:
        """Raise ValueError unless there is a prompt, and room for it and for what is to follow."""
        length, max_tokens = len(self.prompt_ids), self.sampling.max_tokens
        if length == 0 or max_tokens < 1 or length + max_tokens > seq_len:
            raise ValueError(
                f"a prompt of {length} tokens and max_tokens = {max_tokens} do not fit into seq_len = {seq_len}"
            )


@dataclass(frozen=True)
class GeneratedSample:
    """One completion, or the next part of one. The token that ended it, if any, is the last of `token_ids`."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]  # of the weights that produced each token
    finish_reason: FinishReason | None  # None: a part of one that goes on
    stop_reason: int | str | None = None  # the stop token other than EOS, or the stop string, that ended it
    top_logprobs: list[TopLogprobs] | None = None  # for every token, where asked for
    kept_tokens: "list[KeptTokens] | None" = None  # the same


class KeptTokens(NamedTuple):
    """What top_p, top_k and min_p left to sample a token from."""

    token_ids: NDArray[np.integer]  # in ascending order; empty: all. Lists would keep the garbage collector busy
    logprob: float  # of the sampled token, among these


ALL_TOKENS = np.zeros(0, np.int32)
"""What was kept where nothing was cut off."""


@dataclass(frozen=True)
class PromptLogprob:
    """A prompt token's own log-prob (raw, at temperature 1) and the likeliest ones at its place."""

    token_id: int
    logprob: float
    rank: int | None  # 1: the likeliest; None: not known
    top: TopLogprobs


@dataclass(frozen=True)
class GenerationResult:
    samples: list[GeneratedSample]
    num_cached_tokens: int = 0  # of the prompt, that were not computed again
    prompt_logprobs: list[PromptLogprob] | None = None  # from the second prompt token on, where asked for


Outcome = GenerationResult | Exception
OnDone = Callable[[Outcome], None]
OnPart = Callable[[int, GeneratedSample], None]
"""Called with the index of the sample and its next tokens."""


@dataclass(frozen=True)
class EngineStats:
    """A look at the engine from outside; numbers may be a step old."""

    num_running: int = 0  # sequences
    num_waiting: int = 0
    cache_usage: float = 0.0  # share of the KV cache that sequences hold
    prompt_tokens: int = 0  # counters since the start, from here on
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # samples by finish reason


class Engine(Protocol):
    """Runs one model. All methods may be called from any thread."""

    @property
    def version(self) -> int:
        """Of the weights that serve now."""
        ...

    @property
    def paused(self) -> bool: ...

    @property
    def failure(self) -> str | None:
        """Why the engine no longer works, if it does not."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def adapters(self) -> dict[str, str]:
        """Loaded LoRA adapters: name and where it came from."""
        ...

    def start(self) -> None:
        """Begin to work; called once, when the server is about to listen."""
        ...

    def submit(self, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None = None) -> int:
        """Queue a request and return its id. `on_done` is called exactly once unless it is cancelled.
        Raises ValueError for what can never be served."""
        ...

    def cancel(self, request_id: int) -> None:
        """Forget a request and free what it holds; unknown ids are ignored."""
        ...

    def pause(self, mode: UpdateMode = "keep") -> None:
        """Stop computing after the current step; requests keep queueing."""
        ...

    def resume(self) -> None: ...

    def update_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        """Check the new weights, then swap them in between two steps. Raises WeightUpdateRefused, and EngineBusy
        where `mode` is wait and the engine is paused."""
        ...

    def load_adapter(
        self, name: str, path: Path, version: int | None = None, *, replace: bool = False, mode: UpdateMode = "keep"
    ) -> None:
        """Load a LoRA adapter, or with `replace` swap the one of that name in place. Its tokens carry `version`
        (None: that of the weights below it). Raises AdapterRefused, and EngineBusy as `update_weights` does."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Running requests of the adapter end with reason abort. Raises AdapterRefused."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what is cached of ended requests."""
        ...

    def stop(self) -> None:
        """End the engine; what still waits is answered with an error."""
        ...
