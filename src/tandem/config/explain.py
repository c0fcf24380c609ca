"""Turns pydantic's validation errors into the sentence a user can act on: key, value, what would be right."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic_core import ErrorDetails

from tandem.config.hints import FOREIGN, algorithm_hint, explanation, options_meant, options_named
from tandem.utils.errors import shown
from tandem.utils.secrets import HIDDEN, hidden, names_secret
from tandem.utils.spelling import nearest


def explain_validation_error(root: type[BaseModel], error: ValidationError, prefix: str = "") -> str:
    """One message for all problems; `prefix` leads to where `root` stands in the whole configuration."""
    values = _by_key(root, _without_echoes(error.errors()))
    problems = [_explain(root, *errors, prefix=prefix) for errors in values]
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems in the configuration:", *(f"  - {problem}" for problem in problems)])


def _without_echoes(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """A shared value that is wrong is wrong in every section it reaches; it is told once, for the top."""
    told = {(details["loc"], details["type"]) for details in errors if details["loc"]}
    return [details for details in errors if (details["loc"][1:], details["type"]) not in told]


def _by_key(root: type[BaseModel], errors: list[ErrorDetails]) -> list[list[ErrorDetails]]:
    """The errors of each value. One that may be of several kinds has an error for each of them; where it is of one kind
    but for something in it, that alone is told."""
    found: dict[str, list[ErrorDetails]] = {}
    for details in errors:
        found.setdefault(_key(root, details), []).append(details)
    return [told for key, told in found.items() if not any(other.startswith(f"{key}.") for other in found)]


def _key(root: type[BaseModel], details: ErrorDetails) -> str:
    """As a user writes it: Pydantic also tells which kind it tried, of several."""
    location = [str(part) for part in details["loc"]]
    return ".".join(key for key, _ in _walk(root, location) if key is not None)


def _explain(root: type[BaseModel], details: ErrorDetails, *others: ErrorDetails, prefix: str) -> str:
    """`others` say why the value is not of the other kinds that it could be."""
    location = [str(part) for part in details["loc"]]
    key = (prefix + _key(root, details)).removesuffix(".")
    kind, value = details["type"], _shown(key, details["input"])
    if others:
        return f"{key} = {value} is not valid: {_alternatives([details, *others])}"
    if kind == "extra_forbidden":
        return f"unknown key {key!r} (value {value}); {_nearest_key(root, location, details['input'])}"
    if kind == "missing":
        flag = ".".join([key, *_first_required(root, location)]).replace("_", "-")
        place = "its table" if _is_in_a_list(location) else f"the file or with --{flag}"
        return f"{key} is required and was not given; set it in {place}"
    if kind == "union_tag_invalid":
        return _explain_tag(key, details)
    if kind == "literal_error":
        hint = algorithm_hint(key, details["input"], _choices(details)) or _nearest_literal(details)
        hint += _elsewhere(details["input"], list(option_paths(root)))
        return f"{key} = {value} is not valid; {hint}"
    if kind == "model_type" and isinstance(details["input"], list):
        several = f", or [[{key}s]] for several" if f"{key}s" in option_paths(root) else ""
        return f"{key} = {value} is not valid: it is one section, not a list: [{key}]{several}"
    if kind == "model_type":
        inner = _first_required(root, location) or [next(iter(_models_at(root, location)[0].model_fields))]
        return f"{key} = {value} is not valid: it is a section; give {'.'.join([key, *inner])}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind in ("value_error", "assertion_error"):
        return f"{key}: {message}" if key else message
    return f"{key} = {value} is not valid: {message[0].lower()}{message[1:]}"


def _shown(key: str, value: Any) -> str:
    """A misspelt key may be one, too."""
    name = key.rpartition(".")[2]
    is_secret = names_secret(name) or nearest(name, ["api_key"])
    return HIDDEN if is_secret else shown(hidden(value))


def _alternatives(errors: list[ErrorDetails]) -> str:
    """What the value should be, names last: input should be a valid list, or 'all-linear'."""
    names = [
        details["ctx"]["expected"] for details in errors if details["type"] == "literal_error" and "ctx" in details
    ]
    messages = [details["msg"] for details in errors if details["type"] != "literal_error"]
    return ", or ".join([*(message[0].lower() + message[1:] for message in messages), *names])


def _elsewhere(given: Any, paths: list[str]) -> str:
    """Of a section that stands where a value does, what its keys are here."""
    meant = {name: options_named(name, paths) for name in given} if isinstance(given, dict) else {}
    return "".join(f"; {name} is {' or '.join(found)}" for name, found in meant.items() if found)


def _nearest_key(root: type[BaseModel], location: list[str], given: Any) -> str:
    *place, name = location
    parent = "".join(f"{part}." for part in place)
    paths = list(option_paths(root))
    if _is_in_a_list(place):  # what is elsewhere cannot be named from here
        parent, paths = "", [path for model in _models_at(root, place) for path in option_paths(model)]
    if told := explanation(parent + name, paths):
        return told
    meant = _keys_meant(name, given, paths) or options_meant(parent + name, paths)
    meant += [f"{path}s" for path in meant if isinstance(given, list) and f"{path}s" in paths]
    if meant:
        return f"did you mean {_one_of([path.removeprefix(parent) for path in meant])}?"
    if told := explanation(name, paths):
        return told
    known = _fields_at(root, place)
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else f"known here: {', '.join(known)}"


def _keys_meant(section: str, given: Any, paths: list[str]) -> list[str]:
    """The options that the keys of an unknown section are here, where they are known with it."""
    names = [f"{section}.{key}".lower() for key in given] if isinstance(given, dict) else []
    return [option for name in names if name in FOREIGN for option in options_named(name, paths)]


def _one_of(keys: list[str]) -> str:
    """'a', 'b' or 'c'."""
    *others, last = map(repr, keys)
    return f"{', '.join(others)} or {last}" if others else last


def option_paths(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the configuration that has a dotted name, tables included. Entries of lists have none."""
    for name, field in root.model_fields.items():
        yield prefix + name
        if get_origin(field.annotation) is not list:
            for inner in models_in(field.annotation):
                yield from option_paths(inner, f"{prefix}{name}.")


