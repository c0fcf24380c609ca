"""The order of tasks, request seeds that depend on the task alone, and the check that prompts fit."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.config.orchestrator import OrchestratorConfig, TruncationConfig
from tandem.data.order import ShuffledOrder
from tandem.data.tokenizer import Tokenizer
from tandem.envs.protocol import Environment
from tandem.types.rollout import SamplingOptions, Task
from tandem.utils.errors import UserError


class TaskOrder:
    """The task behind each order number: a new permutation every epoch. Tasks that are set aside stay in their places,
    so that orders mean the same before and after; whoever takes orders leaves them out."""

    def __init__(self, tasks: Sequence[Task], seed: int, set_aside: Iterable[int] = ()) -> None:
        self.set_aside = set(set_aside)  # by their place among the tasks
        self._tasks = tasks
        self._shuffled = ShuffledOrder(len(tasks), seed)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, order: int) -> Task:
        return self._tasks[self.place(order)]

    @property
    def is_exhausted(self) -> bool:
        """Whether every task is set aside."""
        return len(self.set_aside) >= len(self)

    def place(self, order: int) -> int:
        return self._shuffled[order]


def request_seed(seed: int, purpose: str, order: int) -> int:
    """A seed for one request, the same in every run with the same seed, whatever ran before."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{order}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_options(truncation: TruncationConfig, stop: list[str]) -> SamplingOptions:
    return SamplingOptions(truncation.top_p, truncation.top_k, truncation.min_p, tuple(stop))


@dataclass(frozen=True)
class Prompts:
    """The token ids of every task's prompt, by the task's place: encoded once, before anything starts."""

    train: list[Sequence[int]]
    held_out: list[Sequence[int]]


def encode_prompts(environment: Environment, tokenizer: Tokenizer, config: OrchestratorConfig) -> Prompts:
    """Refuses tasks that cannot fit."""
    return Prompts(
        train=_encode("training", environment.train_tasks, tokenizer, config),
        held_out=_encode("held-out", environment.eval_tasks, tokenizer, config),
    )


def _encode(name: str, tasks: Sequence[Task], tokenizer: Tokenizer, config: OrchestratorConfig) -> list[Sequence[int]]:
    if not tasks:
        raise UserError(f"env.id = {config.env.id!r} has no {name} tasks")
    prompts: list[Sequence[int]] = []
    for task in tasks:
        try:
            prompt = tokenizer.encode_chat(task.messages, add_generation_prompt=True)
        except UserError as error:
            raise UserError(f"{name} task {task.index}: {error}") from error
        needed = len(prompt) + config.sampling.max_tokens
        if needed > config.seq_len:
            raise UserError(
                f"seq_len = {config.seq_len} is too short: the prompt of {name} task {task.index} has "
                f"{len(prompt)} tokens, plus sampling.max_tokens = {config.sampling.max_tokens}; "
                f"the smallest seq_len that fits is {needed}"
            )
        prompts.append(array("I", prompt))  # four bytes a token: there may be many tasks
    return prompts
