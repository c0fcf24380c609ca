"""Options of the policy-gradient loss: its type, normalization, off-policy correction and regularization."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from tandem.algorithms.losses import POLICY_LOSSES
from tandem.algorithms.losses.kind import PolicyLoss
from tandem.algorithms.losses.ppo import PpoConfig
from tandem.algorithms.objective.choice import LossChoice, choice_of
from tandem.algorithms.objective.correction import CorrectionConfig
from tandem.algorithms.objective.kl import KlConfig
from tandem.config.base import Config


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


class LossConfig(choice_of(LossChoice, POLICY_LOSSES, "docs/algorithms.md")):
    """The policy-gradient loss. docs/algorithms.md has the formulas."""

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
    def algorithm(self) -> PolicyLoss | None:
        """None: a custom loss."""
        return POLICY_LOSSES.get(self.type)

    @property
    def has_ratio(self) -> bool:
        return self.algorithm is None or self.algorithm.has_ratio

    @property
    def has_critic(self) -> bool:
        return self.algorithm is not None and self.algorithm.has_critic

    @model_validator(mode="after")
    def _known_to_the_type(self) -> "LossConfig":
        for name, value, _ in self._stray():
            raise ValueError(f"{name} = {value} has no effect with type = {self.type!r}; leave it out")
        self._require_fitting_options()
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
        if self.algorithm is not None and self.algorithm.is_of_sequences and self.normalize != "sequences":
            raise ValueError(
                f'normalize = {self.normalize!r} with type = "{self.type}", which has one loss per sequence; '
                'set normalize = "sequences"'
            )
        return self

    @model_validator(mode="after")
    def _corrects_once(self) -> "LossConfig":
        if not self.has_ratio and self.old_logprobs == "recomputed":
            raise ValueError(
                f'old_logprobs = "recomputed" has no effect with type = "{self.type}", which has no ratio; leave it out'
            )
        if self.correction.type == "truncate" and self.has_ratio and self.old_logprobs == "sampled":
            raise ValueError(
                f'correction.type = "truncate" with type = {self.type!r}: its ratio to the sampled log-probs '
                'already corrects for the engine, so this would correct twice; set old_logprobs = "recomputed", or '
                'correction.type = "mask"'
            )
        return self
