"""One group: a task's prompt to the server, its completions to the reward function; or as many episodes of the task.

If the reward function fails on a completion, or an episode fails, another one is sampled in its place. After `tries`
attempts the task has failed.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.data.tokenizer import Tokenizer
from tandem.envs.protocol import Environment
from tandem.envs.results import checked_score, total
from tandem.isolation.failures import failure_of
from tandem.orchestrator.conversations import Episodes
from tandem.orchestrator.failures import Attempt, RolloutFailure, TaskFailed
from tandem.orchestrator.protocols import Generator
from tandem.orchestrator.tasks import request_seed
from tandem.types.rollout import Completion, Group, Rollout, SamplingRequest, Task

# Before the second attempt, before the third …: what failed may be a service that needs a moment.
RETRY_DELAYS_S = (1.0, 4.0, 15.0)


@dataclass
class Times:
    """What a group has taken so far, over all attempts."""

    generate_s: float = 0.0  # of conversations, their tools and rewards too
    score_s: float = 0.0


class RolloutMaker:
    """`record` is told of every attempt at a group."""

    def __init__(
        self,
        policy: Generator,
        environment: Environment,
        tokenizer: Tokenizer,
        *,
        tries: int,
        record: Callable[[Attempt], None],
        delays_s: Sequence[float] = RETRY_DELAYS_S,
        episodes: Episodes | None = None,
    ) -> None:
        self.policy = policy
        self.environment = environment
        self.tokenizer = tokenizer
        self.tries = tries
        self.record = record
        self.delays_s = delays_s
        self.episodes = episodes  # of environments that have conversations
        self._starting = asyncio.Lock()
        self._spent: dict[int, int] = {}  # attempts that failed, by the seed of a group that is not made yet

    async def make_group(self, task: Task, prompt: Sequence[int], group_id: int, sampling: SamplingRequest) -> Group:
        """`sampling.n` rollouts with rewards; TaskFailed where they do not come together.

        A group that is called off, as too stale, and made anew goes on with the attempts that it has left."""
        prompt_ids = list(prompt)
        rollouts: list[Rollout] = []
        failed: list[RolloutFailure] = []
        times = Times()
        first = self._spent.get(sampling.seed, 0)
        for attempt in range(first, self.tries):
            if attempt > first:
                await asyncio.sleep(self.delays_s[min(attempt, len(self.delays_s)) - 1])
            seed = request_seed(sampling.seed, "attempt", attempt) if attempt else sampling.seed
            missing = replace(sampling, n=sampling.n - len(rollouts), seed=seed)
            outcomes = await self._attempt(task, prompt_ids, missing, times)
            rollouts += [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
            failed = [outcome for outcome in outcomes if isinstance(outcome, RolloutFailure)]
            self.record(Attempt(task, group_id, attempt, sampling.n, failed))
            if not failed:
                self._spent.pop(sampling.seed, None)
                return Group(task, group_id, rollouts, times.generate_s, times.score_s)
            self._spent[sampling.seed] = attempt + 1
        del self._spent[sampling.seed]
        raise TaskFailed([one.failure for one in failed])

    async def _attempt(
        self, task: Task, prompt_ids: list[int], sampling: SamplingRequest, times: Times
    ) -> list[Rollout | RolloutFailure]:
        async with self._starting:  # one group at each pass of the event loop: a step may start a thousand
            await asyncio.sleep(0)
        started = time.monotonic()
        if self.episodes is not None and self.episodes.plays(task):
            seeds = [request_seed(sampling.seed, "rollout", number) for number in range(sampling.n)]
            requests = [replace(sampling, seed=seed, session=sampling.seed) for seed in seeds]
            played = await asyncio.gather(*(self.episodes.play(task, self.policy, request) for request in requests))
            times.generate_s += time.monotonic() - started
            return played
        completions = await self.policy.generate(prompt_ids, sampling)
        generated = time.monotonic()
        outcomes = await self._score_all(task, prompt_ids, completions)
        times.generate_s += generated - started
        times.score_s += time.monotonic() - generated
        return outcomes

    async def _score_all(
        self, task: Task, prompt_ids: list[int], completions: list[Completion]
    ) -> list[Rollout | RolloutFailure]:
        """What each completion is worth. One that hangs takes along those that are not scored by then: they may have to
        wait behind it, only to hang as well."""
        scoring = [asyncio.ensure_future(self._score(task, prompt_ids, completion)) for completion in completions]
        try:
            for ended in asyncio.as_completed(scoring):
                outcome = await ended
                if isinstance(outcome, RolloutFailure) and outcome.failure.fault == "time":
                    return [one.result() if one.done() else outcome for one in scoring]
            return [one.result() for one in scoring]
        finally:
            for one in scoring:
                one.cancel()

    async def _score(self, task: Task, prompt_ids: list[int], completion: Completion) -> Rollout | RolloutFailure:
        text = self.tokenizer.decode(completion.token_ids)
        if completion.stop is not None:
            text = text.partition(completion.stop)[0]
        try:
            rewards = checked_score(await self.environment.score(task, text))
        except Exception as error:  # whatever users' code raises, it costs this rollout and nothing else
            return RolloutFailure(text, failure_of(error))
        named = rewards if isinstance(rewards, dict) else {}
        return Rollout(prompt_ids, completion, text, total(rewards), rewards=named)
