"""What the server asks of an engine, whatever runs the model. No torch.

A request goes in with `submit` from any thread; its results come back through one call of `on_done`,
from the engine's thread. Every submitted request that is not cancelled is answered, with samples or
with an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


class EngineError(RuntimeError):
    """The engine cannot answer: it failed, or it is shutting down."""


class UnusableWeights(EngineError):
    """The weights that serve give no numbers; other weights will."""


class WeightUpdateRefused(ValueError):
    """The new weights are unusable; the old ones keep serving."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when to stop."""

    max_tokens: int
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """`n` samples of one prompt. The draw of sample i is keyed by (seed, first_index + i, position)."""

    prompt_ids: list[int]
    sampling: Sampling
    n: int = 1
    first_index: int = 0


@dataclass(frozen=True)
class GeneratedSample:
    """One completion. The token that ended it, if any, is the last of `token_ids`."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]  # of the weights that produced each token
    finish_reason: FinishReason


Outcome = list[GeneratedSample] | Exception
OnDone = Callable[[Outcome], None]


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

    def submit(self, request: GenerationRequest, on_done: OnDone) -> int:
        """Queue a request and return its id. `on_done` is called exactly once unless it is cancelled."""
        ...

    def cancel(self, request_id: int) -> None:
        """Forget a request and free what it holds; unknown ids are ignored."""
        ...

    def pause(self) -> None:
        """Stop computing after the current step; requests keep queueing."""
        ...

    def resume(self) -> None: ...

    def update_weights(self, path: Path, version: int) -> None:
        """Check the new weights, then swap them in between two steps. Raises WeightUpdateRefused."""
        ...

    def stop(self) -> None:
        """End the engine; what still waits is answered with an error."""
        ...
