"""Options that several commands take are declared once."""

from collections import defaultdict

import pytest
from pydantic import BaseModel
from tests.unit.config.test_help import COMMANDS

from tandem.commands.rl import SECTIONS, SHARED_KEYS, RLConfig
from tandem.config.base import Config

# Tables of their own kind, a default of each command's own, and a model that only the reward server can do without.
OWN = {"output_dir", "loss", "eval", "server", "data", "metrics", "model"}


def declared_in(cls: type[BaseModel], name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))


def test_an_option_of_several_commands_is_declared_in_one_class() -> None:
    places: dict[str, set[type]] = defaultdict(set)
    for cls in COMMANDS.values():
        for name in cls.model_fields:
            places[name].add(declared_in(cls, name))
    several = {name: found for name, found in places.items() if len(found) > 1 and name not in OWN}
    assert several == {}


@pytest.mark.parametrize("section", SECTIONS)
def test_what_rl_shares_with_a_section_is_the_same_option(section: str) -> None:
    cls: type[Config] = SECTIONS[section]
    both = cls.model_fields.keys() & RLConfig.model_fields.keys()
    assert both == cls.model_fields.keys() & set(SHARED_KEYS)
    assert {"model", "seq_len", "seed", "deterministic", "log_level"} <= both
