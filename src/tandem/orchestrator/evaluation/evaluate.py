"""An environment's tasks, asked of an endpoint and scored: what `evaluate` does, besides finding the model."""

import asyncio
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tandem.commands.evaluate import EvaluateConfig
from tandem.envs.process import EnvironmentProcess, HeldTask
from tandem.envs.results import checked_score, total
from tandem.isolation.failures import failure_of
from tandem.orchestrator.evaluation.endpoint import ChatEndpoint, EndpointModel
from tandem.orchestrator.evaluation.scores import summarize
from tandem.orchestrator.tasks import request_seed
from tandem.types.rollout import Task
from tandem.utils.errors import UserError, naming_file
from tandem.utils.files import json_bytes
from tandem.utils.log import say
from tandem.utils.progress import EVERY_S

RESULTS, SAMPLES = "results.json", "samples.jsonl"  # below output_dir, of the newest evaluation


@dataclass(frozen=True)
class Outcome:
    """One task: the rewards of its samples, or why there are none."""

    task: int
    rewards: list[float]
    fingerprint: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def choose_tasks(config: EvaluateConfig, environment: EnvironmentProcess) -> list[HeldTask]:
    """The tasks to ask. UserError where there are none."""
    split = environment.eval_tasks if config.split == "held_out" else environment.train_tasks
    tasks = split[: config.num_prompts]
    if not tasks:
        raise UserError(f"env.id = {config.env.id!r} has no {config.split} tasks")
    return tasks


def fingerprint(task: Task) -> str:
    """Of what is asked, and of the answer. A system prompt is how it is asked, and may differ."""
    asked = [message for message in task.messages if message.get("role") != "system"]
    content = orjson.dumps([asked, task.answer], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(content).hexdigest()[:16]


async def evaluate(
    config: EvaluateConfig,
    environment: EnvironmentProcess,
    endpoint: ChatEndpoint,
    tasks: Sequence[HeldTask],
    target: str,
) -> list[Outcome]:
    """Every task, `concurrency` of them at once. One that fails costs nothing but itself. `target` is the model's name,
    for those who wait."""
    limit = asyncio.Semaphore(config.concurrency)

    async def one(group_id: int, task: HeldTask) -> Outcome:
        async with limit:
            try:
                samples = await _samples(config, environment, endpoint, group_id, task)
            except Exception as error:  # answers: the environment's or the endpoint's error is the task's result
                return Outcome(task.index, [], error=str(failure_of(error)))
        return Outcome(task.index, [sample["reward"] for sample in samples], fingerprint(task), samples)

    running = [asyncio.ensure_future(one(group_id, task)) for group_id, task in enumerate(tasks)]
    try:
        while (await asyncio.wait(running, timeout=EVERY_S))[1]:
            num_done = sum(task.done() for task in running)
            say(f"evaluate: {num_done:,} of {len(running):,} tasks done by {target}", error=True)
        return [task.result() for task in running]
    finally:
        for task in running:
            task.cancel()


async def _samples(
    config: EvaluateConfig, environment: EnvironmentProcess, endpoint: ChatEndpoint, group_id: int, task: HeldTask
) -> list[dict[str, Any]]:
    seed = request_seed(config.seed, "eval", group_id)
    if task.is_interactive:
        seeds = [request_seed(seed, "rollout", number) for number in range(config.samples)]
        return await asyncio.gather(*(_episode(environment, endpoint, task, one) for one in seeds))
    answers = await endpoint.ask(task.messages, n=config.samples, seed=seed)
    scores = await asyncio.gather(*(environment.score(task, answer.text) for answer in answers))
    return [
        _line(task, total(checked_score(score)), completion=answer.text, finish_reason=answer.finish_reason)
        for answer, score in zip(answers, scores, strict=True)
    ]


async def _episode(
    environment: EnvironmentProcess, endpoint: ChatEndpoint, task: HeldTask, seed: int
) -> dict[str, Any]:
    model = EndpointModel(endpoint, seed)
    result = await environment.play(task, model)
    conversation = model.messages[len(task.messages) :]
    return _line(task, result.total, conversation=conversation, ended=result.ended)


def _line(task: HeldTask, reward: float, **rest: Any) -> dict[str, Any]:
    return {"task": task.index, "messages": task.messages, "answer": task.answer, **rest, "reward": reward}


def results_of(target: str, outcomes: Sequence[Outcome], solved_reward: float) -> dict[str, Any]:
    """What results.json holds of one model. UserError where every task failed."""
    scored = [outcome for outcome in outcomes if outcome.error is None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if not scored:
        raise UserError(f"all {len(errors)} tasks failed on {target}: {errors[0]}")
    return {
        "target": target,
        "num_prompts": len(scored),
        "num_failed": len(errors),
        "scores": summarize([outcome.rewards for outcome in scored], solved_reward),
        "tasks": {str(outcome.task): outcome.rewards for outcome in scored},
        "fingerprints": {str(outcome.task): outcome.fingerprint for outcome in scored},
        "errors": {str(outcome.task): outcome.error for outcome in outcomes if outcome.error is not None},
    }


def append_samples(path: Path, target: str, outcomes: Sequence[Outcome]) -> None:
    with naming_file(path), path.open("ab") as file:
        for outcome in outcomes:
            for sample in outcome.samples:
                file.write(json_bytes({"target": target} | sample) + b"\n")


def keep_earlier(folder: Path) -> Path | None:
    """What an earlier evaluation wrote gets the next free number; results.1.json and samples.1.jsonl are the oldest.
    The first file that was renamed, None if there was none."""
    written = [folder / name for name in (RESULTS, SAMPLES)]
    number = next(n for n in itertools.count(1) if not any(_numbered(path, n).exists() for path in written))
    kept = [path.rename(_numbered(path, number)) for path in written if path.exists()]
    return kept[0] if kept else None


def _numbered(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}")
