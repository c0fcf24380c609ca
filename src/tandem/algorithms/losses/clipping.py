"""The clipped objective of PPO (https://arxiv.org/abs/1707.06347), of tokens or of sequences, and its options.

With A the advantage of a token, l its log-prob, r = exp(log-ratio) its ratio to the policy before the batch.
"""

from typing import Annotated

from pydantic import Field, model_validator

from tandem.algorithms.losses.kind import Losses, PolicyStreams
from tandem.algorithms.metrics import Metric, mean_of
from tandem.algorithms.registry import Options
from tandem.algorithms.sequences import bounded_exp
from tandem.algorithms.tensors import Tensor

ClipLow = Annotated[float, Field(gt=0, lt=1, description="Clip the ratio below at 1 - clip_low. {defaults}")]
ClipHigh = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=True,
        description="Clip the ratio above at 1 + clip_high. {defaults} inf: no clipping above.",
    ),
]
DUAL_CLIP = "Also clip the ratio above at this where the advantage is negative. None: no clipping there."


class ClipOptions(Options):
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float | None = Field(default=None, gt=1, description=DUAL_CLIP)

    @model_validator(mode="after")
    def _bounds_differ(self) -> "ClipOptions":
        bound = 1 + self.clip_high
        if self.dual_clip is not None and self.dual_clip <= bound:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1 + clip_high = {bound}; 3 is usual")
        return self


def clipped_tokens(streams: PolicyStreams, clip_low: float, clip_high: float, dual_clip: float | None) -> Losses:
    return clipped_term(streams.log_ratios, streams.advantages, clip_low, clip_high, dual_clip)


def clipped_term(
    log_ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Losses:
    """−min(r A, clip(r, 1 − low, 1 + high) A); with a dual clip, r is held below it where A < 0.

    Of tokens: GRPO and PPO. Of sequences' geometric means: GSPO. Of sequences' products: RLOO.
    """
    ratios = bounded_exp(log_ratios)
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    bounded = ratios if dual_clip is None else ratios.clamp(max=dual_clip)
    gains = (bounded * advantages).minimum(clipped * advantages)
    is_low = (ratios < 1 - clip_low) & (advantages < 0)
    is_high = (ratios > 1 + clip_high) & (advantages > 0)
    if dual_clip is not None:
        is_high |= (ratios > dual_clip) & (advantages < 0)
    return Losses(-gains, clip_metrics(is_low, is_high))


def clip_metrics(is_low: Tensor, is_high: Tensor) -> dict[str, Metric]:
    """The tokens, (tokens,) bool each, whose loss the lower and the upper bound hold back."""
    return {
        "clip_fraction": mean_of(is_low | is_high),
        "clip_fraction_low": mean_of(is_low),
        "clip_fraction_high": mean_of(is_high),
    }
