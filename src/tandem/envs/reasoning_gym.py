"""Tasks of the `reasoning-gym` package: any of its datasets by name, or several as one composite.

[orchestrator.env]
id = "reasoning-gym"
args = { dataset = "leg_counting", config = { max_animals = 5 } }
args = { datasets = [{ name = "chain_sum", weight = 2 }, { name = "leg_counting" }] }
"""

import logging
from typing import Any

from pydantic import Field, model_validator

from tandem.config.base import Config
from tandem.types.rollout import Task
from tandem.utils.errors import UserError
from tandem.utils.places import one_line
from tandem.utils.spelling import nearest

logger = logging.getLogger(__name__)


class PartArgs(Config):
    name: str
    """A dataset of reasoning-gym."""

    weight: float = Field(default=1.0, gt=0)
    """Its share, relative to the other datasets."""

    config: dict[str, Any] = {}
    """Options of the dataset."""


class ReasoningGymArgs(Config):
    dataset: str | None = None
    """A dataset of reasoning-gym."""

    config: dict[str, Any] = {}
    """Options of the dataset."""

    datasets: list[PartArgs] = []
    """Several datasets, mixed by weight. Instead of dataset."""

    num_train: int = Field(default=2048, ge=1)
    num_eval: int = Field(default=128, ge=1)
    seed: int = 0

    answer_tag: str | None = "answer"
    """The answer is what stands last between <answer> and </answer>; without such tags, the completion scores as it is.
    None: always the whole completion."""

    system_prompt: str | None = None
    """One of the package's system prompts: default, DeepSeekZero, simple, direct, chain_of_draft."""

    @model_validator(mode="after")
    def _names_something(self) -> "ReasoningGymArgs":
        if (self.dataset is None) == (not self.datasets):
            raise ValueError("give either dataset or datasets")
        return self


class ReasoningGym:
    """Scored by the dataset itself, between 0 and 1."""

    Args = ReasoningGymArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        gym = load_package()
        self._extract = gym.utils.extract_answer
        self._dataset = self._create(gym)
        self._logged: set[str] = set()  # datasets whose errors were logged
        system = self._system_message(gym)
        tasks = [
            Task(index, [*system, {"role": "user", "content": entry["question"]}], str(entry["answer"]), entry)
            for index, entry in enumerate(self._dataset)
        ]
        self.eval_tasks, self.train_tasks = tasks[: self.args.num_eval], tasks[self.args.num_eval :]

    def score(self, task: Task, completion: str) -> float:
        answer = self._extract(completion, self.args.answer_tag) if self.args.answer_tag else None
        try:
            return self._dataset.score_answer(completion.strip() if answer is None else answer, task.info)
        except Exception as error:  # some datasets raise where they cannot parse an answer
            self._dataset.score_answer(task.answer, task.info)  # raises too where the dataset is at fault
            self._log_once(task, error)
            return 0.0

    def _log_once(self, task: Task, error: Exception) -> None:
        name = self.args.dataset or task.info["metadata"]["source_dataset"]
        if name not in self._logged:
            self._logged.add(name)
            logger.warning(
                "reasoning-gym's %s raises on answers it cannot parse; they get reward 0 (%s)", name, one_line(error)
            )

    def _create(self, gym: Any) -> Any:
        size, parts = self.args.num_train + self.args.num_eval, self.args.datasets
        for name in [self.args.dataset] if self.args.dataset else [part.name for part in parts]:
            self._check_name(gym, name)
        try:
            if self.args.dataset is not None:
                return gym.create_dataset(self.args.dataset, size=size, seed=self.args.seed, **self.args.config)
            specs = [gym.composite.DatasetSpec(part.name, part.weight, part.config) for part in parts]
            return gym.create_dataset("composite", size=size, seed=self.args.seed, datasets=specs)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"env.args = {self.args.model_dump()!r}: reasoning-gym refuses it: {error}") from error

    def _check_name(self, gym: Any, name: str) -> None:
        known = gym.factory.DATASETS
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                f"env.args.dataset = {name!r} is not one of the {len(known)} datasets of reasoning-gym"
                + (f"; did you mean {near!r}?" if near else f", such as {', '.join(sorted(known)[:3])}")
            )

    def _system_message(self, gym: Any) -> list[dict[str, str]]:
        name, known = self.args.system_prompt, gym.utils.SYSTEM_PROMPTS
        if name is None:
            return []
        if name not in known:
            raise UserError(f"env.args.system_prompt = {name!r} is not known; it is one of {', '.join(known)}")
        return [{"role": "system", "content": known[name]}]


def load_package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.composite
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ImportError as error:
        raise UserError(
            f"env.id = 'reasoning-gym' needs the reasoning-gym package ({error}): pip install 'tandem-rl[envs]'"
        ) from error
    return reasoning_gym
