"""How rewards become advantages: a file an algorithm, and the option that chooses one of them."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tandem.algorithms.advantages.kind import Advantage
from tandem.algorithms.registry import described, scan
from tandem.config.base import Config
from tandem.config.names import OrImportPath

SHOWN_FIRST = (
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "maxrl",
    "per_turn",
    "reward",
    "none",
)
ADVANTAGES = scan(__name__, __path__, Advantage, SHOWN_FIRST)

if TYPE_CHECKING:
    AdvantageType = str
else:
    AdvantageType = Literal[tuple(ADVANTAGES)]


class AdvantageConfig(Config):
    """How rewards become advantages."""

    type: Annotated[AdvantageType | str, OrImportPath(AdvantageType)] = Field(
        default="grpo",
        description=described(((one.name, one.summary) for one in ADVANTAGES.values()), "docs/algorithms.md"),
    )

    @property
    def is_group_relative(self) -> bool:
        return self.type in ADVANTAGES and ADVANTAGES[self.type].is_group_relative
