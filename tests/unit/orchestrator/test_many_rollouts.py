"""Tens of thousands of rollouts at once, on busy cores: scoring them all takes far longer than one score may."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.data.tokenizer import Tokenizer
from tandem.envs.config import EnvConfig
from tandem.envs.process import open_environment
from tandem.orchestrator import event_loop
from tandem.orchestrator.failures import Attempt
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.types.rollout import Completion, Group, SamplingRequest

GROUP_SIZE = 50
LIMIT_S = 0.5


@pytest.fixture
def busy_cores() -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in burning:
        process.kill()
        process.wait()


class Scripted:
    """A server that answers at once."""

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        return [Completion([5, 6], [-0.1, -0.1], [0, 0], "stop")] * sampling.n


@pytest.mark.usefixtures("busy_cores")
@pytest.mark.parametrize("num_rollouts", [10_000, 50_000])
def test_no_score_is_blamed_for_the_backlog(tiny_model: Path, num_rollouts: int) -> None:
    attempts: list[Attempt] = []

    async def run() -> list[Group]:
        env = EnvConfig(id="reverse-text", args={"num_train": 8, "num_eval": 1}, score_timeout_s=LIMIT_S)
        async with open_environment(env) as environment:
            maker = RolloutMaker(Scripted(), environment, Tokenizer(tiny_model), tries=1, record=attempts.append)
            tasks, worker = environment.train_tasks, environment._process.worker
            sampling = SamplingRequest(GROUP_SIZE, 2, temperature=1.0, seed=0)
            groups = await asyncio.gather(
                *(
                    maker.make_group(tasks[group_id % len(tasks)], [1, 2], group_id, sampling)
                    for group_id in range(num_rollouts // GROUP_SIZE)
                )
            )
            assert environment._process.worker is worker, "it was killed"
            return groups

    groups = event_loop.run(run())
    assert sum(len(group.rollouts) for group in groups) == num_rollouts
    assert not any(attempt.failed for attempt in attempts)
