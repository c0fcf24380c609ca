"""Text to tokens and back, and chat templates; read from a model directory. No torch, no transformers.

Only what the fast tokenizer file and the chat template say is used, so that a prompt rendered here is
the same, token by token, as transformers' apply_chat_template would give.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from tandem.types.rollout import Message
from tandem.utils.errors import UserError
from tandem.utils.files import read_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# What a template may raise on messages it was not written for; TypeError: content that is no text, say.
TEMPLATE_FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks what the assistant wrote; it renders as what it holds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Tokenizer:
    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise UserError(f"model.name = {str(model_dir)!r} holds no tokenizer: there is no tokenizer.json in it")
        self._tokenizer = FastTokenizer.from_file(str(path))
        config_path = model_dir / "tokenizer_config.json"
        self._config: dict[str, Any] = read_json(config_path) if config_path.exists() else {}
        self.template_text = self._read_template(model_dir)
        self._template = _compile(self.template_text) if self.template_text else None
        self.eos_token_ids = self._read_eos(model_dir)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_variables(self) -> set[str]:
        """What the chat template asks for."""
        return meta.find_undeclared_variables(_environment().parse(self.template_text or ""))

    @property
    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration, its chat template included."""
        special = {name: _text(self._config.get(name)) for name in SPECIAL_TOKENS}
        return self._config | special | {"chat_template": self.template_text}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it; it may ask for further `variables`."""
        if self._template is None:
            raise UserError("the model has no chat template; give plain prompts instead of messages")
        special = {name: _text(self._config.get(name)) for name in SPECIAL_TOKENS}
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{name: text for name, text in special.items() if text is not None} | (variables or {}),
            )
        except TEMPLATE_FAILURES as error:
            raise UserError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools))

    def _read_template(self, model_dir: Path) -> str | None:
        path = model_dir / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):
            return next((entry["template"] for entry in template if entry["name"] == "default"), None)
        return template

    def _read_eos(self, model_dir: Path) -> list[int]:
        """Every token that ends a completion: the tokenizer's own and those the model's configs name."""
        found: dict[int, None] = {}
        eos = _text(self._config.get("eos_token"))
        if eos is not None and (token_id := self.token_id(eos)) is not None:
            found[token_id] = None
        for name in ("generation_config.json", "config.json"):
            path = model_dir / name
            value = read_json(path).get("eos_token_id") if path.exists() else None
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None:
                    found[token_id] = None
        return list(found)


def _text(token: Any) -> str | None:
    """A special token is written as plain text or as a table with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _compile(template: str) -> Any:
    try:
        return _environment().from_string(template)
    except TemplateError as error:
        raise UserError(f"the model's chat template cannot be read: {error}") from error


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
