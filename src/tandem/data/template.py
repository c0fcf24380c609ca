"""Chat templates: Jinja in a sandbox, with what templates expect to find there. No torch, no transformers.

`{% generation %} … {% endgeneration %}` marks what the assistant wrote. Templates are compiled twice where they
have such blocks: once to render them as what they hold, once to learn where they lie.
"""

import json
import re
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.utils.errors import UserError

Span = tuple[int, int]
"""A stretch of text: its first character and the one after its last."""

# What a template may raise on messages it was not written for; TypeError: content that is no text, say.
TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Not characters by the Unicode standard, and so in no text.
BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"


class GenerationTag(Extension):
    """The block renders as what it holds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class MarkedGenerationTag(Extension):
    """The block renders as what it holds between two marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN_MARK, END_MARK))
        return [begin, *body, end]


class ChatTemplate:
    def __init__(self, text: str) -> None:
        self.text = text
        self._template = _compile(text, GenerationTag)

    @cached_property
    def variables(self) -> set[str]:
        """What the template asks for."""
        return meta.find_undeclared_variables(_environment(GenerationTag).parse(self.text))

    @cached_property
    def marks_generation(self) -> bool:
        return re.search(r"{%[-+]?\s*generation\b", self.text) is not None

    @cached_property
    def _marked_template(self) -> Any:
        return _compile(self.text, MarkedGenerationTag)

    def render(self, variables: dict[str, Any]) -> str:
        return _render(self._template, variables)

    def generated(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """The rendered text, and where its generation blocks lie."""
        spans: list[Span] = []
        text: list[str] = []
        position = begin = 0
        for piece in re.split(f"([{BEGIN_MARK}{END_MARK}])", _render(self._marked_template, variables)):
            if piece == BEGIN_MARK:
                begin = position
            elif piece == END_MARK:
                spans.append((begin, position))
            else:
                text.append(piece)
                position += len(piece)
        return "".join(text), spans


def _render(template: Any, variables: dict[str, Any]) -> str:
    try:
        return template.render(**variables)
    except TEMPLATE_FAILURES as error:
        raise UserError(f"the chat template refuses these messages: {error}") from error


def _compile(text: str, generation_tag: type[Extension]) -> Any:
    try:
        template = _environment(generation_tag).from_string(text)
    except TemplateError as error:
        raise UserError(f"the model's chat template cannot be read: {error}") from error
    template.globals = dict(template.globals)  # Jinja's is a chain of two, and every rendering begins with a copy of it
    return template


def _environment(generation_tag: type[Extension]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, generation_tag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
