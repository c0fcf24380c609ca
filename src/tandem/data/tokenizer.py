"""Text to tokens and back, and chat templates; read from a model directory. No torch, no transformers.

Only what the fast tokenizer file and the chat template say is used, so that a prompt rendered here is
the same, token by token, as transformers' apply_chat_template would give.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from tandem.data.template import ChatTemplate, Span
from tandem.types.rollout import Message
from tandem.utils.errors import UserError
from tandem.utils.files import read_table

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Texts above this are encoded without holding the interpreter's lock, which costs short ones more than it saves.
LONG_TEXT = 4096


class Tokenizer:
    def __init__(self, model_dir: Path) -> None:
        path = model_dir / "tokenizer.json"
        if not path.exists():
            raise UserError(f"model.name = {str(model_dir)!r} holds no tokenizer: there is no tokenizer.json in it")
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{path} is no tokenizer that can be read: {error}") from error
        # A tokenizer file may carry the length of what its author once encoded; nothing is cut silently here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config_path = model_dir / "tokenizer_config.json"
        self._config = read_table(config_path) if config_path.exists() else {}
        self.template_text = self._read_template(model_dir)
        self._template = ChatTemplate(self.template_text) if self.template_text else None
        self.eos_token_ids = self._read_eos(model_dir)

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
        return self._template is not None

    @property
    def template_variables(self) -> set[str]:
        """What the chat template asks for."""
        return self._template.variables if self._template else set()

    @property
    def marks_generation(self) -> bool:
        """Whether the chat template tells what the assistant writes."""
        return self._template is not None and self._template.marks_generation

    @property
    def eos_texts(self) -> list[str]:
        """The tokens that end a completion, as they are written."""
        texts = (self._tokenizer.id_to_token(token_id) for token_id in self.eos_token_ids)
        return [text for text in texts if text]

    @property
    def info(self) -> dict[str, Any]:
        """The tokenizer's configuration, its chat template included."""
        special = {name: _text(self._config.get(name)) for name in SPECIAL_TOKENS}
        return self._config | special | {"chat_template": self.template_text}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if len(text) > LONG_TEXT:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids, and the character of the text at which each token begins."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts: list[int] = []
        previous_end = 0
        for start, end in encoding.offsets:
            # Some tokenizers leave the blanks a token begins with out of its offsets.
            starts.append(min(start, previous_end))
            previous_end = end
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
        return self._chat_template.render(template_variables)

    def generated(
        self, messages: list[Message], *, tools: list[dict[str, Any]] | None = None
    ) -> tuple[str, list[Span]]:
        """The rendered conversation, and where the template's generation blocks lie in it."""
        return self._chat_template.generated(self._variables(messages, tools, add_generation_prompt=False))

    def encode_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        return self.encode(self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools))

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError("the model has no chat template; give plain prompts instead of messages")
        return self._template

    def _variables(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> dict[str, Any]:
        special = {name: _text(self._config.get(name)) for name in SPECIAL_TOKENS}
        conversation = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return conversation | {name: text for name, text in special.items() if text is not None}

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
            value = read_table(path).get("eos_token_id") if path.exists() else None
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is None:
                    continue
                if type(token_id) is not int or token_id < 0:
                    raise UserError(f"{path}: eos_token_id = {value!r} is no token id, nor a list of them")
                found[token_id] = None
        return list(found)


def _text(token: Any) -> str | None:
    """A special token is written as plain text or as a table with its content."""
    return token.get("content") if isinstance(token, dict) else token
