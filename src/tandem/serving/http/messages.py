"""Chat requests to prompts: what a request may say, and what the model's template makes of it."""

from tandem.data.messages import read_message
from tandem.data.tokenizer import Tokenizer
from tandem.data.tool_calls import CallFormat, choose_format
from tandem.serving.http.errors import BadRequest
from tandem.serving.text_size import TextLimit, size_of
from tandem.types.chat import ChatMessage, ChatOptions
from tandem.types.rollout import Message
from tandem.utils.errors import UserError

OURS = ("messages", "tools", "add_generation_prompt")  # variables of a template that have fields of their own


class ChatPrompts:
    def __init__(self, tokenizer: Tokenizer, limit: TextLimit) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self._call_format = choose_format(tokenizer)

    def call_format(self) -> CallFormat:
        if isinstance(self._call_format, str):
            raise BadRequest(f"tools cannot be used with this model: {self._call_format}", "tools")
        return self._call_format

    def render(self, messages: list[ChatMessage], options: ChatOptions, *, show_tools: bool) -> str:
        """The text of the prompt."""
        refuse_size(self.limit, conversation_size(messages, options), "messages")
        self._check(messages, options)
        if show_tools:
            self.call_format()
        tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in options.tools]
        template = self.tokenizer.template(with_tools=show_tools)
        knows_developer = template is not None and "developer" in template.text
        plain = [
            self._plain(message, f"messages.{index}", knows_developer=knows_developer)
            for index, message in enumerate(messages)
        ]
        try:
            text = self.tokenizer.render(
                plain,
                add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
                tools=tools if show_tools else None,
                variables=options.chat_template_kwargs,
            )
        except UserError as error:
            raise BadRequest(str(error), "messages") from error
        return leave_open(text, plain[-1]["content"]) if options.continue_final_message else text

    def _check(self, messages: list[ChatMessage], options: ChatOptions) -> None:
        given = options.model_fields_set
        if options.continue_final_message and options.add_generation_prompt and "add_generation_prompt" in given:
            message = "continue_final_message and add_generation_prompt contradict each other; give one of them"
            raise BadRequest(message, "continue_final_message")
        if options.continue_final_message and not messages[-1].content:
            raise BadRequest("the final message has no content to go on with", "continue_final_message")
        taken = sorted(set(options.chat_template_kwargs) & set(OURS))
        if taken:
            raise BadRequest(f"chat_template_kwargs may not set {taken[0]!r}; use the field", "chat_template_kwargs")

    def _plain(self, message: ChatMessage, where: str, *, knows_developer: bool) -> Message:
        if message.content is None and not message.tool_calls:
            raise BadRequest(f"field '{where}.content' is missing", "messages")
        if message.tool_calls and message.role != "assistant":
            raise BadRequest(f"{where}.tool_calls: only the assistant calls tools", "messages")
        if (message.tool_call_id is not None) != (message.role == "tool"):
            raise BadRequest(f"{where}.tool_call_id: messages of role tool have one, and no others", "messages")
        given = message.model_dump(exclude_none=True)
        if message.role == "developer" and not knows_developer:
            given["role"] = "system"
        try:
            return read_message(given, where)
        except ValueError as error:
            raise BadRequest(str(error), "messages") from error


def refuse_size(limit: TextLimit, size: int, param: str) -> None:
    if refusal := limit.refusal(size):
        raise BadRequest(refusal, param)


def conversation_size(messages: list[ChatMessage], options: ChatOptions) -> int:
    """Characters of all that a template may write; no message and no call is written with less than one."""
    size = size_of(options.chat_template_kwargs)
    for function in (tool.function for tool in options.tools):
        size += len(function.name) + len(function.description or "") + size_of(function.parameters)
    for message in messages:
        size += 1 + content_size(message) + len(message.name or "") + len(message.tool_call_id or "")
        for call in message.tool_calls or []:
            size += 1 + len(call.id) + len(call.function.name) + len(call.function.arguments)
    return size


def content_size(message: ChatMessage) -> int:
    parts = [message.content] if isinstance(message.content, str) else [part.text for part in message.content or []]
    return sum(map(len, parts)) + max(len(parts) - 1, 0)


def leave_open(text: str, final: str) -> str:
    """The rendered conversation up to the end of its final message's content, as some templates trim it."""
    at = text.rfind(final.strip())
    if at < 0:
        message = "the chat template does not show the final message as it is, so it cannot be continued"
        raise BadRequest(message, "continue_final_message")
    kept = final.lstrip() if text.startswith(final.lstrip(), at) else final.strip()
    return text[: at + len(kept)]
