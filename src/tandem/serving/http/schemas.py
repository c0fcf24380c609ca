"""What answers look like, as /openapi.json publishes it. The answers themselves are plain dicts, since to validate our
own output would cost more than to generate it on a small model; tests hold them against these models.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

SOMETIMES: Any = Field(default_factory=object)
"""Of a field that is there only where it is asked for: not required, and without a default."""


def shape(name: str, **fields: Any) -> type[BaseModel]:
    """A model of fields that are all required."""
    required: dict[str, Any] = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, **required)


StopReason = Annotated[str | int | None, Field(description="The stop string or token, if one ended it.")]
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None], Field(description="For each token of the prompt but the first, by id.")
]


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatToken]


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CalledFunctionAnswer(BaseModel):
    name: str
    arguments: str


class CallAnswer(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class MessageAnswer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[CallAnswer] = SOMETIMES


class Choice(BaseModel):
    index: int
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: list[int] = SOMETIMES
    weight_versions: Annotated[list[int], Field(description="Version of the weights behind each token.")] = SOMETIMES
    kept_token_ids: list[list[int]] = SOMETIMES
    kept_logprobs: list[float] = SOMETIMES


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] = SOMETIMES
    prompt_logprobs: PromptLogprobs = SOMETIMES


class ChatChoice(Choice):
    message: MessageAnswer
    logprobs: ChatLogprobs | None


class Completion(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class TextCompletion(Completion):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatCompletion(Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] = SOMETIMES
    prompt_logprobs: PromptLogprobs = SOMETIMES


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


ServerVersion = shape("ServerVersion", version=str)
IsPaused = shape("IsPaused", is_paused=bool)
Paused = shape("Paused", status=Literal["paused"], paused=bool)
Resumed = shape("Resumed", status=Literal["resumed"], paused=bool)
Claimed = shape("Claimed", run=str)
Released = shape("Released", released=Literal[True])
WeightsUpdated = shape("WeightsUpdated", version=int)
CacheReset = shape("CacheReset", success=bool)
AdapterLoaded = shape("AdapterLoaded", lora_name=str, lora_path=str)
AdapterUnloaded = shape("AdapterUnloaded", lora_name=str)
Tokenized = shape("Tokenized", count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None)
Detokenized = shape("Detokenized", prompt=str)
ModelList = shape("ModelList", object=Literal["list"], data=list[ModelEntry])
STATUS: dict[str, Any] = {"version": int, "model": str, "paused": bool}
Healthy = shape("Healthy", status=Literal["ok"], **STATUS)
Unhealthy = shape("Unhealthy", status=Literal["failed"], reason=str, **STATUS)


class TokenizerInfo(BaseModel):
    """And all of tokenizer_config.json."""

    tokenizer_class: str


class ErrorDetails(BaseModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: Annotated[str | None, Field(description="The field it is about.")]
    code: str | None


class Error(BaseModel):
    error: ErrorDetails
