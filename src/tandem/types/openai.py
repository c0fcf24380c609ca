"""Requests the server accepts, in OpenAI's shape with vLLM's names for token-level extras.

Every field is honoured or refused: fields that are not known, and values that are not supported yet,
are errors that name the field. Responses are plain dicts, made in `inference/responses.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

TokenId = Annotated[int, Field(ge=0)]
MAX_SAMPLES = 1024


class ApiModel(BaseModel):
    """Unknown fields are refused, and a number given as text is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class GenerationOptions(ApiModel):
    """What text and chat completions have in common."""

    model: str | None = None
    """The served model; may be left out."""

    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Samples of each prompt."""

    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    """0 takes the likeliest token."""

    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    """0 or -1: no limit."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=1024)
    ignore_eos: bool = False
    return_token_ids: bool = False
    """Adds `token_ids`, `prompt_token_ids` and `weight_versions` to every choice."""

    user: str | None = None
    """Accepted and unused, as by OpenAI."""

    stream: bool = False
    stop: str | list[str] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None

    @field_validator(
        "n", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "return_token_ids", "stream",
        "presence_penalty", "frequency_penalty", mode="before",
    )  # fmt: skip
    @classmethod
    def _null_is_the_default(cls, value: Any, info: Any) -> Any:
        default = cls.model_fields[info.field_name].get_default(call_default_factory=True)
        return default if value is None else value

    @field_validator("stream", "stop", "presence_penalty", "frequency_penalty", "logit_bias")
    @classmethod
    def _not_supported_yet(cls, value: Any) -> Any:
        return refuse_if_given(value)


def refuse_if_given(value: Any) -> Any:
    """For fields that are known but not honoured yet: nothing is accepted and ignored."""
    if value:
        raise ValueError(f"{value!r} is not supported by this server yet; leave the field out")
    return value


class CompletionRequest(GenerationOptions):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = Field(16, ge=1)
    """null: as many as fit."""

    logprobs: int | None = Field(None, ge=0)
    """0 or 1: log-probs of the sampled tokens."""

    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @field_validator("logprobs")
    @classmethod
    def _sampled_tokens_only(cls, value: int | None) -> int | None:
        if value is not None and value > 1:
            raise ValueError(f"{value} alternatives are not supported by this server yet; give 0 or 1")
        return value

    @field_validator("echo", "best_of", "suffix")
    @classmethod
    def _not_in_completions_yet(cls, value: Any) -> Any:
        return refuse_if_given(value)


class ChatMessage(ApiModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None


class ChatCompletionRequest(GenerationOptions):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    """Left out: as many as fit."""

    max_completion_tokens: int | None = Field(None, ge=1)
    """OpenAI's newer name of max_tokens."""

    logprobs: bool = False
    top_logprobs: int | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _null_is_false(cls, value: Any) -> Any:
        return False if value is None else value

    @field_validator("top_logprobs")
    @classmethod
    def _no_alternatives_yet(cls, value: int | None) -> int | None:
        if value:
            raise ValueError(f"{value} alternatives are not supported by this server yet; give 0")
        return value


class UpdateWeightsRequest(ApiModel):
    path: str
    """Directory of a published version, on a file system the server sees."""

    version: int = Field(ge=0)
