"""What every config class shares, and the parsing of a command line into one.

`parse` is the front door of every entrypoint: files and flags in, one frozen config out, or one
message and exit code 2. Nothing heavy is imported here: `--help` has to answer at once.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_config import BaseConfig, ConfigFileError, cli

from tandem.config.explain import explain_validation_error, models_in, option_paths
from tandem.config.full_names import place_flags, place_keys
from tandem.config.overview import asked_topic, tell
from tandem.config.resume import FLAG, starting_directory, stored_config, take_resumed
from tandem.config.short_names import MODEL, spell_out
from tandem.config.sources import Tree, extract_files, merge, nest, split_values
from tandem.utils.errors import UserError
from tandem.utils.hub import fetch_model, is_to_be_fetched
from tandem.utils.log import say

# Where the parser carries what the files say, apart from what the flags say. No option has such a name.
FILES = "@"


class Config(BaseConfig):
    """Frozen; unknown keys are refused, and so are NaN and infinity, unless the option says what infinity means."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _combine_layers(cls, data: Any) -> Any:
        if not isinstance(data, dict) or FILES not in data:
            return data
        flags = {key: value for key, value in data.items() if key != FILES}
        return cls.combine(place_keys(cls, data[FILES]), place_keys(cls, flags))

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_a_switch_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python, and so Pydantic, would take `true` for 1, in a list or a table too."""
        assert info.field_name is not None
        kinds = _kinds_of(cls.model_fields[info.field_name].annotation)
        if kinds & {int, float} and not kinds & {bool, Any}:
            for switch in _switches_in(value):
                raise ValueError(f"{str(switch).lower()} is not a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_a_table_as_a_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would not say that in TOML a list of tables has brackets of its own."""
        assert info.field_name is not None
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, dict) and get_origin(annotation) is list and models_in(annotation):
            raise ValueError(f"it is a list of tables, not one; write [[…{info.field_name}]], in two pairs of brackets")
        return value

    @classmethod
    def combine(cls, files: Tree, flags: Tree) -> Tree:
        """What the files say and what the flags say, as one; flags win."""
        return merge(files, flags)


def _kinds_of(annotation: Any) -> set[Any]:
    """The types that a union is made of; of another type, itself."""
    parts = [part for part in get_args(annotation) if isinstance(part, type) or get_origin(part) is not None]
    return {annotation}.union(*map(_kinds_of, parts))


def _switches_in(value: Any) -> Iterator[bool]:
    if isinstance(value, bool):
        yield value
    elif isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _switches_in(inner)


C = TypeVar("C", bound=Config)


def parse(
    cls: type[C],
    prog: str,
    description: str,
    argv: list[str] | None = None,
    hint: str = "",
    short_names: Mapping[str, str] | None = None,
) -> C:
    """Parse `argv` (default: the command line); on bad input print one message, then `hint`, and exit with code 2."""
    arguments = sys.argv[1:] if argv is None else argv
    names = (MODEL if "model.name" in option_paths(cls) else {}) | dict(short_names or {})
    try:
        if (topic := asked_topic(arguments)) is not None:
            say(tell(cls, prog, description, topic, names).removesuffix("\n"))
            raise SystemExit(0)
        arguments = spell_out(arguments, names)
        run, rest = take_resumed(arguments, prog) if "resume" in cls.model_fields else (None, arguments)
        config = _load(cls, run, rest, prog, description)
        if (missing := _model_on_the_hub(config)) is None:
            return config
        fetch_model(missing)
        return _load(cls, run, rest, prog, description)
    except UserError as error:
        say(f"{prog}: {error}{hint}", error=True)
        raise SystemExit(2) from None


def _load(cls: type[C], run: Path | None, arguments: list[str], prog: str, description: str) -> C:
    if run is None:
        return load_config(cls, arguments, prog, description)
    return _go_on(cls, run.resolve(), arguments, prog, description)


def _model_on_the_hub(config: Config) -> Path | None:
    """The name of a model that has to be fetched."""
    name = getattr(getattr(config, "model", None), "name", None)
    return name if isinstance(name, Path) and is_to_be_fetched(name) else None


