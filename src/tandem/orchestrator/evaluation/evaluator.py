"""Evaluation of a run on its held-out tasks. Called by the loop."""

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Sequence

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.config.sampling import EvalConfig
from tandem.isolation.failures import Failure, failure_of, top_reasons
from tandem.orchestrator.evaluation.scores import summarize
from tandem.orchestrator.failures import TaskFailed, TooManyFailures
from tandem.orchestrator.protocols import GroupMaker
from tandem.orchestrator.samples import write_samples
from tandem.orchestrator.tasks import request_seed, sampling_options
from tandem.types.rollout import ALL_TOKENS, Group, SamplingOptions, SamplingRequest, Task
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

logger = logging.getLogger(__name__)


class Evaluator:
    def __init__(
        self,
        maker: GroupMaker,
        config: EvalConfig,
        tasks: Sequence[Task],
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        seed: int,
        run_log: RunLog,
        options: SamplingOptions = ALL_TOKENS,
        name: str = "",
        solved_reward: float = 1.0,
    ) -> None:
        self.maker = maker
        self.config = config
        self.tasks = list(zip(tasks, prompts, strict=True))[: config.num_prompts]
        self.max_tokens = max_tokens
        self.seed = seed
        self.run_log = run_log
        self.options = options
        self.name = name  # of the environment, where there are several
        self.solved_reward = solved_reward

    def is_due(self, previous: int, version: int, last_version: int) -> bool:
        """Whether going from version `previous` to `version` passes an evaluation; the last one always is."""
        every = self.config.every
        return version == last_version or (every is not None and version // every > previous // every)

    async def run(self, version: int, run_dir: RunDir) -> float:
        """Mean reward over the held-out tasks; tasks that fail are counted, not averaged."""
        metrics = await self.measure(version, run_dir)
        self.run_log.metrics(version, metrics)
        return metrics[self.prefix + "reward"]

    @property
    def prefix(self) -> str:
        return f"eval/{self.name}/" if self.name else "eval/"

    async def measure(self, version: int, run_dir: RunDir) -> dict[str, float]:
        """The metrics of an evaluation, whose samples are written."""
        started = time.monotonic()
        outcomes = await asyncio.gather(
            *(self._group(group_id, task, prompt) for group_id, (task, prompt) in enumerate(self.tasks)),
            return_exceptions=True,
        )
        groups = [outcome for outcome in outcomes if isinstance(outcome, Group)]
        failures = [_failure(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        whose = f" of {self.name}" if self.name else ""
        if not groups:
            raise TooManyFailures(f"all {len(failures)} held-out tasks{whose} failed: {top_reasons(failures)}")
        if failures:
            reasons = top_reasons(failures)
            logger.warning("%d held-out tasks%s failed: %s", len(failures), whose, reasons)
            self.run_log.event("eval_failures", version=version, count=len(failures), reasons=reasons)
        scores = summarize([group.rewards for group in groups], self.solved_reward)
        write_samples(run_dir.eval_samples(version, self.name), groups, advantages=None)
        metrics = {
            **{name: value for name, value in scores.items() if math.isfinite(value)},
            "num_prompts": len(groups),
            "num_failed": len(failures),
            "seconds": time.monotonic() - started,
        }
        where = f" on {self.name}" if self.name else ""
        logger.info("held-out reward of version %d%s: %s", version, where, describe(scores, len(groups)))
        return {self.prefix + key: value for key, value in metrics.items()}

    async def _group(self, group_id: int, task: Task, prompt: Sequence[int]) -> Group:
        seed = request_seed(self.seed, "eval", group_id)
        sampling = SamplingRequest(self.config.samples, self.max_tokens, self.config.temperature, seed, self.options)
        return await self.maker.make_group(task, prompt, group_id, sampling)


class MixedEvaluator:
    """Evaluates several environments. The reward of all is the mean of theirs, whatever their number of prompts."""

    def __init__(self, evaluators: Sequence[Evaluator], run_log: RunLog) -> None:
        self.evaluators = evaluators
        self.run_log = run_log

    def is_due(self, previous: int, version: int, last_version: int) -> bool:
        return self.evaluators[0].is_due(previous, version, last_version)

    async def run(self, version: int, run_dir: RunDir) -> float:
        """In one line of metrics.jsonl: what is ended before it evaluates all of them again."""
        measured = await asyncio.gather(*(evaluator.measure(version, run_dir) for evaluator in self.evaluators))
        metrics = {name: value for of_one in measured for name, value in of_one.items()}
        reward = statistics.fmean(metrics[evaluator.prefix + "reward"] for evaluator in self.evaluators)
        self.run_log.metrics(version, {**metrics, "eval/reward": reward})
        return reward


def make_evaluator(
    config: OrchestratorConfig,
    maker: GroupMaker,
    tasks: Sequence[Task],
    prompts: Sequence[Sequence[int]],
    run_log: RunLog,
) -> Evaluator | MixedEvaluator:
    """Of all environments; without prompts, it has nothing to evaluate."""
    evaluators: list[Evaluator] = []
    for name, plan in config.plans.items():
        places = [place for place in range(len(prompts)) if tasks[place].environment == name]
        evaluators.append(
            Evaluator(
                maker,
                config.eval.model_copy(update={"num_prompts": plan.num_eval_prompts}),
                [tasks[place] for place in places],
                [prompts[place] for place in places],
                plan.sampling.max_tokens,
                config.seed,
                run_log,
                sampling_options(config.eval, plan.sampling.stop),
                name,
                config.solved_reward,
            )
        )
    return MixedEvaluator(evaluators, run_log) if config.envs else evaluators[0]


def describe(scores: dict[str, float], num_prompts: int) -> str:
    """In a line of the log."""
    passes = [f"{name} {value:.3f}" for name, value in scores.items() if name.startswith("pass@") and "_" not in name]
    text = f"{scores['reward']:.3f} ± {scores['reward_ci95']:.3f} over {num_prompts} prompts"
    return f"{text}, {', '.join(passes)}" if len(passes) > 1 else text


def _failure(error: BaseException) -> Failure:
    return error.failures[0] if isinstance(error, TaskFailed) else failure_of(error)
