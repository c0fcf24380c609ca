"""Requests the server accepts, in OpenAI's shape with vLLM's names for token-level extras.

Every field is honoured or refused: what is not listed here is an error that names the field, and a field that is
listed with a single value is there because clients send that value. What is only accepted, as OpenAI does, says so.
Responses are plain dicts, made under `serving/http`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tandem.types.identity import LeaseKey, RunName

MAX_SAMPLES = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 64

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]  # one wrong id is enough to refuse a list of thousands
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Version = Annotated[int, Field(ge=0, lt=2**63)]  # engines keep one for every token, in 64 bits
Writable = Annotated[str, Field(pattern=r"^[^\x00]+$")]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


def show_null(schema: dict[str, Any]) -> None:
    """Null is as good as leaving a field out; the published schema says so."""
    required = schema.get("required", [])
    for name, entry in schema.get("properties", {}).items():
        if name in required:
            continue
        inner = {key: entry.pop(key) for key in list(entry) if key not in ("title", "description", "default")}
        choices = inner.pop("anyOf") if set(inner) == {"anyOf"} else [inner]
        entry["anyOf"] = choices if {"type": "null"} in choices else [*choices, {"type": "null"}]


class ApiModel(BaseModel):
    """Unknown fields are refused, a number given as text is not a number, and null is as if left out."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=show_null, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: value for key, value in data.items() if value is not None or key not in known}


class StreamOptions(ApiModel):
    include_usage: bool = False
    """A last chunk with the usage of the whole request."""

    continuous_usage_stats: bool = False
    """The usage so far in every chunk."""


class TextFormat(ApiModel):
    type: Literal["text"]


class JsonObjectFormat(ApiModel):
    type: Literal["json_object"]
    """Any JSON object."""


class NamedSchema(ApiModel):
    name: str = Field(max_length=256)
    """Unused."""

    description: str | None = None
    """Unused."""

    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True
    """The schema is enforced either way."""


class JsonSchemaFormat(ApiModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
JsonSchema = dict[str, Any] | str
"""As an object or as text."""
Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(ApiModel):
    """One of the first five; the completion is that and nothing else."""

    json_: JsonSchema | None = Field(None, alias="json")
    """A JSON schema."""

    regex: str | None = None
    """Of the whole completion."""

    choice: Choices | None = None
    """One of these texts."""

    grammar: str | None = None
    """In Lark's syntax or in GBNF."""

    json_object: bool = False
    """Any JSON object."""

    disable_any_whitespace: bool = False
    """No blanks between the parts of JSON."""

    whitespace_pattern: str | None = None
    """A regex of what may stand between the parts of JSON."""


class GenerationOptions(ApiModel):
    """What text and chat completions have in common."""

    model: str | None = None
    """The served model or a loaded LoRA adapter; left out: the served model."""

    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Samples of each prompt."""

    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    """0 takes the likeliest token."""

    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    """0 or -1: no limit."""

    min_p: float = Field(0.0, ge=0, le=1)
    """Least probability, relative to the likeliest token's."""

    repetition_penalty: float = Field(1.0, gt=0, le=100)
    """Over prompt and completion."""

    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[str, Bias] = Field(default_factory=dict, max_length=1024)
    """Token ids, as text, and what is added to their logits."""

    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    """The completion ends before the first of these; its tokens include the one that completed it."""

    stop_token_ids: TokenIds = Field(default_factory=list, max_length=1024)
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""

    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    """No end before so many."""

    skip_special_tokens: bool = True
    """False: they are part of the text, where `stop` finds them too."""

    spaces_between_special_tokens: Literal[True] = True
    """As the tokenizer writes them."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep so many tokens at the end of the prompt; -1: as many as leave room for max_tokens."""

    prompt_logprobs: NumLogprobs | None = None
    """Raw log-probs of the prompt's tokens, with so many alternatives. Not with stream."""

    logprobs_mode: Literal["sampling", "raw"] = "sampling"
    """Of sampled tokens: at the sampling temperature, before truncation; or of the model as it is."""

    return_token_ids: bool = False
    """Adds token_ids, prompt_token_ids and weight_versions (of the weights behind each token)."""

    return_kept_token_ids: bool = False
    """Adds, if the engine reports them, kept_token_ids (those that top_p, top_k and min_p left to sample each token
    from; empty: all) and kept_logprobs (of each token among these: its log-prob minus their log-mass)."""

    return_tokens_as_token_ids: bool = False
    """Log-probs name tokens as "token_id:5" instead of by their text."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only with stream."""

    request_id: str | None = Field(None, pattern=r"^[!-~]{1,256}$")
    """Becomes part of the response's id."""

    response_format: ResponseFormat | None = None
    """What the completion must be."""

    structured_outputs: StructuredOutputs | None = None
    """The same, in vLLM's words."""

    guided_json: JsonSchema | None = None
    """Earlier name of structured_outputs.json."""

    guided_regex: str | None = None
    """Earlier name of structured_outputs.regex."""

    guided_choice: Choices | None = None
    """Earlier name of structured_outputs.choice."""

    guided_grammar: str | None = None
    """Earlier name of structured_outputs.grammar."""

    priority: Literal[0] = 0
    """Requests are served in the order they come."""

    user: str | None = None
    """Accepted and unused."""

    metadata: dict[str, str] | None = None
    """Accepted and unused."""

    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(GenerationOptions):
    prompt: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)] | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
        Field(union_mode="left_to_right"),
    ]
    """One or several, as text or as token ids."""

    max_tokens: int = Field(16, ge=0)
    """0 only with echo."""

    add_special_tokens: bool = True
    """To prompts that are text."""

    logprobs: NumLogprobs | None = None
    """Log-probs of the tokens; above 0, also of so many likeliest ones."""

    echo: bool = False
    """The prompt before the completion, with its log-probs where asked for (then not with stream)."""

    best_of: int | None = Field(None, ge=1)
    """Must be n."""

    detokenize: bool = True
    """False: no text, neither of the completion nor of its tokens, for those who take token_ids. Not with stream, echo
    or logprobs above 0."""


