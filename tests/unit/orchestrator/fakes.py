"""A server, an environment and a policy that satisfy the protocols of the orchestrator (orchestrator/protocols.py)."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.data.tokenizer import Tokenizer
from tandem.orchestrator.client import ServerLost
from tandem.orchestrator.concurrency import EngineLoad
from tandem.types.rollout import Completion, Rollout, SamplingRequest, Task, Turn
from tandem.utils.errors import UserError

TASKS = [Task(index, [{"role": "user", "content": "abcdef"[index]}], "") for index in range(6)]


def say_more(rollout: Rollout, *token_ids: list[int], finish_reason: str = "stop") -> Rollout:
    """The rollout as a conversation that goes on with these turns."""
    turns = [
        Turn([12], Completion(ids, [-0.5] * len(ids), rollout.completion.versions[:1] * len(ids), finish_reason))
        for ids in token_ids
    ]
    return replace(rollout, later=[*rollout.later, *turns])


class FakeServer:
    """Completion number i of a group has i + 1 tokens, of the version that was loaded last."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.on_trouble: Callable[[], None] = lambda: None
        self.tokenizer = tokenizer
        self.loaded: list[tuple[str, int]] = []
        self.requests: list[dict[str, Any]] = []
        self.instance: str | None = None
        self.lost_after: int | None = None  # requests
        self.refuses = False

    async def wait_until_ready(self) -> None:
        pass

    async def check_access(self, folder: Path) -> None:
        if self.refuses:
            raise UserError(f"weights from {folder.name} are refused")

    async def is_well(self) -> bool:
        return True

    @property
    def is_busy(self) -> bool:
        return False

    async def release(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def read_load(self) -> EngineLoad | None:
        return None

    async def meet(self) -> None:
        pass

    def adopt(self) -> None:
        self.instance = "only"

    async def update_weights(self, path: Path, version: int) -> None:
        self.loaded.append((path.name, version))

    async def load_adapter(self, path: Path, version: int) -> None:
        raise AssertionError("the trainer publishes whole models")

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        self.requests.append({"prompt": self.tokenizer.decode(prompt_ids)} | vars(sampling))
        await asyncio.sleep(0)
        if self.lost_after is not None and len(self.requests) > self.lost_after:
            raise ServerLost("run 'theirs-1' has taken it")
        version = self.loaded[-1][1]
        return [
            Completion(self.tokenizer.encode("x" * length), [-0.25] * length, [version] * length, "stop")
            for length in range(1, sampling.n + 1)
        ]


class FakeEnvironment:
    """Rewards a completion by its length: the first entry for one token, and so on."""

    def __init__(self, rewards: Sequence[Any]) -> None:
        self.rewards = rewards
        self.train_tasks = TASKS[:4]
        self.eval_tasks = TASKS[4:]

    async def score(self, task: Task, completion: str) -> float:
        return self.rewards[len(completion) - 1]


class FakePolicy:
    """What the dispatcher sees of a policy: a version, and a future that is done when it changes."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.next_update: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def update(self) -> None:
        self.version += 1
        self.next_update.set_result(self.version)
        self.next_update = asyncio.get_running_loop().create_future()
