"""The option class of an objective, put together from those of the losses that it may be.

An option of several losses is one option. It is unset unless given, and then has the default of the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, create_model, model_validator

from tandem.algorithms.losses.kind import AlignLoss, PolicyLoss
from tandem.algorithms.registry import Options, described
from tandem.config.names import OrImportPath
from tandem.utils.imports import is_import_path

# For annotations that are made at run time.
LITERAL: Any = Literal
ANNOTATED: Any = Annotated


class LossChoice(Options):
    """One of several losses, or a custom one, with its options."""

    losses: ClassVar[Mapping[str, PolicyLoss | AlignLoss]] = {}

    type: str
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss function of your own."""

    @property
    def is_custom(self) -> bool:
        """Whether the type is a function that the user brings."""
        return is_import_path(self.type)

    @property
    def arguments(self) -> dict[str, Any]:
        """The options of the loss as keyword arguments, as given or as usual for the type."""
        if self.is_custom:
            return self.options
        options = self.losses[self.type].options
        given = {name: getattr(self, name) for name in options.model_fields}
        return dict(options.model_validate({name: value for name, value in given.items() if value is not None}))

    def _stray(self) -> Iterator[tuple[str, Any, list[str]]]:
        """The options that are given and that the type does not take: name, value, and the types that take it."""
        for name in dict.fromkeys(name for loss in self.losses.values() for name in loss.options.model_fields):
            value, takers = getattr(self, name), takers_of(self.losses, name)
            if value is not None and self.type not in takers:
                yield name, value, takers

    @model_validator(mode="after")
    def _options_fit_the_type(self) -> "LossChoice":
        if self.options and not self.is_custom:
            raise ValueError(
                f"options = {self.options!r} has no effect with type = {self.type!r}; leave it out (it is for a loss "
                "function of your own)"
            )
        return self

    def _require_fitting_options(self) -> None:
        """ValueError where the loss itself refuses what it is given."""
        try:
            _ = self.arguments
        except ValidationError as error:
            raise error.errors()[0].get("ctx", {})["error"] from None


def takers_of(losses: Mapping[str, PolicyLoss | AlignLoss], option: str) -> list[str]:
    return [name for name, loss in losses.items() if option in loss.options.model_fields]


def choice_of(
    base: type[LossChoice], losses: Mapping[str, PolicyLoss | AlignLoss], docs: str, shown_first: Sequence[str] = ()
) -> Any:
    """`base` with the type, whose default is the first, and with the options of all losses; a class that type checkers
    take for Any."""
    names = [name for loss in losses.values() for name in loss.options.model_fields]
    types = LITERAL[tuple(losses)]
    text = described(((loss.name, loss.summary) for loss in losses.values()), docs)
    fields: dict[str, Any] = {
        "type": (ANNOTATED[types | str, OrImportPath(types)], Field(default=next(iter(losses)), description=text))
    }
    fields |= {name: _flat(losses, name) for name in dict.fromkeys([*shown_first, *names])}
    return create_model("LossOptions", __base__=base, losses=(ClassVar[Any], losses), **fields)  # pyright: ignore[reportInvalidTypeForm]


def _flat(losses: Mapping[str, PolicyLoss | AlignLoss], name: str) -> tuple[Any, Any]:
    """The field of an option; {types} and {defaults} in its help are filled in."""
    takers = {taker: losses[taker].options.model_fields[name] for taker in takers_of(losses, name)}
    field, *others = takers.values()
    usual, *special = [f"{field.default:g}"] if isinstance(field.default, float) else [""]
    special += [f"{taker} {other.default:g}" for taker, other in takers.items() if other.default != field.default]
    defaults = f"None: {usual}{'; ' if special else ''}{', '.join(special)}."
    text = (field.description or "").replace("{types}", ", ".join(takers)).replace("{defaults}", defaults)
    assert all(other.annotation == field.annotation for other in others), f"{name} means different things"
    annotation: Any = field.annotation
    return ANNOTATED[annotation | None, *field.metadata], Field(default=None, description=text)
