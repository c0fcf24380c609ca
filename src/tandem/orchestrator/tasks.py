"""The order of tasks, request seeds that depend on the task alone, and the check that prompts fit."""

import hashlib
from collections.abc import Iterable, Sequence

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


def check_prompts(environment: Environment, tokenizer: Tokenizer, config: OrchestratorConfig) -> None:
    """Refuse tasks that cannot fit, before anything starts."""
    for name, tasks in (("training", environment.train_tasks), ("held-out", environment.eval_tasks)):
        if not tasks:
            raise UserError(f"env.id = {config.env.id!r} has no {name} tasks")
        for task in tasks:
            num_tokens = _prompt_length(tokenizer, task, name)
            needed = num_tokens + config.sampling.max_tokens
            if needed > config.seq_len:
                raise UserError(
                    f"seq_len = {config.seq_len} is too short: the prompt of {name} task {task.index} has "
                    f"{num_tokens} tokens, plus sampling.max_tokens = {config.sampling.max_tokens}; "
                    f"the smallest seq_len that fits is {needed}"
                )


def _prompt_length(tokenizer: Tokenizer, task: Task, name: str) -> int:
    try:
        return len(tokenizer.encode_chat(task.messages, add_generation_prompt=True))
    except UserError as error:
        raise UserError(f"{name} task {task.index}: {error}") from error