def _choices(details: ErrorDetails) -> list[str]:
    expected = details.get("ctx", {}).get("expected", "")
    return [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]


def _nearest_literal(details: ErrorDetails) -> str:
    choices = _choices(details)
    near = nearest(str(details["input"]), choices)
    one_of = f"one of: {', '.join(choices)}"
    return f"did you mean {near!r}? ({one_of})" if near else one_of


def _explain_tag(key: str, details: ErrorDetails) -> str:
    """Of a table that is one of several kinds, told apart by its type."""
    given = details["input"]
    if not isinstance(given, dict):
        return f"{key} = {_shown(key, given)} is not valid: it is a section; give {key}.type"
    tags = [tag.strip("'") for tag in details.get("ctx", {}).get("expected_tags", "").split(", ")]
    one_of = f"one of: {', '.join(tags)}"
    if "type" not in given:
        return f"{key}.type is required and was not given; {one_of}"
    near = nearest(str(given["type"]), tags)
    hint = f"did you mean {near!r}? ({one_of})" if near else one_of
    return f"{key}.type = {shown(given['type'])} is not valid; {hint}"


def _first_required(root: type[BaseModel], location: list[str]) -> list[str]:
    """The way from a missing table to a value that has to be given in it."""
    models = _models_at(root, location)
    required = [name for model in models for name, field in model.model_fields.items() if field.is_required()]
    return [required[0], *_first_required(models[0], [required[0]])] if required else []


def _fields_at(root: type[BaseModel], location: list[str]) -> list[str]:
    """The field names of the config class found by walking `location` from `root`."""
    models = _models_at(root, location) or [root]
    return sorted({name for model in models for name in model.model_fields})


def _models_at(root: type[BaseModel], location: list[str]) -> list[type[BaseModel]]:
    """The config classes found by walking `location` from `root`; none where it ends at a plain value."""
    *_, (_, models) = [("", [root]), *_walk(root, location)]
    return models


def _is_in_a_list(location: list[str]) -> bool:
    """Whether it leads through an entry of a list, which no flag can name."""
    return any(part.isdigit() for part in location)


def _walk(root: type[BaseModel], location: list[str]) -> Iterator[tuple[str | None, list[type[BaseModel]]]]:
    """The config classes after each part of `location`, and the part, if it is a key: Pydantic also tells which member
    of a union it tried."""
    models: list[type[BaseModel]] = [root]
    annotations: list[Any] = []
    for part in location:
        tagged = [member for annotation in annotations for member in members_of(annotation) if _tag(member) == part]
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        is_member = bool(tagged) or (not fields and any(len(members_of(annotation)) > 1 for annotation in annotations))
        if tagged or fields:
            annotations = tagged or fields
            models = [inner for annotation in annotations for inner in models_in(annotation)]
        else:
            annotations = [member for annotation in annotations for member in members_of(annotation)]
        if not fields and not is_member:  # an entry of a list or a table
            annotations = [inner for annotation in annotations for inner in get_args(annotation)[-1:]]
        yield None if is_member else part, models


def members_of(annotation: Any) -> list[Any]:
    """Of a union, without None; of another type, itself."""
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not types.NoneType]
    return [annotation]


def _tag(member: Any) -> str | None:
    """Of a member of a union that is told apart by its type."""
    return next((extra.tag for extra in getattr(member, "__metadata__", ()) if isinstance(extra, Tag)), None)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return models_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, list):
        return [model for inner in get_args(annotation) for model in models_in(inner)]
    return []
