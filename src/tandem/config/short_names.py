"""Short names of flags, for options that people type every day. Others go by the end of their name: full_names.py."""

from collections.abc import Mapping
from itertools import pairwise

from tandem.config.sources import SUFFIXES
from tandem.utils.errors import UserError

INFERENCE = {"--api-key": "--server.api-key", "--api-key-var": "--server.api-key-var"}

MODEL = {"--model": "--model.name"}  # of every command that has one
RL = {
    "--env": "--orchestrator.env.id",
    "--loss": "--trainer.loss.type",
    "--advantage": "--orchestrator.advantage.type",
}
ORCHESTRATOR = {"--env": "--env.id", "--advantage": "--advantage.type"}
EVALUATE = {"--env": "--env.id"}
TRAINER = {"--loss": "--loss.type"}  # and of `align`


def keys_of(short_names: Mapping[str, str]) -> dict[str, str]:
    """The same names as keys of a table."""
    return {_key(short): _key(full) for short, full in short_names.items()}


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def spell_out(arguments: list[str], short_names: Mapping[str, str]) -> list[str]:
    """The command line with every short name in full. Raises UserError where an option is given by both names."""
    given = {argument.partition("=")[0] for argument in arguments}
    for short, full in short_names.items():
        if short in given and full in given:
            raise UserError(f"{short} and {full} say the same thing; give one of them")
    return [_in_full(*pair, short_names) for pair in pairwise([*arguments, ""])]


def _in_full(argument: str, following: str, short_names: Mapping[str, str]) -> str:
    name, equals, value = argument.partition("=")
    if not equals and (following.startswith("@") or following.endswith(SUFFIXES)):
        return argument  # a section and its file
    return short_names.get(name, name) + equals + value
