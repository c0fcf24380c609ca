"""Whom the orchestrator waits for: evaluations take their own time."""

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import FakeEnvironment, FakePolicy

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.batch_files import RolloutWriter
from tandem.orchestrator import loop
from tandem.orchestrator.file_trainer import FileTrainer
from tandem.orchestrator.loop import Orchestrator
from tandem.orchestrator.server_policy import ServerPolicy
from tandem.orchestrator.servers import ServerList
from tandem.orchestrator.tasks import Prompts
from tandem.utils.run_dir import RunDir


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.02)


def make_orchestrator(root: Path, timeout_s: float) -> Orchestrator:
    tree = {"model": {"name": "m"}, "output_dir": root, "max_steps": 5, "weights_timeout_s": timeout_s}
    config = OrchestratorConfig.model_validate(tree)
    unused: Any = None
    environment = FakeEnvironment(rewards=[])
    prompts = Prompts([array("I")] * len(environment.train_tasks), [array("I")] * len(environment.eval_tasks))
    policy = ServerPolicy(config, ServerList([], unused), 0)
    run_dir = RunDir(root)
    trainer = FileTrainer(config.model.name, run_dir.weights, RolloutWriter(run_dir.rollouts, config.keep_rollouts))
    return Orchestrator(config, environment, prompts, unused, policy, trainer, "run-1", unused, None)


def wait(root: Path, version: int, evaluating: bool) -> None:
    """The last version is followed for three times as long as weights may take."""

    async def run() -> None:
        orchestrator = make_orchestrator(root, 0.1)
        orchestrator._evaluating = evaluating
        following = asyncio.ensure_future(asyncio.sleep(3 * orchestrator.config.weights_timeout_s))
        await orchestrator._wait_for_last_version(FakePolicy(version), following)
        assert following.done()

    asyncio.run(run())


def test_an_evaluation_does_not_count_against_the_trainer(tmp_path: Path) -> None:
    wait(tmp_path, version=5, evaluating=True)
    wait(tmp_path, version=4, evaluating=True)


def test_waiting_for_the_trainer_does(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the trainer's weights .*step_000005"):
        wait(tmp_path, version=4, evaluating=False)
