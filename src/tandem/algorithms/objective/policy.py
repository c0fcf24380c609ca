"""Options of the policy-gradient loss: its type, normalization, off-policy correction and regularization."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tandem.config.base import Config
from tandem.config.names import OrImportPath
from tandem.utils.imports import is_import_path

LossType = Literal["grpo", "gspo", "rloo", "cispo", "reinforce", "ppo"]

# clip_low and clip_high where they are not given; None: the objective has no such bound.
DEFAULT_CLIPS: dict[str, tuple[float | None, float | None]] = {
    "grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "rloo": (0.2, 0.2),
    "cispo": (None, 4.0),
    "reinforce": (None, None),
    "ppo": (0.2, 0.2),
}


def refuse_stray_options(loss_type: str, options: dict[str, Any]) -> None:
    if options and not is_import_path(loss_type):
        raise ValueError(
            f"options = {options!r} has no effect with type = {loss_type!r}; leave it out (it is for a loss function "
            "of your own)"
        )


class CorrectionConfig(Config):
    """Off-policy correction: a weight on each token's loss from w = exp(trainer's log-prob - engine's log-prob)."""

    type: Literal["none", "truncate", "mask"] = "none"
    """truncate: w, clipped to [low, high]. mask: w inside [low, high], 0 outside."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """What w is computed over. token: each token. sequence: product over the sequence. geometric: geometric mean."""

    low: float = Field(default=0.0, ge=0)
    """Lower bound of w."""

    high: float = Field(default=2.0, gt=0, allow_inf_nan=True)
    """Upper bound of w. inf: none."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "CorrectionConfig":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} and high = {self.high} leave no range; low must be below high")
        return self


class KlConfig(Config):
    """KL penalty: keeps the policy near a reference model. The KL is estimated from the sampled tokens."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the KL. 0: off, and no reference model is loaded."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator, with l = log(policy / reference). k1: l. k2: l²/2. k3: exp(-l) - 1 + l."""

    place: Literal["loss", "reward"] = "loss"
    """loss: add the KL to each token's loss. reward: subtract it from each token's reward, as a penalty-to-go."""

    weighted: bool = True
    """In the loss, multiply the KL by the token's ratio: k1 and k3 then have the gradient of the KL, off-policy too."""

    model: Path | None = None
    """Directory of the reference model. None: the model that training starts from."""


class TeacherConfig(Config):
    """On-policy distillation: adds coef x (teacher's log-prob - policy's log-prob) to each token's advantage."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the teacher model. 0: off."""

    model: Path | None = None
    """Directory of the teacher model. It must have the policy's vocabulary."""

    @model_validator(mode="after")
    def _has_a_model(self) -> "TeacherConfig":
        if self.coef > 0 and self.model is None:
            raise ValueError(f"coef = {self.coef} needs a teacher model; set model to its directory")
        if self.coef == 0 and self.model is not None:
            raise ValueError(f"model = '{self.model}' is not used with coef = 0; set coef, for example to 1.0")
        return self


