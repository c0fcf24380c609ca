"""Evaluation on held-out tasks."""

import asyncio
import logging
import statistics
import time
from collections.abc import Sequence

from tandem.config.orchestrator import EvalConfig
from tandem.envs.failures import Failure, failure_of, top_reasons
from tandem.orchestrator.failures import TaskFailed, TooManyFailures
from tandem.orchestrator.protocols import GroupMaker
from tandem.orchestrator.samples import write_samples
from tandem.orchestrator.tasks import request_seed
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
    ) -> None:
        self.maker = maker
        self.config = config
        self.tasks = list(zip(tasks, prompts, strict=True))[: config.num_prompts]
        self.max_tokens = max_tokens
        self.seed = seed
        self.run_log = run_log
        self.options = options
        self.name = name  # of the environment, where there are several

    def is_due(self, previous: int, version: int, last_version: int) -> bool:
        """Whether going from version `previous` to `version` passes an evaluation; the last one always is."""
        every = self.config.every
        return version == last_version or (every is not None and version // every > previous // every)

    async def run(self, version: int, run_dir: RunDir) -> float:
        """Mean reward over the held-out tasks, one completion each; tasks that fail are counted, not averaged."""
        started = time.monotonic()
        outcomes = await asyncio.gather(
            *(self._group(order, task, prompt) for order, (task, prompt) in enumerate(self.tasks)),
            return_exceptions=True,
        )
        groups = [outcome for outcome in outcomes if isinstance(outcome, Group)]
        failures = [_failure(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        if not groups:
            raise TooManyFailures(f"all {len(failures)} held-out tasks failed: {top_reasons(failures)}")
        if failures:
            reasons = top_reasons(failures)
            logger.warning("%d held-out tasks failed: %s", len(failures), reasons)
            self.run_log.event("eval_failures", version=version, count=len(failures), reasons=reasons)
        reward = statistics.fmean(reward for group in groups for reward in group.rewards)
        write_samples(run_dir.eval_samples(version, self.name), groups, advantages=None)
        metrics = {
            "reward": reward,
            "num_prompts": len(groups),
            "num_failed": len(failures),
            "seconds": time.monotonic() - started,
        }
        prefix = f"eval/{self.name}/" if self.name else "eval/"
        self.run_log.metrics(version, {prefix + key: value for key, value in metrics.items()})
        whose = f" on {self.name}" if self.name else ""
        logger.info("held-out reward of version %d%s: %.3f over %d prompts", version, whose, reward, len(groups))
        return reward

    async def _group(self, order: int, task: Task, prompt: Sequence[int]) -> Group:
        seed = request_seed(self.seed, "eval", order)
        sampling = SamplingRequest(1, self.max_tokens, self.config.temperature, seed, self.options)
        return await self.maker.make_group(task, prompt, order, sampling)


class MixedEvaluator:
    """Evaluates several environments. The reward of all is the mean of theirs, whatever their number of prompts."""

    def __init__(self, evaluators: Sequence[Evaluator], run_log: RunLog) -> None:
        self.evaluators = evaluators
        self.run_log = run_log

    def is_due(self, previous: int, version: int, last_version: int) -> bool:
        return self.evaluators[0].is_due(previous, version, last_version)

    async def run(self, version: int, run_dir: RunDir) -> float:
        rewards = await asyncio.gather(*(evaluator.run(version, run_dir) for evaluator in self.evaluators))
        reward = statistics.fmean(rewards)
        self.run_log.metrics(version, {"eval/reward": reward})
        return reward


def _failure(error: BaseException) -> Failure:
    return error.failures[0] if isinstance(error, TaskFailed) else failure_of(error)
