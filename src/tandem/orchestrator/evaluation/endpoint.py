"""An OpenAI-compatible endpoint that is evaluated: messages in, texts out."""

from dataclasses import dataclass
from typing import Any

import orjson

from tandem.commands.evaluate import EndpointConfig
from tandem.envs.model import ChatRefused
from tandem.types.rollout import Message
from tandem.utils.errors import UserError
from tandem.utils.http import RETRY_STATUS, HttpClient, Reply, RequestFailed, Unreachable

MODELS_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Answer:
    message: Message
    finish_reason: str

    @property
    def text(self) -> str:
        return self.message["content"]


class ChatEndpoint:
    """Closed by whoever made it. `sampling` goes with every request."""

    def __init__(self, config: EndpointConfig, base_url: str, sampling: dict[str, Any]) -> None:
        self.config = config
        self.sampling = sampling
        self.http = HttpClient(base_url, config.resolve_api_key(), timeout_s=config.timeout_s)
        self.model = config.model

    async def close(self) -> None:
        await self.http.close()

    async def find_model(self) -> str:
        """The model that is asked for: what the configuration says, or the first that is served."""
        if self.model is None:
            try:
                reply = await self.http.send("GET", "/v1/models", timeout_s=MODELS_TIMEOUT_S)
                self.model = orjson.loads(reply.body)["data"][0]["id"]
            except (Unreachable, orjson.JSONDecodeError, LookupError, TypeError) as error:
                raise UserError(
                    f"endpoint.base_url = {self.http.base_url!r} does not name its models ({error}); is it an "
                    "OpenAI-compatible endpoint? give endpoint.model if it has no /v1/models"
                ) from error
        return self.model

    async def ask(
        self,
        messages: list[Message],
        *,
        n: int,
        seed: int,
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> list[Answer]:
        """`n` answers; RequestFailed with the endpoint's reason where there are none."""
        body = self.sampling | {"model": self.model, "messages": messages, "n": n, "seed": seed}
        if tools:
            body["tools"] = tools
        if max_tokens is not None:
            body["max_tokens"] = min(max_tokens, self.sampling.get("max_tokens", max_tokens))
        reply = await self.http.post("/v1/chat/completions", body, self.config.retries, _send_again)
        try:
            choices = sorted(orjson.loads(reply.body)["choices"], key=lambda choice: choice["index"])
            answers = [Answer(_message(choice["message"]), choice["finish_reason"]) for choice in choices]
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            raise RequestFailed(f"{self.http.base_url} did not answer with choices: {reply.body[:200]!r}") from error
        if len(answers) != n:
            raise RequestFailed(f"{self.http.base_url} gave {len(answers)} choices instead of {n}")
        return answers


class EndpointModel:
    """Answers an environment's calls of the model during one episode."""

    def __init__(self, endpoint: ChatEndpoint, seed: int) -> None:
        self.endpoint = endpoint
        self.seed = seed
        self.messages: list[Message] = []

    def restart(self) -> None:
        self.messages = []

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        try:
            [answer] = await self.endpoint.ask(messages, n=1, seed=self.seed, tools=tools, max_tokens=max_tokens)
        except RequestFailed as error:
            raise ChatRefused(str(error)) from error
        self.messages = [*messages, answer.message]
        return {"message": answer.message, "finish_reason": answer.finish_reason}


async def _send_again(reply: Reply | None, problem: str) -> bool:
    return reply is None or reply.status in RETRY_STATUS


def _message(message: dict[str, Any]) -> Message:
    """As environments get it: text, and arguments of tool calls as tables. Calls that cannot be read are left out."""
    found: Message = {"role": "assistant", "content": message.get("content") or ""}
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        try:
            table = orjson.loads(arguments) if isinstance(arguments, str) else arguments
        except orjson.JSONDecodeError:
            continue
        if isinstance(table, dict):
            function = {"name": call["function"]["name"], "arguments": table}
            calls.append({"id": call["id"], "type": "function", "function": function})
    return found | ({"tool_calls": calls} if calls else {})