class PpoConfig(Config):
    """The critic of loss.type = "ppo"."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of generalized advantage estimation. 1: full returns. Lower λ bootstraps more from the critic; while that is
    untrained, early tokens are biased."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip values to within this of their values before the batch. None: no clipping."""

    value_coef: float = Field(default=0.1, gt=0)
    """Weight of the critic's loss."""

    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the value head. None: optimizer.lr."""

    whiten: bool = True
    """Normalize the advantages of a step to mean 0 and variance 1."""


class LossConfig(Config):
    """The policy-gradient loss. docs/algorithms.md has the formulas."""

    type: Annotated[LossType | str, OrImportPath(LossType)] = "grpo"
    """grpo: clipped ratio of each token. gspo: clipped geometric mean of a sequence's ratios. rloo: clipped product of
    them. cispo: log-prob weighted by the clipped ratio. reinforce: log-prob, no ratio. ppo: grpo with a critic.
    Or a function of your own, "package.module:function" or "./file.py:function": docs/algorithms.md."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss function of your own."""

    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Clip the ratio below at 1 - clip_low. None: 0.2; gspo 0.0003."""

    clip_high: float | None = Field(default=None, gt=0, allow_inf_nan=True)
    """Clip the ratio above at 1 + clip_high. None: 0.2; gspo 0.0004, cispo 4. inf: no clipping above."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Also clip the ratio above at this where the advantage is negative. None: no clipping there."""

    normalize: Literal["tokens", "sequences", "constant"] = "tokens"
    """What the loss is averaged over. tokens: all tokens of the update. sequences: first the tokens of each sequence,
    then the sequences. constant: each sequence's sum divided by constant_length, then the sequences."""

    constant_length: int | None = Field(default=None, ge=1)
    """For normalize = "constant": usually the longest completion, in tokens."""

    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    """Denominator of the ratio. sampled: the engine's log-probs. recomputed: the trainer's, before the first update on
    the batch; loss.correction then handles the mismatch with the engine."""

    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    teacher: TeacherConfig = TeacherConfig()
    ppo: PpoConfig = PpoConfig()

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""

    @property
    def is_own(self) -> bool:
        """Whether the type is a function that the user brings."""
        return is_import_path(self.type)

    @property
    def clips(self) -> tuple[float | None, float | None]:
        """clip_low and clip_high, as given or as usual for the type."""
        low, high = self._default_clips
        return self.clip_low or low, self.clip_high or high

    @property
    def _default_clips(self) -> tuple[float | None, float | None]:
        return DEFAULT_CLIPS.get(self.type, (None, None))

    @model_validator(mode="after")
    def _options_fit_the_type(self) -> "LossConfig":
        refuse_stray_options(self.type, self.options)
        return self

    @model_validator(mode="after")
    def _clips_fit_the_type(self) -> "LossConfig":
        low, high = self._default_clips
        for name, given, usual in (("clip_low", self.clip_low, low), ("clip_high", self.clip_high, high)):
            if given is not None and usual is None:
                raise ValueError(f"{name} = {given} has no effect with type = {self.type!r}; leave it out")
        if self.dual_clip is not None and low is None:
            raise ValueError(f"dual_clip = {self.dual_clip} has no effect with type = {self.type!r}; leave it out")
        bound = 1 + (self.clips[1] or 0.0)
        if self.dual_clip is not None and self.dual_clip <= bound:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1 + clip_high = {bound}; 3 is usual")
        return self

    @model_validator(mode="after")
    def _normalization_fits(self) -> "LossConfig":
        if self.normalize == "constant" and self.constant_length is None:
            raise ValueError('normalize = "constant" needs constant_length; give the longest completion in tokens')
        if self.normalize != "constant" and self.constant_length is not None:
            raise ValueError(
                f"constant_length = {self.constant_length} has no effect with normalize = {self.normalize!r}; "
                'leave it out, or set normalize = "constant"'
            )
        if self.type == "rloo" and self.normalize != "sequences":
            raise ValueError(
                f'normalize = {self.normalize!r} with type = "rloo", which has one loss per sequence; '
                'set normalize = "sequences"'
            )
        return self

    @model_validator(mode="after")
    def _corrects_once(self) -> "LossConfig":
        if self.type == "reinforce" and self.old_logprobs == "recomputed":
            raise ValueError(
                'old_logprobs = "recomputed" has no effect with type = "reinforce", which has no ratio; leave it out'
            )
        if self.correction.type == "truncate" and self.type != "reinforce" and self.old_logprobs == "sampled":
            raise ValueError(
                f'correction.type = "truncate" with type = {self.type!r}: its ratio to the sampled log-probs '
                'already corrects for the engine, so this would correct twice; set old_logprobs = "recomputed", or '
                'correction.type = "mask"'
            )
        return self
