"""Options of the vLLM engine, and vLLM's own flags on our command line.

Where we have an option of our own, that is the one to use, so that every process of a run knows its value; vLLM's name
for it works on the command line too. All other flags pass through to vLLM unchanged.
"""

import json
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator

from tandem.config.base import Config
from tandem.config.command_line import find_sections, find_switches
from tandem.config.explain import models_in
from tandem.config.full_names import place_flags
from tandem.config.sources import extract_files
from tandem.utils.errors import UserError

# vLLM's name of what an option of ours says.
ALIASES = {
    "model": "model.name",
    "dtype": "model.dtype",
    "trust-remote-code": "model.trust_remote_code",
    "chat-template": "model.chat_template",
    "max-model-len": "seq_len",
    "max-num-seqs": "max_sequences",
    "max-num-batched-tokens": "tokens_per_step",
    "block-size": "block_size",
    "enable-prefix-caching": "prefix_caching",
    "no-enable-prefix-caching": "no-prefix_caching",
    "seed": "seed",
    "generation-config": "generation_config",
    "host": "server.host",
    "port": "server.port",
    "api-key": "server.api_key",
    "shutdown-timeout": "drain_timeout_s",
}
# Exact token versions and log-probs depend on these.
FIXED = {
    "served-model-name": "the model is served under model.name and its last part, as by every engine",
    "worker-extension-cls": "it is how weights are checked before they are loaded",
    "logprobs-mode": "the trainer needs the log-probs of the distribution at the sampling temperature",
    "api-server-count": "one process must see every token to know the version that made it",
    "data-parallel-multi-port-external-lb": "one address must reach every rank for a weight update to be one operation",
    "grpc": "it has neither our API nor our key",
    "uds": "clients need an address; give server.host and server.port",
    "root-path": "the API is served at the root",
}


# Valid values of vLLM's --max-lora-rank.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VllmConfig(Config):
    """vLLM's own server (engine = "vllm")."""

    python: Path | None = None
    """Python of the environment that vLLM is installed in. None: this one."""

    flags: dict[str, Any] = {}
    """Flags of vLLM, as in flags.tensor-parallel-size = 2. true: a flag without a value. false: its --no- form."""

    @field_validator("flags")
    @classmethod
    def _are_vllms_own(cls, flags: dict[str, Any]) -> dict[str, Any]:
        flags = {flag_name(name): value for name, value in flags.items()}
        for name in flags:
            positive = name.removeprefix("no-")
            if positive in ALIASES:
                option = ALIASES[positive]
                raise ValueError(f"flag {name!r} of vLLM is our option {option}; use that")
            if positive in FIXED:
                raise ValueError(f"flag {name!r} of vLLM is fixed: {FIXED[positive]}")
        return flags


def adapter_flags(rank: int) -> dict[str, Any]:
    """The flags by which vLLM takes adapters of this rank. Raises UserError for a rank it cannot serve."""
    if rank > LORA_RANKS[-1]:
        raise UserError(
            f"lora.rank = {rank} with engine = 'vllm': the largest rank that vLLM serves is {LORA_RANKS[-1]}"
        )
    return {"enable-lora": True, "max-lora-rank": next(largest for largest in LORA_RANKS if largest >= rank)}


def take_vllm_flags(cls: type[BaseModel], arguments: list[str]) -> tuple[list[str], str]:
    """The command line with vLLM's flags put into `vllm.flags`, and a hint for when it is refused.

    Of an engine other than vLLM they are left where they are: our parser refuses what it does not know.
    """
    ours, theirs = split_arguments(place_flags(cls, arguments), own_flags(cls))
    files, flags = extract_files(ours, find_switches(cls), find_sections(cls))
    given = dict(pairwise(flags))
    if given.get("--engine", files.get("engine")) == "vllm":
        return [*ours, "--vllm.flags", json.dumps(theirs)] if theirs else ours, ""
    return arguments, " (flags of vLLM need --engine vllm)" if theirs else ""


def flag_name(name: str) -> str:
    """--tensor_parallel_size and tensor-parallel-size are one flag. Short flags, and what follows a dot, stay."""
    if name.startswith("-") and not name.startswith("--"):
        return name
    head, dot, rest = name.removeprefix("--").partition(".")
    return head.replace("_", "-") + dot + rest


def split_arguments(arguments: list[str], ours: Collection[str]) -> tuple[list[str], dict[str, Any]]:
    """Our part of a command line, and vLLM's flags in it by name. `ours` are the flags that are not vLLM's.

    vLLM's name for an option of ours becomes our flag. Raises UserError where both are given.
    """
    kept: list[str] = []
    theirs: dict[str, Any] = {}
    said: dict[str, str] = {}  # our flag -> the name it was given by
    position = 0
    while position < len(arguments):
        argument, equals, given = arguments[position].partition("=")
        position += 1
        if not _is_flag(argument):
            kept.append(arguments[position - 1])
            continue
        values = [given] if equals else []
        while not equals and position < len(arguments) and not _starts_something(arguments[position]):
            values.append(arguments[position])
            position += 1
        name = flag_name(argument)
        if not _is_one_of(argument, ours) and name not in ALIASES:
            theirs[name] = _merge_values(theirs.get(name), values)
            continue
        flag = argument if _is_one_of(argument, ours) else f"--{ALIASES[name].replace('_', '-')}"
        before = said.setdefault(flag, argument)
        if before != argument:
            raise UserError(f"{before} and {argument} say the same thing; give only {flag}")
        kept += [flag, *values]
    return kept, theirs


def own_flags(cls: type[BaseModel], prefix: str = "--") -> set[str]:
    """Every flag that our parser knows."""
    flags: set[str] = set()
    for name, field in cls.model_fields.items():
        path = prefix + name.replace("_", "-")
        flags |= {path, path.replace("--", "--no-", 1)}
        for inner in models_in(field.annotation):
            flags |= own_flags(inner, path + ".")
    return flags


def _is_one_of(argument: str, ours: Collection[str]) -> bool:
    return argument.replace("_", "-") in ours or argument.startswith("--vllm.") or argument in ("-h", "--help")


def _is_flag(argument: str) -> bool:
    """-tp and -O3 are flags, -1 and -0.5 are values."""
    return len(argument) > 1 and argument[0] == "-" and not argument[1].isdigit() and argument[1] != "."


def _starts_something(argument: str) -> bool:
    return _is_flag(argument) or argument.startswith("@")


def _merge_values(before: Any, values: list[str]) -> Any:
    """No value: a switch. A flag that is repeated collects its values."""
    if before is None:
        return True if not values else values[0] if len(values) == 1 else values
    earlier = before if isinstance(before, list) else [before]
    return [*earlier, *values]
