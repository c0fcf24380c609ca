"""Options of alignment on preferences: DPO and its family, and reward models."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tandem.algorithms.objective.policy import refuse_stray_options
from tandem.commands.offline import OfflineConfig
from tandem.config.base import Config
from tandem.config.data import AlignDataConfig
from tandem.config.names import OrImportPath
from tandem.utils.imports import is_import_path

AlignLossType = Literal["dpo", "ipo", "hinge", "kto", "bco", "orpo", "cpo", "simpo", "reward"]
ReferenceSource = Literal["precomputed", "model", "none"]

DEFAULT_BETA = 0.1
SIMPO_BETA = 2.0
# Objectives on single completions labelled good or bad, not on pairs.
UNPAIRED = ("kto", "bco")
# Where each objective may take its reference log-probs from; the first is the default.
REFERENCES: dict[str, tuple[ReferenceSource, ...]] = {
    "dpo": ("precomputed", "model", "none"),
    "ipo": ("precomputed", "model", "none"),
    "hinge": ("precomputed", "model", "none"),
    "kto": ("precomputed", "model"),
    "bco": ("precomputed", "model"),
    "orpo": ("none",),
    "cpo": ("none",),
    "simpo": ("none",),
    "reward": ("none",),
}
OWN_REFERENCES: tuple[ReferenceSource, ...] = ("precomputed", "model", "none")
# Options that only some objectives know.
KNOWN_TO: dict[str, tuple[AlignLossType, ...]] = {
    "beta": ("dpo", "ipo", "hinge", "kto", "bco", "orpo", "cpo", "simpo"),
    "label_smoothing": ("dpo", "cpo", "simpo"),
    "gamma": ("simpo",),
    "sft_weight": ("cpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "centering": ("reward",),
}


class AlignLossConfig(Config):
    """The objective. docs/alignment.md has the formulas."""

    type: Annotated[AlignLossType | str, OrImportPath(AlignLossType)] = "dpo"
    """dpo, ipo, hinge: pairs, with a reference model. kto, bco: single completions, good or bad, with a reference
    model. orpo, cpo, simpo: pairs, without one. reward: pairs, trains a reward model. Or a function of your own,
    "package.module:function" or "./file.py:function": docs/alignment.md."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss function of your own."""

    labeled: bool = False
    """A loss function of your own takes single completions, good or bad, instead of pairs."""

    beta: float | None = Field(default=None, gt=0)
    """Scale of the implicit rewards (orpo: weight of the odds ratio). None: 0.1; simpo 2."""

    label_smoothing: float | None = Field(default=None, ge=0, lt=0.5)
    """Share of labels assumed to be wrong; dpo, cpo, simpo. None: 0."""

    gamma: float | None = Field(default=None, ge=0)
    """Margin by which the chosen completion should win; simpo. None: 0.5."""

    sft_weight: float | None = Field(default=None, ge=0)
    """Weight of the SFT loss on chosen completions; cpo. None: 1."""

    desirable_weight: float | None = Field(default=None, ge=0)
    """Weight of good completions; kto. None: 1."""

    undesirable_weight: float | None = Field(default=None, ge=0)
    """Weight of bad completions; kto. None: 1."""

    centering: float | None = Field(default=None, ge=0)
    """Weight of the penalty that centres scores at zero; reward. None: 0."""

    reference: ReferenceSource | None = None
    """When the reference model (the model that training starts from) computes its log-probs. precomputed: once, before
    the first step. model: at every step, from a frozen copy in memory. none: never, no reference model.
    None: precomputed, if the objective has a reference model."""

    @property
    def scale(self) -> float:
        """beta, as given or as usual for the type."""
        return self.beta or (SIMPO_BETA if self.type == "simpo" else DEFAULT_BETA)

    @property
    def margin(self) -> float:
        return 0.5 if self.gamma is None else self.gamma

    @property
    def imitation_weight(self) -> float:
        return 1.0 if self.sft_weight is None else self.sft_weight

    @property
    def label_weights(self) -> tuple[float, float]:
        """Of good and of bad completions."""
        good, bad = self.desirable_weight, self.undesirable_weight
        return 1.0 if good is None else good, 1.0 if bad is None else bad

    @property
    def reference_source(self) -> ReferenceSource:
        return self.reference or self._references[0]

    @property
    def _references(self) -> tuple[ReferenceSource, ...]:
        return REFERENCES.get(self.type, OWN_REFERENCES)

    @property
    def is_own(self) -> bool:
        """Whether the type is a function that the user brings."""
        return is_import_path(self.type)

    @property
    def is_paired(self) -> bool:
        return self.type not in UNPAIRED and not self.labeled

    @model_validator(mode="after")
    def _options_fit_the_type(self) -> "AlignLossConfig":
        refuse_stray_options(self.type, self.options)
        if self.labeled and not self.is_own:
            raise ValueError(f"labeled = true has no effect with type = {self.type!r}; it is for a loss of your own")
        for name, types in KNOWN_TO.items():
            value = getattr(self, name)
            if value is not None and self.type not in types:
                raise ValueError(
                    f"{name} = {value} has no effect with type = {self.type!r}; leave it out (it belongs to "
                    f"{', '.join(types)})"
                )
        if self.reference is not None and self.reference not in self._references:
            raise ValueError(
                f"reference = {self.reference!r} does not go with type = {self.type!r}; "
                f"valid: {', '.join(self._references)}"
            )
        return self


class AlignConfig(OfflineConfig):
    """Alignment on preferences: rows with `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`."""

    data: AlignDataConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen, so it cannot be replaced
    loss: AlignLossConfig = AlignLossConfig()
    output_dir: Path = Path("outputs/align")
    """Run directory. The model is written to weights/latest."""

    @property
    def pair_tokens(self) -> int:
        """Of the longest pair. A reward model reads one token more of each."""
        return 2 * (self.seq_len + (self.loss.type == "reward"))

    @model_validator(mode="after")
    def _consistent(self) -> "AlignConfig":
        if self.loss.type == "reward" and (self.lora is not None or self.model.impl == "hf"):
            raise ValueError("loss.type = 'reward' trains the whole native decoder; leave out lora and model.impl")
        room = self.pair_tokens
        if 0 < self.tokens_per_microbatch < room:
            raise ValueError(
                f"tokens_per_microbatch = {self.tokens_per_microbatch} cannot hold a pair of seq_len = {self.seq_len}; "
                f"the smallest valid value is {room}"
            )
        if self.loss.type == "kto" and self.batch_size == 1:
            raise ValueError(
                "batch_size = 1 with loss.type = 'kto': its KL estimate needs completions of other prompts in "
                "the same step; the smallest valid value is 2"
            )
        return self
