"""Chat requests in OpenAI's shape: messages, tools, and what /tokenize takes of them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.types.openai import ApiModel, GenerationOptions, NumLogprobs


class TextPart(ApiModel):
    type: Literal["text"]
    text: str


class CalledFunction(ApiModel):
    name: str
    arguments: str
    """A JSON object."""


class ToolCall(ApiModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(ApiModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    """May be left out where there are tool_calls."""

    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """Of the assistant."""

    tool_call_id: str | None = None
    """Of a tool's message."""


class FunctionDefinition(ApiModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema, shown to the model as it is; left out: the function takes no arguments."""

    strict: bool = False
    """Where a call is enforced, its arguments always follow the schema; otherwise this is refused."""


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: str


class NamedTool(ApiModel):
    type: Literal["function"]
    function: FunctionName


class ChatOptions(ApiModel):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message is left open, for the model to go on with. Not with add_generation_prompt."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template."""

    tools: Annotated[list[Tool], Field(max_length=128)] = Field(default_factory=list)
    """Only for models whose chat template shows tools."""


class ChatCompletionRequest(ChatOptions, GenerationOptions):
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    """Left out: as many as fit."""

    max_completion_tokens: int | None = Field(None, ge=1)
    """OpenAI's newer name of max_tokens."""

    add_special_tokens: bool = False
    """On top of what the chat template writes."""

    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    """So many likeliest tokens at each place. Only with logprobs."""

    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    """required: the message consists of calls. A named function: of one call of it."""

    parallel_tool_calls: bool = True
    """If not, only the first call of a message is returned."""


class TokenizeRequest(ChatOptions):
    """Either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    """Left out: to a prompt, but not to messages, whose template writes them."""

    return_token_strs: bool = False
