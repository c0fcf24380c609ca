"""Sampling as the model's authors advise it: what requests leave out is taken from generation_config.json, as vLLM
does it."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tandem.types.chat import ChatCompletionRequest
from tandem.types.openai import GenerationOptions
from tandem.utils.errors import UserError
from tandem.utils.files import read_json

FILE = "generation_config.json"
FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
Body = TypeVar("Body", bound=GenerationOptions)


class SamplingDefaults:
    """By field. `max_tokens` is one for chats only: text completions have 16, as everywhere."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values = values or {}
        self.max_tokens: int | None = self.values.pop("max_new_tokens", None)

    @classmethod
    def read(cls, model_dir: Path) -> "SamplingDefaults":
        path = model_dir / FILE
        given = read_json(path) if path.exists() else {}
        known = (*FIELDS, "max_new_tokens")
        found = {name: value for name in known if (value := given.get(name)) is not None}
        checked = {name: value for name, value in found.items() if name in FIELDS}
        try:
            GenerationOptions.model_validate(checked)
            ChatCompletionRequest.model_validate(
                {"messages": [{"role": "user", "content": ""}], "max_tokens": found.get("max_new_tokens")}
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{path}: {first['loc'][0]} = {first['input']!r}: {first['msg']}; correct it, "
                "or set generation_config = 'vllm' to leave the file aside"
            ) from error
        return cls(found)

    def apply(self, body: Body) -> Body:
        """The request with what it leaves out."""
        missing = {name: value for name, value in self.values.items() if name not in body.model_fields_set}
        return body.model_copy(update=missing) if missing else body
