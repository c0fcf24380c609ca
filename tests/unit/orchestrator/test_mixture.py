"""Several environments in one run: mixed by weight, each with its own options, told apart in metrics and files."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import TASKS, FakeServer

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.batch_files import MARKER, RolloutWriter
from tandem.data.tokenizer import Tokenizer
from tandem.envs.config import EnvConfig
from tandem.envs.mixture import Mixture
from tandem.orchestrator.file_trainer import FileTrainer
from tandem.orchestrator.loop import Orchestrator
from tandem.orchestrator.rehearsal import open_tried
from tandem.orchestrator.server_policy import ServerPolicy
from tandem.orchestrator.servers import ServerList
from tandem.orchestrator.tasks import TaskOrder, encode_prompts
from tandem.types.rollout import Completion, SamplingRequest, Task
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import write_manifest
from tandem.utils.metrics import MetricsForwarder
from tandem.utils.run_dir import RunDir, step_name

ENVS = [
    {"name": "long", "id": "reverse-text", "weight": 3, "sampling": {"max_tokens": 20}},
    {
        "name": "short",
        "id": "reverse-text",
        "group_size": 2,
        "sampling": {"stop": ["x"]},
        "num_eval_prompts": 1,
        "filters": {"min_tokens": 2},
    },
]


def config(root: Path, **options: Any) -> OrchestratorConfig:
    defaults = {
        "model": {"name": "models/base"},
        "output_dir": root,
        "seq_len": 64,
        "max_steps": 2,
        "prompts_per_step": 4,
        "group_size": 3,
        "max_staleness": 0,
        "sampling": {"max_tokens": 10},
        "envs": ENVS,
    }
    return OrchestratorConfig.model_validate(defaults | options)


class TwoEnvironments:
    train_tasks = [replace(task, environment=name) for name in ("long", "short") for task in TASKS[:4]]
    eval_tasks = [replace(task, environment=name) for name in ("long", "short") for task in TASKS[4:]]

    async def score(self, task: Task, completion: str) -> float:
        return len(completion) if task.environment == "long" else -len(completion)


def test_tasks_come_by_weight_and_each_as_often_as_the_others_of_its_environment() -> None:
    group_id = TaskOrder(TwoEnvironments.train_tasks, seed=0, weights={"long": 3.0, "short": 1.0})
    drawn = [group_id[number] for number in range(64)]
    for first in range(0, 64, 8):
        assert Counter(task.environment for task in drawn[first : first + 8]) == {"long": 6, "short": 2}
    assert set(Counter((task.environment, task.index) for task in drawn if task.environment == "long").values()) == {12}
    assert [group_id[number] for number in reversed(range(64))] == drawn[::-1], "whatever was asked for before"
    later = TaskOrder(TwoEnvironments.train_tasks, seed=0, weights={"long": 3.0, "short": 1.0})
    assert later[130] == group_id[130] and [later[number] for number in range(64)] == drawn
    epochs = [[task.index for task in drawn if task.environment == "long"][4 * n : 4 * n + 4] for n in range(12)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs) and len(set(map(tuple, epochs))) > 1


def run_on_two_environments(options: OrchestratorConfig, server: FakeServer) -> RunDir:
    tokenizer, run_dir, environment = server.tokenizer, RunDir(options.output_dir), TwoEnvironments()

    async def train() -> None:
        for step in range(1, options.max_steps + 1):
            while not (run_dir.rollouts / step_name(step) / MARKER).exists():
                await asyncio.sleep(0.001)
            folder = run_dir.weights / step_name(step)
            folder.mkdir(parents=True)
            write_manifest(folder, step)

    async def run() -> None:
        prompts = encode_prompts(environment, tokenizer, options)
        forwarder = MetricsForwarder(run_dir)
        servers = ServerList([server.base_url], lambda url: server)
        policy = ServerPolicy(options, servers, 0)
        publisher = FileTrainer(
            options.model.name, run_dir.weights, RolloutWriter(run_dir.rollouts, options.keep_rollouts)
        )
        loop = Orchestrator(options, environment, prompts, tokenizer, policy, publisher, "mixed-1", forwarder, None)
        trainer = asyncio.ensure_future(train())
        await asyncio.wait_for(loop.run(), 30)
        await trainer

    asyncio.run(run())
    return run_dir


def test_a_run_on_two_environments(tmp_path: Path, tiny_model: Path) -> None:
    server = FakeServer(Tokenizer(tiny_model))
    run_dir = run_on_two_environments(config(tmp_path), server)
    lines = read_json_lines(run_dir.metrics)
    step = next(line for line in lines if line["step"] == 1 and "reward/mean" in line)
    # Completions of 1, 2 and 3 tokens for three groups, of 1 and 2 for the fourth.
    assert (step["long/groups"], step["short/groups"]) == (3, 1)
    assert (step["long/reward/mean"], step["short/reward/mean"]) == (2.0, -1.5)
    assert step["filters/rollouts/min_tokens"] == 1, "of the other environment, none is filtered"
    assert step["reward/mean"] == pytest.approx((3 * 6 - 3) / 11)
    evaluated = {key: value for line in lines for key, value in line.items() if key.startswith("eval/")}
    assert (evaluated["eval/long/reward"], evaluated["eval/short/reward"], evaluated["eval/reward"]) == (1.0, -1.0, 0.0)
    assert (evaluated["eval/long/num_prompts"], evaluated["eval/short/num_prompts"]) == (2, 1)
    assert len(read_json_lines(run_dir.eval_samples(2, "long"))) == 2
    trained = [request for request in server.requests if request["n"] > 1]
    assert {(request["n"], request["max_tokens"], request["options"].stop) for request in trained} == {
        (3, 20, ()),
        (2, 10, ("x",)),
    }


def test_a_server_may_fail_as_often_as_the_environment_with_most_tries_allows(tmp_path: Path, tiny_model: Path) -> None:
    class ShakyServer(FakeServer):
        num_failures = 2

        async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
            if sampling.is_trained_on and self.num_failures:
                self.num_failures -= 1
                raise RuntimeError("no answer")
            return await super().generate(prompt_ids, sampling)

    envs = [ENVS[0] | {"tries": 1}, ENVS[1] | {"tries": 3}]
    options = config(tmp_path, envs=envs, max_steps=1, prompts_per_step=1)
    run_dir = run_on_two_environments(options, ShakyServer(Tokenizer(tiny_model)))
    failed = [event["order"] for event in read_json_lines(run_dir.events) if event["event"] == "group_failed"]
    assert failed == [0, 0]
    assert [line["task"] for line in read_json_lines(run_dir.samples(1))] == [
        TaskOrder(TwoEnvironments.train_tasks, options.seed, (), {"long": 3.0, "short": 1.0})[0].index
    ] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": EnvConfig(id="arithmetic")}, r"env\.id = 'arithmetic' and envs are both given; add it to envs"),
        ({"env": {"id": "reverse-text"}}, r"env\.id = 'reverse-text' and envs are both given"),  # the default
        ({"env": {"id": "x", "api_key": "k"}}, r"env\.id = 'x', env\.api_key = '\*\*\*' and envs are both given"),
        ({"env": {"reward": "math"}}, r"env\.reward = 'math' and envs are both given"),
        ({"env": {"args": {"path": "x", "api_key": "k"}}}, r"env\.args = {'path': 'x', 'api_key': '\*\*\*'} and envs"),
        ({"env": EnvConfig(tries=9).model_dump() | {"reward": "lcs"}}, r"env\.reward = 'lcs', env\.tries = 9 and envs"),
        ({"env": "arithmetic"}, "dictionary or instance of EnvConfig"),
        ({"envs": [{}, {}]}, "two of them are called 'reverse-text'; give each a name"),
        ({"envs": [{"group_size": 1}]}, r"envs\.0\.group_size = 1 leaves nothing to compare"),
        ({"envs": [{"sampling": {"max_tokens": 64}}]}, r"envs\.0\.sampling\.max_tokens = 64 leaves no room"),
        ({"overlong": {"buffer_tokens": 4}}, r"envs\.0\.sampling\.max_tokens = 20 with overlong"),
        ({"envs": [{"sampling": {"temperature": 0.5}}]}, "temperature"),
    ],
)
def test_mixtures_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_names_come_from_ids() -> None:
    envs = [{"id": "./my/env.py:Mine"}, {"id": "owner/words"}]
    assert list(config(Path("x"), envs=envs).plans) == ["Mine", "owner-words"]


def test_each_environment_has_a_process_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    small = {"num_train": 4, "num_eval": 2}
    envs = [
        {"name": "text", "id": "reverse-text", "args": small},
        {"name": "game", "id": "guessing-game", "args": small},
    ]
    options = config(tmp_path, envs=envs, seq_len=256)

    async def run() -> None:
        async with open_tried(options, Tokenizer(tiny_model)) as (environment, prompts):
            assert isinstance(environment, Mixture)
            assert len(prompts.train) == 8 and [task.environment for task in environment.eval_tasks[::2]] == [
                "text",
                "game",
            ]
            text, game = environment.train_tasks[0], environment.train_tasks[4]
            assert await environment.score(text, text.answer) == 1.0
            assert not text.is_interactive and game.is_interactive

    asyncio.run(run())