class UpdateWeightsRequest(ApiModel):
    path: Writable
    """Directory of a published version, on a file system the server sees."""

    version: Version
    mode: Literal["keep", "wait", "abort"] = "keep"
    """Running requests go on under the new weights, end first, or end at once with what they have."""

    run: RunName | None = None
    """The run whose weights these are; answers name it. A run whose weights were replaced by another's is refused."""

    check_only: bool = False
    """Load nothing; only say whether weights may be loaded from there."""


class ClaimRequest(ApiModel):
    run: RunName
    """The start of a run that is to hold the server. It is refused while another run does, and has to claim it again
    and again to keep it."""

    lease: LeaseKey
    """The same at every start of one run, and known to that run alone: its next start gets the server at once."""

    place: str = Field("", max_length=1024)
    """Where that run is, for people who want to use its server."""

    instance: str | None = Field(default=None, max_length=64)
    """The start of the server that the run holds, or held before the server was started again: it gets it back."""

    check_only: bool = False
    """Take nothing; only say whether the server could be taken."""


class ReleaseRequest(ApiModel):
    lease: LeaseKey


class PauseRequest(ApiModel):
    mode: Literal["keep", "wait", "abort"] = "keep"
    """Running requests go on at /resume, end first, or end at once with what they have."""

    clear_cache: bool = False
    """Forget the prefix cache too."""


class LoadAdapterRequest(ApiModel):
    lora_name: Writable = Field(max_length=256)
    lora_path: Writable
    """Directory of a PEFT adapter, on a file system the server sees."""

    load_inplace: bool = False
    """Replace the adapter of this name."""

    version: Version | None = None
    """What the adapter's tokens carry as weight version; left out: that of the weights below it."""

    mode: Literal["keep", "wait"] = "keep"
    """What running requests do. keep: they go on, those of a replaced adapter under the new one where the engine can
    do that. wait: they end first, while nothing new begins."""

    run: RunName | None = None
    """The run whose adapter this is, as for /update_weights."""


class UnloadAdapterRequest(ApiModel):
    lora_name: str


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: TokenIds
