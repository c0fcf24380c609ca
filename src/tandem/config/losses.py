"""Options of the policy-gradient objective: which one, how it is normalized, corrected and regularized."""

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
            f"options = {options!r} has no meaning with type = {loss_type!r}; leave it out (it is for a loss function "
            "of your own)"
        )


class CorrectionConfig(Config):
    """Off-policy correction: a weight on each token's loss from w = exp(trainer's log-prob - engine's log-prob)."""

    type: Literal["none", "truncate", "mask"] = "none"
    """truncate: w, held within [low, high]. mask: w within [low, high], zero outside."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """What w is taken of. token: each token. sequence: the product over the sequence. geometric: its geometric mean."""

    low: float = Field(default=0.0, ge=0)
    """Lower bound of w."""

    high: float = Field(default=2.0, gt=0)
    """Upper bound of w."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "CorrectionConfig":
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} and high = {self.high} leave no room between them; low must be smaller")
        return self


class KlConfig(Config):
    """Keeping near a reference: KL between policy and reference, estimated from the sampled tokens."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the KL; 0: off, and no reference is loaded."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With l = log(policy / reference). k1: l. k2: l²/2. k3: exp(-l) - 1 + l."""

    place: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss. reward: taken from each token's reward; a token answers for what follows it."""

    weighted: bool = True
    """In the loss: multiply by the token's ratio, so that k1 and k3 have the gradient of the KL, off-policy too."""

    model: Path | None = None
    """Directory of the reference; None: the model that training starts from."""


class TeacherConfig(Config):
    """On-policy distillation: the advantage of a token rises by coef x (teacher's log-prob - policy's log-prob)."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the teacher; 0: off."""

    model: Path | None = None
    """Directory of the teacher; it must have the policy's vocabulary."""

    @model_validator(mode="after")
    def _has_a_model(self) -> "TeacherConfig":
        if self.coef > 0 and self.model is None:
            raise ValueError(f"coef = {self.coef} needs a teacher; give the directory of one as model")
        if self.coef == 0 and self.model is not None:
            raise ValueError(f"model = '{self.model}' would not be used with coef = 0; give coef, 1.0 for example")
        return self


class PpoConfig(Config):
    """The critic of loss.type = "ppo"."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of rewards, per token."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda of generalized advantage estimation. 1: whole returns. Less: more of the critic's word, which is worth
    nothing at first, so that early tokens would be blamed for being early."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """A value moves at most so far from what it was before the batch; None: freely."""

    value_coef: float = Field(default=0.1, gt=0)
    """Weight of the critic's loss beside the policy's."""

    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the value head; None: optimizer.lr."""

    whiten: bool = True
    """Advantages of a step are shifted and scaled to mean 0 and variance 1."""


class LossConfig(Config):
    """The policy-gradient objective."""

    type: Annotated[LossType | str, OrImportPath(LossType)] = "grpo"
    """grpo: clipped ratio of each token. gspo: clipped geometric mean of a sequence's ratios. rloo: clipped product of
    them. cispo: log-prob weighted with the bounded ratio. reinforce: log-prob, no ratio. ppo: grpo with a critic.
    Or a function of your own, "package.module:function" or "./file.py:function": docs/algorithms.md."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss function of your own."""

    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low. None: 0.2; gspo 0.0003."""

    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped above at 1 + clip_high. None: 0.2; gspo 0.0004, cispo 4."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Also bound the ratio by this where the advantage is negative; None: unbounded there."""

    normalize: Literal["tokens", "sequences", "constant"] = "tokens"
    """What the loss is a mean over. tokens: all of the step. sequences: each sequence, then all of them.
    constant: each sequence's sum divided by constant_length, then all of them."""

    constant_length: int | None = Field(default=None, ge=1)
    """For normalize = "constant"; the longest completion, usually."""

    old_logprobs: Literal["sampled", "recomputed"] = "sampled"
    """Whose log-probs the ratio is taken to. sampled: the engine's. recomputed: the trainer's own, before the first
    update on the batch; what lies between these and the engine's is left to correction."""

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
                raise ValueError(f"{name} = {given} has no meaning with type = {self.type!r}; leave it out")
        if self.dual_clip is not None and low is None:
            raise ValueError(f"dual_clip = {self.dual_clip} has no meaning with type = {self.type!r}; leave it out")
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
                f"constant_length = {self.constant_length} has no meaning with normalize = {self.normalize!r}; "
                'leave it out, or set normalize = "constant"'
            )
        if self.type == "rloo" and self.normalize != "sequences":
            raise ValueError(
                f'normalize = {self.normalize!r} with type = "rloo": its loss is one per sequence; '
                'set normalize = "sequences"'
            )
        return self

    @model_validator(mode="after")
    def _corrects_once(self) -> "LossConfig":
        if self.type == "reinforce" and self.old_logprobs == "recomputed":
            raise ValueError(
                'old_logprobs = "recomputed" has no meaning with type = "reinforce", which takes no ratio; leave it out'
            )
        if self.correction.type == "truncate" and self.type != "reinforce" and self.old_logprobs == "sampled":
            raise ValueError(
                f'correction.type = "truncate" with type = {self.type!r}: its ratio to the sampled log-probs is that '
                'correction already, which would count twice; set old_logprobs = "recomputed", or correction.type = '
                '"mask"'
            )
        return self
