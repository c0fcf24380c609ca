"""Text to tokens and back, and chat templates; read from a model directory. No torch, no transformers.

Only what the fast tokenizer file and the chat template say is used, so that a prompt rendered here is
the same, token by token, as transformers' apply_chat_template would give.
"""

from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from tandem.config.shared import ModelConfig
from tandem.data.template import ChatTemplate, Span
from tandem.data.template_files import (
    DEFAULT,
    SPECIAL_TOKENS,
    WITH_TOOLS,
    read_special_tokens,
    read_templates,
)
from tandem.data.token_bytes import TokenBytes
from tandem.types.rollout import Message
from tandem.utils.errors import UserError
from tandem.utils.files import read_table, require_regular

# Texts above this are encoded without holding the interpreter's lock, which costs short ones more than it saves.
LONG_TEXT = 4096
# What conversations begin with, and short answers of tools and users, come many times in a row.
KNOWN_TEXTS = 128
TEMPLATE_HINT = "give one with --chat-template FILE, or plain prompts instead of messages"


class Tokenizer:
    """`chat_template`: the text of one, in place of all that the directory has."""

    def __init__(self, model_dir: Path, chat_template: str | None = None) -> None:
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise UserError(f"model.name = {str(model_dir)!r} holds no tokenizer: there is no tokenizer.json in it")
        require_regular(path)
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{path} cannot be read as a tokenizer: {error}") from error
        # A tokenizer file may carry the length of what its author once encoded; nothing is cut silently here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_path = model_dir / "tokenizer_config.json"
        self._config = read_table(config_path) if config_path.exists() else {}
        self._special_tokens = read_special_tokens(model_dir, self._config)
        given = {} if chat_template is None else {DEFAULT: chat_template}
        self._template_texts = given or read_templates(model_dir, self._config)
        self._templates = {
            name: ChatTemplate(text) for name, text in self._template_texts.items() if name in (DEFAULT, WITH_TOOLS)
        }
        self.token_bytes = TokenBytes(self._tokenizer)
        self.eos_token_ids = self._read_eos(model_dir)
        self._encode_known = lru_cache(KNOWN_TEXTS)(self.encode)

    @classmethod
    def of(cls, model: ModelConfig) -> "Tokenizer":
        return cls(model.name, model.read_chat_template())

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more text than this."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def normalizes(self) -> bool:
        """Whether a text is changed before it is cut into tokens."""
        return self._tokenizer.normalizer is not None

    def tokens_from(self, first: int) -> dict[int, str]:
        """The tokens whose id is `first` or above."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        return {
            number: token for token, number in sorted(vocabulary.items(), key=lambda entry: entry[1]) if number >= first
        }

    @cached_property
    def _numbers(self) -> list[int]:
        """Every token id, once."""
        return list(range(max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def template(self, *, with_tools: bool = False) -> ChatTemplate | None:
        """The chat template; models may have another one for conversations with tools."""
        default = self._templates.get(DEFAULT)
        return self._templates.get(WITH_TOOLS, default) if with_tools else default

    def marks_generation(self, *, with_tools: bool = False) -> bool:
        """Whether the chat template tells what the assistant writes."""
        template = self.template(with_tools=with_tools)
        return template is not None and template.marks_generation

    @property
    def special_token_ids(self) -> list[int]:
        """Tokens that stand for no text."""
        return [token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]

    @cached_property
    def eos_texts(self) -> list[str]:
        """The tokens that end a completion, as they are written."""
        texts = (self._tokenizer.id_to_token(token_id) for token_id in self.eos_token_ids)
        return [text for text in texts if text]

    @property
    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration, its chat template (or a list of named ones) included."""
        texts = self._template_texts
        named = [{"name": name, "template": text} for name, text in texts.items()]
        template = named if set(texts) - {DEFAULT} else texts.get(DEFAULT)
        return self._config | dict.fromkeys(SPECIAL_TOKENS) | self._special_tokens | {"chat_template": template}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) > LONG_TEXT:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_shared(self, text: str) -> list[int]:
        """The same list for the same text, while it is known: not to be changed."""
        return self._encode_known(text)

    def encode_with_starts(self, text: str, *, add_special_tokens: bool = False) -> tuple[list[int], list[int]]:
        """Token ids, and the character of the text at which each token begins."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        starts: list[int] = []
        previous_end = 0
        for start, end in encoding.offsets:
            # A special token that is put before or behind the text has none of it; and some tokenizers leave the blanks
            # a token begins with out of its offsets.
            if end == 0:
                starts.append(previous_end)
            else:
                starts.append(start if text[previous_end:start].strip() else min(start, previous_end))
            previous_end = max(previous_end, end)
        # The same objects for the same tokens: whole datasets are held in memory as such lists.
        return [self._numbers[token_id] for token_id in encoding.ids], starts

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def token_text(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as the model's chat template writes it; it may ask for further `variables`."""
        template_variables = self._variables(messages, tools, add_generation_prompt) | (variables or {})
        return self._chat_template(tools).render(template_variables)

    def generated(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> tuple[str, list[Span]]:
        """The rendered conversation, and where the template's generation blocks lie in it."""
        return self._chat_template(tools).generated(self._variables(messages, tools, add_generation_prompt=False))

    def encode_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools))

    def _chat_template(self, tools: list[dict[str, Any]] | None) -> ChatTemplate:
        template = self.template(with_tools=tools is not None)
        if template is None and self._template_texts:
            names = ", ".join(sorted(self._template_texts))
            raise UserError(f"none of the model's chat templates ({names}) is its {DEFAULT!r}; {TEMPLATE_HINT}")
        if template is None:
            raise UserError(f"the model has no chat template; {TEMPLATE_HINT}")
        return template

    def _variables(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> dict[str, Any]:
        conversation = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._special_tokens | conversation

    def _read_eos(self, model_dir: Path) -> list[int]:
        """Every token that ends a completion: the tokenizer's own and those the model's configs name."""
        found: dict[int, None] = {}
        eos = self._special_tokens.get("eos_token")
        if eos is not None and (token_id := self.token_id(eos)) is not None:
            found[token_id] = None
        for name in ("generation_config.json", "config.json"):
            path = model_dir / name
            value = read_table(path).get("eos_token_id") if path.exists() else None
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is None:
                    continue
                if type(token_id) is not int or token_id < 0:
                    raise UserError(f"{path}: eos_token_id = {value!r} is neither a token id nor a list of them")
                found[token_id] = None
        return list(found)
