"""Options of the objective of `align`: which loss, with its options, and where reference log-probs come from."""

from pydantic import model_validator

from tandem.algorithms.losses import ALIGN_LOSSES
from tandem.algorithms.losses.kind import AlignLoss, ReferenceSource
from tandem.algorithms.losses.preferences import ANY_REFERENCE
from tandem.algorithms.objective.choice import LossChoice, choice_of

SHOWN_FIRST = ("beta", "label_smoothing", "gamma", "sft_weight")


class AlignLossChoice(LossChoice):
    labeled: bool = False
    """A loss function of your own takes single completions, good or bad, instead of pairs."""


class AlignLossConfig(choice_of(AlignLossChoice, ALIGN_LOSSES, "docs/alignment.md", SHOWN_FIRST)):
    """The objective. docs/alignment.md has the formulas."""

    reference: ReferenceSource | None = None
    """When the reference model (the model that training starts from) computes its log-probs. precomputed: once, before
    the first step. model: at every step, from a frozen copy in memory. none: never, no reference model.
    None: precomputed, if the objective has a reference model."""

    @property
    def algorithm(self) -> AlignLoss | None:
        """None: a custom loss."""
        return ALIGN_LOSSES.get(self.type)

    @property
    def reference_source(self) -> ReferenceSource:
        return self.reference or self._references[0]

    @property
    def _references(self) -> tuple[ReferenceSource, ...]:
        return ANY_REFERENCE if self.algorithm is None else self.algorithm.references

    @property
    def is_paired(self) -> bool:
        return not self.labeled if self.algorithm is None else self.algorithm.is_paired

    @model_validator(mode="after")
    def _known_to_the_type(self) -> "AlignLossConfig":
        if self.labeled and not self.is_custom:
            raise ValueError(f"labeled = true has no effect with type = {self.type!r}; it is for a loss of your own")
        for name, value, takers in self._stray():
            raise ValueError(
                f"{name} = {value} has no effect with type = {self.type!r}; leave it out (it belongs to "
                f"{', '.join(takers)})"
            )
        if self.reference is not None and self.reference not in self._references:
            raise ValueError(
                f"reference = {self.reference!r} does not go with type = {self.type!r}; "
                f"valid: {', '.join(self._references)}"
            )
        return self
