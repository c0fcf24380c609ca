"""Conversations with a simulated user: one who follows a script, or a model behind any OpenAI-compatible endpoint.

    [orchestrator.env]
    id = "simulated-user"
    args = { path = "chats.jsonl", base_url = "http://127.0.0.1:8001", model = "user", max_turns = 6 }

A row has `prompt` (what the user says first), `answer`, and either `script` (what they say after that, a list) or
`persona` (what the endpoint's model is told about whom it plays). The reward is that of what the model says last.
"""

import os
from typing import Any

import orjson
from pydantic import Field

from tandem.config.base import Config
from tandem.config.shared import root_url
from tandem.envs.conversing import User, converse
from tandem.envs.dataset import DatasetArgs, DatasetEnvironment
from tandem.envs.model import Model
from tandem.envs.results import Result
from tandem.rewards.functions import exact_match
from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError, shown
from tandem.utils.http import RETRY_STATUS, HttpClient, Reply

DONE = "DONE"
INSTRUCTION = f"""\
You play a user who talks to an assistant. Stay in this role and say only what the user says next.
When you have what you wanted, say {DONE} and nothing else.

The user: """


class UserEndpointArgs(Config):
    base_url: str | None = None
    """Address of the endpoint, with or without /v1. None: users follow their scripts."""

    model: str = "default"
    """Model to ask for."""

    api_key_var: str | None = None
    """Environment variable that holds the API key."""

    temperature: float = Field(default=0.7, ge=0)
    max_tokens: int = Field(default=256, ge=1)


class SimulatedUserArgs(DatasetArgs, UserEndpointArgs):
    max_turns: int = Field(default=6, ge=1)
    """Turns of the model."""


class SimulatedUser(DatasetEnvironment):
    Args = SimulatedUserArgs

    def __init__(self, **args: object) -> None:
        super().__init__(**args)
        self.args: SimulatedUserArgs
        for task in [*self.train_tasks, *self.eval_tasks]:
            self._check(task)
        self._http: HttpClient | None = None

    def setup(self) -> None:
        if self.args.base_url is not None:
            key = os.environ.get(self.args.api_key_var) if self.args.api_key_var else None
            self._http = HttpClient(root_url(self.args.base_url), key, timeout_s=600)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def rollout(self, task: Task, model: Model) -> Result:
        user = self._scripted(task) if "script" in task.info else self._modelled(task)
        played = await converse(model, task.messages, user, max_turns=self.args.max_turns)
        return played.result(exact_match(played.text, task.answer))

    def _check(self, task: Task) -> None:
        script = task.info.get("script")
        if script is not None and not (isinstance(script, list) and all(isinstance(line, str) for line in script)):
            raise UserError(f"task {task.index}: 'script' must be a list of texts; it is {shown(script)}")
        if script is None and (self.args.base_url is None or not isinstance(task.info.get("persona"), str)):
            raise UserError(f"task {task.index} needs 'script', or 'persona' as text and env.args.base_url")

    def _scripted(self, task: Task) -> User:
        lines = iter(task.info["script"])
        return lambda messages: next(lines, None)

    def _modelled(self, task: Task) -> User:
        instruction = {"role": "system", "content": INSTRUCTION + task.info["persona"]}

        async def user(messages: list[Message]) -> str | None:
            swapped = {"user": "assistant", "assistant": "user"}
            talk = [
                {"role": swapped[message["role"]], "content": message["content"]}
                for message in messages
                if message["role"] in swapped
            ]
            said = await self._ask([instruction, *talk])
            return None if said.strip().rstrip(".!").endswith(DONE) else said

        return user

    async def _ask(self, messages: list[Message]) -> str:
        assert self._http is not None, "not set up"
        body: dict[str, Any] = {
            "model": self.args.model,
            "messages": messages,
            "temperature": self.args.temperature,
            "max_tokens": self.args.max_tokens,
        }
        reply = await self._http.post("/v1/chat/completions", body, 3, _send_again)
        return orjson.loads(reply.body)["choices"][0]["message"]["content"] or ""


async def _send_again(reply: Reply | None, problem: str) -> bool:
    return reply is None or reply.status in RETRY_STATUS