def _go_on(cls: type[C], run: Path, arguments: list[str], prog: str, description: str) -> C:
    """The configuration of the run in `run`, in the directory it was started in, with what is given besides."""
    start = starting_directory(run)
    stays = start is None or not start.is_dir() or start.samefile(Path.cwd())
    shown = Path(os.path.relpath(run)) if stays else run
    flags = [FLAG, "--output-dir", str(shown)]
    config = load_config(cls, [*arguments, *flags], prog, description, stored_config(shown, prog))
    if not stays:
        assert start is not None
        say(f"{prog}: continuing in {start}, where the run was started", error=True)
        os.chdir(start)
        sys.argv[1:] = [FLAG, str(run), *arguments]  # ranks are started with this command line
    return config


def load_config(
    cls: type[C], arguments: list[str], prog: str = "", description: str = "", base: Tree | None = None
) -> C:
    """Defaults < `base` < files from left to right < flags. Raises UserError on bad input."""
    files, flags = extract_files(place_flags(cls, arguments), find_switches(cls), find_sections(cls))
    files, flags = merge(base or {}, files), _with_json(split_values(flags), find_free_tables(cls))
    # The parser reads files only; what several files give together is handed to it as one.
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="tandem-config-") as merged:
        json.dump({FILES: files}, merged)
        merged.flush()
        try:
            return cli(cls, args=["@", merged.name, *flags], prog=prog, description=description)  # pyright: ignore[reportCallIssue]
        except ConfigFileError as error:
            if isinstance(error.__cause__, ValidationError):
                raise UserError(explain_validation_error(cls, error.__cause__)) from error
            stray = str(error).removeprefix("Unrecognized arguments: ")
            if stray != str(error):
                raise UserError(f"{stray!r} is not an option; give files as @ FILE, options as --name VALUE") from error
            raise UserError(str(error)) from error
        except json.JSONDecodeError as error:
            raise UserError(f"{_flag_of(error.doc, flags)}{error.doc!r} is not valid JSON: {error}") from error


def _flag_of(value: str, flags: list[str]) -> str:
    """The flag that was given this value, with a space behind it; empty: it cannot be told."""
    return f"{flags[flags.index(value) - 1]} " if value in flags[1:] else ""


def find_switches(cls: type[BaseModel], prefix: str = "") -> set[str]:
    """The flags of yes-or-no options, with and without their `no-`: the ones that take no value."""
    switches: set[str] = set()
    for name, field in cls.model_fields.items():
        path = prefix + name.replace("_", "-")
        if field.annotation is bool:
            switches |= {f"--{path}", f"--no-{path}"}
        for inner in models_in(field.annotation):
            switches |= find_switches(inner, path + ".")
    return switches


def find_sections(cls: type[BaseModel], prefix: str = "") -> set[str]:
    """The flags of tables: what follows one is a file."""
    sections: set[str] = set()
    for name, field in cls.model_fields.items():
        path = prefix + name.replace("_", "-")
        for inner in models_in(field.annotation):
            sections |= {f"--{path}"} | find_sections(inner, path + ".")
    return sections


def find_free_tables(cls: type[BaseModel], prefix: str = "--") -> set[str]:
    """The flags of tables with keys of any name, such as env.args."""
    tables: set[str] = set()
    for name, field in cls.model_fields.items():
        path = prefix + name.replace("_", "-")
        tables |= {path} if field.annotation == dict[str, Any] else set()
        for inner in models_in(field.annotation):
            tables |= find_free_tables(inner, path + ".")
    return tables


def _with_json(flags: list[str], tables: Collection[str]) -> list[str]:
    """The flags with JSON in them as the parser reads it: --env.args.sizes '[3]' is --env.args '{"sizes": [3]}'."""
    result = list(flags)
    for place, (flag, text) in enumerate(pairwise(flags)):
        table = next((table for table in tables if flag.startswith(f"{table}.")), None)
        if table is not None and (value := _from_json(text)) != text:
            keys = flag.removeprefix(f"{table}.").replace("-", "_").split(".")
            result[place : place + 2] = [table, json.dumps(nest(keys, value))]
    return result


def _from_json(text: str) -> Any:
    """An object, a list, a number or a truth value; another text as it is."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(read, int | float) and math.isfinite(read)
    return read if is_number or isinstance(read, dict | list) else text
