"""The order of tasks, request seeds that depend on the task alone, and the check that prompts fit."""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.config.sampling import TruncationConfig
from tandem.data.order import ShuffledOrder
from tandem.data.sources import Indices, Mixed
from tandem.data.tokenizer import Tokenizer
from tandem.data.tool_calls import choose_format
from tandem.envs.process import HeldTask, is_played
from tandem.envs.protocol import Environment
from tandem.orchestrator.filters import refuse_hopeless_filters
from tandem.types.rollout import SamplingOptions, Task
from tandem.utils.errors import UserError

AT_ONCE = 64  # places of a mixture that are worked out together


class TaskOrder:
    """The task of each group, by its id: a new permutation every epoch. Tasks that are set aside stay in their places,
    so that ids mean the same before and after; whoever takes ids leaves them out. Those below `position` were
    taken.

    Tasks of several environments come by `weights`, by name: every stretch of ids holds the shares, to within a task
    or so."""

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        set_aside: Iterable[int] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.position = 0
        self.set_aside = set(set_aside)  # by their place among the tasks
        self._tasks = tasks
        self._places = _mixed_places(tasks, seed, weights) if weights else ShuffledOrder(len(tasks), seed)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, group_id: int) -> Task:
        return self._tasks[self.place(group_id)]

    @property
    def is_exhausted(self) -> bool:
        """Whether every task is set aside."""
        return len(self.set_aside) >= len(self)

    def place(self, group_id: int) -> int:
        return self._places[group_id]

    def take(self, skips: Callable[[int, int], bool] = lambda group_id, place: False) -> int:
        """The next group id. Those of tasks that are set aside, or that `skips` passes over, are left out."""
        while True:
            group_id, self.position = self.position, self.position + 1
            if (place := self.place(group_id)) not in self.set_aside and not skips(group_id, place):
                return group_id


def order_of_tasks(tasks: Sequence[Task], config: OrchestratorConfig) -> TaskOrder:
    """As the configuration has it: by its seed, and several environments by their weights."""
    weights = {name: plan.weight for name, plan in config.plans.items()} if config.envs else None
    return TaskOrder(tasks, config.seed, weights=weights)


class MixedPlaces:
    """The places of tasks in an endless mixture, each worked out once: they are asked for again and again."""

    def __init__(self, mixed: Mixed[int]) -> None:
        self._mixed = mixed
        self._known: list[int] = []

    def __getitem__(self, group_id: int) -> int:
        while group_id >= len(self._known):
            self._known += self._mixed.batch(len(self._known), AT_ONCE)
        return self._known[group_id]


def _mixed_places(tasks: Sequence[Task], seed: int, weights: Mapping[str, float]) -> MixedPlaces:
    """The tasks of an environment lie together."""
    sources: list[Indices] = []
    offset = 0
    for name in weights:
        size = sum(task.environment == name for task in tasks)
        sources.append(Indices(size, seed, shuffle=True, offset=offset))
        offset += size
    return MixedPlaces(Mixed(sources, list(weights.values())))


def request_seed(seed: int, purpose: str, group_id: int) -> int:
    """A seed for one request, the same in every run with the same seed, whatever ran before."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_options(truncation: TruncationConfig, stop: list[str]) -> SamplingOptions:
    return SamplingOptions(truncation.top_p, truncation.top_k, truncation.min_p, tuple(stop))


@dataclass(frozen=True)
class Prompts:
    """The token ids of every task's prompt, by the task's place: encoded once, before anything starts. Without held-out
    ones, nothing is evaluated."""

    train: list[Sequence[int]]
    held_out: list[Sequence[int]]


def encode_prompts(
    environment: Environment, tokenizer: Tokenizer, config: OrchestratorConfig, *, evaluates: bool = True
) -> Prompts:
    """Refuses tasks that cannot fit, and filters that none of them can pass."""
    for plan in config.plans.values():
        own = [task for task in environment.train_tasks if task.environment == plan.name]
        is_interactive = any(is_played(task) for task in own)
        refuse_hopeless_filters(plan, is_interactive=is_interactive)
    return Prompts(
        train=encode_tasks("training", environment.train_tasks, tokenizer, config),
        held_out=encode_tasks("held-out", environment.eval_tasks, tokenizer, config) if evaluates else [],
    )


def encode_tasks(
    name: str, tasks: Sequence[Task], tokenizer: Tokenizer, config: OrchestratorConfig
) -> list[Sequence[int]]:
    plans = config.plans
    for plan in plans.values():
        if not any(task.environment == plan.name for task in tasks):
            raise UserError(f"env.id = {plan.env.id!r} has no {name} tasks")
    prompts: list[Sequence[int]] = []
    for task in tasks:
        try:
            prompt = _encode_task(task, tokenizer)
        except UserError as error:
            raise UserError(f"{name} task {task.label}: {error}") from error
        max_tokens = plans[task.environment].sampling.max_tokens
        needed = len(prompt) + max_tokens
        if needed > config.seq_len:
            raise UserError(
                f"seq_len = {config.seq_len} is too short: the prompt of {name} task {task.label} has "
                f"{len(prompt)} tokens, plus sampling.max_tokens = {max_tokens}; "
                f"the smallest seq_len that fits is {needed}"
            )
        prompts.append(array("I", prompt))  # four bytes a token: there may be many tasks
    return prompts


def _encode_task(task: Task, tokenizer: Tokenizer) -> list[int]:
    if is_played(task) and not task.messages:
        return []  # the episode begins otherwise
    tools = task.tools if isinstance(task, HeldTask) else None
    if tools and isinstance(why := choose_format(tokenizer), str):
        raise UserError(f"it gives the model tools, which this model cannot use: {why}")
    return tokenizer.encode_chat(task.messages, add_generation_prompt=True, tools=tools)
