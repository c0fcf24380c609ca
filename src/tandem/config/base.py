"""What every config class shares, and the parsing of a command line into one.

`parse` is the front door of every entrypoint: files and flags are read into one tree, which is validated once; one
frozen config out, or one message and exit code 2. Nothing heavy is imported here: `--help` has to answer at once.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from tandem.config.command_line import NONE, find_sections, find_switches, number_in, read_flags
from tandem.config.explain import explain_validation_error, models_in, option_paths
from tandem.config.full_names import place_flags, place_keys
from tandem.config.overview import asked_topic, tell
from tandem.config.resume import FLAG, starting_directory, stored_config, take_resumed
from tandem.config.short_names import MODEL, spell_out
from tandem.config.sources import Tree, extract_files, merge, split_values
from tandem.utils.errors import UserError
from tandem.utils.hub import fetch_model, is_to_be_fetched
from tandem.utils.log import say


class Config(BaseModel):
    """Frozen; unknown keys are refused, and so are NaN and infinity, unless the option says what infinity means."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_texts(cls, data: Any) -> Any:
        """Files and flags write no value as "None", and leave out the type of a table that is of the usual kind."""
        if not isinstance(data, dict):
            return data
        return {key: _read_text(cls.model_fields.get(key), value) for key, value in data.items()}

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

    @classmethod
    def from_layers(cls, files: Tree, flags: Tree) -> Self:
        """Each with names that may lack their beginning. Raises UserError on bad input."""
        try:
            return cls.model_validate(cls.combine(place_keys(cls, files), place_keys(cls, flags)))
        except ValidationError as error:
            raise UserError(explain_validation_error(cls, error)) from error
        except ValueError as error:
            raise error if isinstance(error, UserError) else UserError(str(error)) from error


def _read_text(field: FieldInfo | None, value: Any) -> Any:
    """In a table with keys of any name, where all values are texts, those that are numbers are read as such."""
    if value == NONE:
        return None
    if field is None or not isinstance(value, dict):
        return value
    is_free = get_origin(field.annotation) is dict and get_args(field.annotation)[1] is not str
    if is_free and all(isinstance(text, str) for text in value.values()):
        return {key: number_in(text) for key, text in value.items()}
    usual = getattr(field.default, "type", None) if isinstance(field.default, BaseModel) else None
    return {"type": usual} | value if usual is not None else value


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
        config = _load(cls, run, rest, prog)
        if (missing := _model_on_the_hub(config)) is None:
            return config
        fetch_model(missing)
        return _load(cls, run, rest, prog)
    except UserError as error:
        say(f"{prog}: {error}{hint}", error=True)
        raise SystemExit(2) from None


def _load(cls: type[C], run: Path | None, arguments: list[str], prog: str) -> C:
    if run is None:
        return load_config(cls, arguments)
    return _go_on(cls, run.resolve(), arguments, prog)


def _model_on_the_hub(config: Config) -> Path | None:
    """The name of a model that has to be fetched."""
    name = getattr(getattr(config, "model", None), "name", None)
    return name if isinstance(name, Path) and is_to_be_fetched(name) else None


def _go_on(cls: type[C], run: Path, arguments: list[str], prog: str) -> C:
    """The configuration of the run in `run`, in the directory it was started in, with what is given besides."""
    start = starting_directory(run)
    stays = start is None or not start.is_dir() or start.samefile(Path.cwd())
    shown = Path(os.path.relpath(run)) if stays else run
    flags = [FLAG, "--output-dir", str(shown)]
    config = load_config(cls, [*arguments, *flags], stored_config(shown, prog))
    if not stays:
        assert start is not None
        say(f"{prog}: continuing in {start}, where the run was started", error=True)
        os.chdir(start)
        sys.argv[1:] = [FLAG, str(run), *arguments]  # ranks are started with this command line
    return config


def load_config(cls: type[C], arguments: list[str], base: Tree | None = None) -> C:
    """Defaults < `base` < files from left to right < flags. Raises UserError on bad input."""
    files, flags = extract_files(place_flags(cls, arguments), find_switches(cls), find_sections(cls))
    return cls.from_layers(merge(base or {}, files), read_flags(cls, split_values(flags)))
