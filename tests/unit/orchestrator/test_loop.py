"""The wiring of the run: what is configured reaches the server, the batch and the files. Server, trainer and
environment are fakes; everything between them is real."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import TASKS, FakeEnvironment, FakeServer
from tests.unit.tasks import until_alone

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.batch_files import MARKER, RolloutReader, RolloutWriter
from tandem.data.tokenizer import Tokenizer
from tandem.orchestrator.client import ServerLost
from tandem.orchestrator.failures import TooManyFailures
from tandem.orchestrator.file_trainer import FileTrainer
from tandem.orchestrator.loop import Orchestrator
from tandem.orchestrator.server_policy import ServerPolicy
from tandem.orchestrator.servers import ServerList
from tandem.orchestrator.state import OrchestratorState
from tandem.orchestrator.tasks import TaskOrder, encode_prompts, request_seed
from tandem.types.rollout import Completion, Group, SamplingOptions, SamplingRequest, Task, TrainBatch
from tandem.utils.errors import UserError
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import write_manifest
from tandem.utils.metrics import MetricsForwarder, RunLog
from tandem.utils.run_dir import RunDir, step_name
from tandem.utils.waiting import Deadline, wait_for

RUN = "wired-1"


class Run:
    """One run with a trainer that publishes version n as soon as it has batch n."""

    def __init__(self, root: Path, tokenizer: Tokenizer, rewards: Sequence[Any], options: dict[str, Any]) -> None:
        defaults = {
            "model": {"name": "models/base"},
            "output_dir": root,
            "max_steps": 4,
            "prompts_per_step": 2,
            "group_size": 3,
            "max_staleness": 0,
            "seed": 7,
            "advantage": {"type": "dr_grpo"},
            "env": {"tries": 1},
            "keep_rollouts": 9,
        }
        self.config = OrchestratorConfig.model_validate(defaults | options)
        self.dir = RunDir(root)
        self.server = FakeServer(tokenizer)
        self.servers = {self.server.base_url: self.server}  # that can be found
        self.urls = [self.server.base_url]  # of those that are there from the start
        self.environment = FakeEnvironment(rewards)
        self.tasks = TaskOrder(self.environment.train_tasks, self.config.seed)
        self.tokenizer = tokenizer

    def start(self, resumed_from: OrchestratorState | None = None) -> "Run":
        async def run() -> None:
            first = resumed_from.step if resumed_from else 0
            trainer = asyncio.ensure_future(self._train(first))
            forwarder = MetricsForwarder(self.dir)
            prompts = encode_prompts(self.environment, self.tokenizer, self.config)
            servers = ServerList(self.urls, self.servers.__getitem__)
            policy = ServerPolicy(self.config, servers, first)
            publisher = FileTrainer(
                self.config.model.name, self.dir.weights, RolloutWriter(self.dir.rollouts, self.config.keep_rollouts)
            )
            loop = Orchestrator(
                self.config, self.environment, prompts, self.tokenizer, policy, publisher, RUN, forwarder, resumed_from
            )
            try:
                await asyncio.wait_for(loop.run(), 30)
                await until_alone(trainer)  # nothing goes on after the run
            finally:
                trainer.cancel()

        asyncio.run(run())
        return self

    async def _train(self, first: int) -> None:
        for step in range(first + 1, self.config.max_steps + 1):
            while not (self.dir.rollouts / step_name(step) / MARKER).exists():
                await asyncio.sleep(0.001)
            if step % self.config.sync_every == 0 and not (self.dir.weights / step_name(step)).exists():
                publish(self.dir, step)

    def batch(self, step: int) -> TrainBatch:
        return RolloutReader(self.dir.rollouts, timeout_s=1).read(step)

    def advantages(self, step: int) -> list[list[float]]:
        """The advantages of each sequence of a batch."""
        packed = self.batch(step).packed
        stream = packed.streams["advantages"]
        return [stream[packed.sequences == number].tolist() for number in range(packed.num_sequences)]

    def state(self, step: int) -> OrchestratorState:
        return OrchestratorState(**json.loads(self.batch(step).orchestrator_state))

    @property
    def training_requests(self) -> list[dict[str, Any]]:
        return [request for request in self.server.requests if request["n"] == self.config.group_size]

    @property
    def eval_requests(self) -> list[dict[str, Any]]:
        return [request for request in self.server.requests if request["n"] == 1]

    def metrics(self, key: str) -> list[dict[str, Any]]:
        return [line for line in read_json_lines(self.dir.metrics) if key in line]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_json_lines(self.dir.events) if event["event"] == name]


def publish(run_dir: RunDir, version: int) -> None:
    path = run_dir.weights / f".{step_name(version)}.tmp"
    path.mkdir(parents=True)
    write_manifest(path, version)
    path.rename(run_dir.weights / step_name(version))


@pytest.fixture
def make_run(tmp_path: Path, tiny_model: Path):
    tokenizer = Tokenizer(tiny_model)

    def make(*rewards: Any, **options: Any) -> Run:
        return Run(tmp_path, tokenizer, rewards or (1.0, 0.0, 0.5), options)

    return make


def test_rewards_become_advantages_of_the_sampled_tokens(make_run) -> None:
    """Rewards 1, 0, 0.5 for one, two and three tokens: mean 0.5, in both groups of a batch."""
    run = make_run(max_steps=1).start()
    assert run.advantages(1) == [[0.5], [-0.5] * 2, [0.0] * 3] * 2
    samples = read_json_lines(run.dir.samples(1))
    assert [line["advantage"] for line in samples] == [0.5, -0.5, 0.0] * 2
    assert [line["reward"] for line in samples] == [1.0, 0.0, 0.5] * 2


def test_the_kind_of_advantage_is_the_configured_one(make_run) -> None:
    """Leave-one-out: 1 − 0.25, 0 − 0.75, 0.5 − 0.5."""
    run = make_run(max_steps=1, advantage={"type": "rloo"}).start()
    assert run.advantages(1) == [[0.75], [-0.75] * 2, [0.0] * 3] * 2


def test_the_penalty_on_long_completions_reaches_the_batch(make_run) -> None:
    """Of at most 3 tokens the last 2 cost up to 1: rewards 0, -0.5, -1 once shaped, with mean -0.5."""
    overlong = {"buffer_tokens": 2, "penalty": 1.0}
    run = make_run(0.0, 0.0, 0.0, max_steps=1, overlong=overlong, sampling={"max_tokens": 3}).start()
    assert run.advantages(1) == [[0.5], [0.0] * 2, [-0.5] * 3] * 2
    (line,) = run.metrics("reward/mean")
    assert (line["reward/mean"], line["reward/shaped_mean"]) == (0.0, -0.5)
    assert line["completions/overlong"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("type", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_equal_rewards_whose_sum_is_inexact_teach_nothing(make_run, type: str) -> None:
    """Three times 0.1 is 0.30000000000000004."""
    run = make_run(0.1, 0.1, 0.1, max_steps=1, advantage={"type": type}).start()
    assert run.advantages(1) == [[0.0], [0.0] * 2, [0.0] * 3] * 2
    assert run.metrics("reward/mean")[0]["groups/without_signal"] == 1.0


def test_sampling_options_reach_the_server_and_the_batch(make_run) -> None:
    sampling = {"temperature": 0.75, "max_tokens": 12, "top_p": 0.5, "stop": ["z"]}
    run = make_run(max_steps=2, sampling=sampling, eval={"temperature": 0.25, "top_k": 3}).start()
    assert {request["options"] for request in run.training_requests} == {SamplingOptions(top_p=0.5, stop=("z",))}
    assert {request["options"] for request in run.eval_requests} == {SamplingOptions(top_k=3, stop=("z",))}
    assert {request["temperature"] for request in run.training_requests} == {0.75}
    assert {request["temperature"] for request in run.eval_requests} == {0.25}
    assert {request["max_tokens"] for request in run.server.requests} == {12}
    assert {request["is_trained_on"] for request in run.training_requests} == {True}
    assert {request["is_trained_on"] for request in run.eval_requests} == {False}
    assert [run.batch(step).temperature for step in (1, 2)] == [0.75, 0.75]
    assert [run.batch(step).step for step in (1, 2)] == [1, 2]


def test_every_group_has_its_task_and_seed_by_its_order(make_run) -> None:
    run = make_run().start()
    requests = run.training_requests
    assert [request["seed"] for request in requests] == [request_seed(7, "train", number) for number in range(8)]
    for number, request in enumerate(requests):
        assert run.tasks[number].messages[0]["content"] in request["prompt"]
    trained = [line["task"] for step in range(1, 5) for line in read_json_lines(run.dir.samples(step))[::3]]
    assert trained == [run.tasks[number].index for number in range(8)]
    assert [request["seed"] for request in run.eval_requests[:2]] == [request_seed(7, "eval", n) for n in (0, 1)]


@pytest.mark.parametrize(("every", "evaluated"), [(None, [0, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])])
def test_evaluations_are_made_when_due(make_run, every: int | None, evaluated: list[int]) -> None:
    run = make_run(eval={"every": every, "num_prompts": 2}).start()
    lines = run.metrics("eval/reward")
    assert [line["step"] for line in lines] == evaluated
    assert [line["eval/num_prompts"] for line in lines] == [2] * len(evaluated)
    assert all(run.dir.eval_samples(version).exists() for version in evaluated)


def test_each_version_is_loaded_once(make_run) -> None:
    run = make_run().start()
    assert run.server.loaded == [("base", 0), *((step_name(version), version) for version in range(1, 5))]
    assert [event["version"] for event in run.events("version_served")] == [1, 2, 3, 4]
    assert [line["version"] for line in run.metrics("version")] == [0, 1, 2, 3]
    assert (run.events("started")[0]["version"], run.events("finished")[0]["step"]) == (0, 4)
    assert run.events("started")[0]["run"] == "wired-1"


def test_the_version_of_a_step_is_the_one_served_when_its_batch_was_complete(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the trainer publishes version 1 while the batch of step 2 is written."""
    run, stage = make_run(max_steps=2, max_staleness=1), Orchestrator._stage_batch

    def stage_until_served(loop: Orchestrator, groups: list[Group], step: int, state: OrchestratorState) -> None:
        if step == 2:
            publish(run.dir, 1)
            wait_for(lambda: loop.policy.version or None, Deadline("version 1 to be served", timeout_s=30, hint=""))
        stage(loop, groups, step, state)

    async def train(first: int) -> None:
        while not (run.dir.rollouts / step_name(2) / MARKER).exists():
            await asyncio.sleep(0.001)
        publish(run.dir, 2)

    run._train = train
    monkeypatch.setattr(Orchestrator, "_stage_batch", stage_until_served)
    run.start()
    assert [event["version"] for event in run.events("version_served")] == [1, 2]
    assert [line["version"] for line in run.metrics("version")] == [0, 0]


def test_every_batch_carries_the_state_after_it(make_run) -> None:
    run = make_run().start()
    assert run.state(2) == OrchestratorState(2, next_order=4, unfinished=[], set_aside=[])
    assert [run.state(step).next_order for step in range(1, 5)] == [2, 4, 6, 8]


def test_the_state_names_what_is_under_way(make_run) -> None:
    """Overlapped, the groups of two steps are started together; those that step 1 leaves are to be made again."""
    run = make_run(max_staleness=1).start()
    state = run.state(1)
    trained = [line["task"] for line in read_json_lines(run.dir.samples(1))[::3]]
    assert state.next_order == 4
    assert sorted([run.tasks[group_id].index for group_id in state.unfinished] + trained) == [0, 1, 2, 3]
    assert run.state(4).unfinished == []


def test_a_resumed_run_goes_on_where_the_state_says(make_run) -> None:
    """Weights of step 2, not evaluated again; order 3, which was unfinished, and 6, as the task of 5 is set aside."""
    run = make_run(max_steps=3)
    publish(run.dir, 2)
    run.start(OrchestratorState(2, next_order=5, unfinished=[3], set_aside=[run.tasks.place(5)]))
    assert run.server.loaded == [("step_000002", 2), ("step_000003", 3)]
    seeds = [request["seed"] for request in run.training_requests]
    assert seeds == [request_seed(7, "train", number) for number in (3, 6)]
    assert [line["step"] for line in run.metrics("eval/reward")] == [3]
    assert [line["step"] for line in run.metrics("reward/mean")] == [3]


@pytest.mark.parametrize(
    ("step", "lines", "evaluated"),
    [
        (2, [], [2, 4]),
        (2, [(0, "eval/reward"), (2, "reward/mean")], [2, 4]),
        (2, [(0, "eval/reward"), (2, "eval/reward")], [4]),
        (3, [(0, "eval/reward")], [4]),
    ],
)
def test_a_resumed_run_makes_the_evaluation_that_it_was_ended_before(
    make_run, step: int, lines: list[tuple[int, str]], evaluated: list[int]
) -> None:
    run = make_run(eval={"every": 2})
    publish(run.dir, step)
    for logged, name in lines:
        RunLog(run.dir, "orchestrator").metrics(logged, {name: 1.0})
    run.start(OrchestratorState(step, next_order=2 * step, unfinished=[]))
    assert [line["step"] for line in run.metrics("eval/num_prompts")] == evaluated


def test_a_resumed_run_waits_for_the_weights_it_starts_from(make_run) -> None:
    run = make_run(weights_timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the trainer's weights .*step_000001; is the trainer"):
        run.start(OrchestratorState(1, next_order=2, unfinished=[]))
    assert run.server.loaded == []


@pytest.mark.parametrize("num_published", [0, 1])
def test_a_trainer_that_publishes_no_last_version_ends_the_run(
    make_run, monkeypatch: pytest.MonkeyPatch, num_published: int
) -> None:
    """Also where the version before was evaluated meanwhile."""
    run, deadline = make_run(max_steps=num_published + 1, eval={"every": 1}), Orchestrator._weights_deadline
    monkeypatch.setattr("tandem.orchestrator.loop.LOOK_S", 0.02)
    monkeypatch.setattr(Orchestrator, "_weights_deadline", lambda *args: replace(deadline(*args), timeout_s=0.05))

    async def train(first: int) -> None:
        for version in range(1, num_published + 1):
            publish(run.dir, version)

    run._train = train
    with pytest.raises(TimeoutError, match=rf"s for the trainer's weights .*step_00000{num_published + 1}; is the"):
        run.start()


def test_the_trainer_is_not_blamed_for_an_evaluation_that_takes_long(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of version 1 goes on until the deadline for version 2 was put off twice."""
    run, deadline = make_run(max_steps=2, eval={"every": 1}, weights_timeout_s=5), Orchestrator._weights_deadline
    score, given = run.environment.score, []

    def deadline_counted(loop: Orchestrator, version: int) -> Deadline:
        given.append(version)
        return deadline(loop, version)

    async def slow(task: Task, completion: str) -> float:
        while task.index == 4 and ("step_000001", 1) in run.server.loaded and len(given) < 3:
            await asyncio.sleep(0.001)
        return await score(task, completion)

    monkeypatch.setattr("tandem.orchestrator.loop.LOOK_S", 0.02)
    monkeypatch.setattr(Orchestrator, "_weights_deadline", deadline_counted)
    run.environment.score = slow
    run.start()
    assert [line["step"] for line in run.metrics("eval/reward")] == [0, 1, 2]


def test_groups_that_do_not_come_end_the_run_with_those_who_are_waited_for(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(weights_timeout_s=0.1)

    async def hangs(task: Task, completion: str) -> float:
        if task.index < 4:
            await asyncio.Event().wait()
        return 1.0

    run.environment.score = hangs
    monkeypatch.setattr("tandem.orchestrator.dispatcher.LOOK_S", 0.02)
    waited = r"groups of step 1: rollouts from http://127\.0\.0\.1:1, .* weights after version 0 from the trainer; see"
    with pytest.raises(TimeoutError, match=waited):
        run.start()


def test_groups_to_spare_are_as_many_as_configured_and_end_with_the_run(make_run) -> None:
    """Of two groups, 1.6 times as many are three; the last one never comes."""
    run = make_run(max_steps=1, oversampling=1.6)
    generate = run.server.generate

    async def hangs(prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        completions = await generate(prompt_ids, sampling)
        if sampling.seed == request_seed(7, "train", 2):
            await asyncio.Event().wait()
        return completions

    run.server.generate = hangs
    run.start()
    assert len(run.training_requests) == 3
    assert run.state(1).unfinished == [2]


@pytest.mark.parametrize(("deterministic", "limits"), [(False, [32]), (True, [])])
def test_completions_under_way_are_limited_unless_a_run_is_to_be_repeated(
    make_run, deterministic: bool, limits: list[int]
) -> None:
    run = make_run(max_steps=1, deterministic=deterministic, client={"concurrency": 32}).start()
    assert [line["servers/concurrency"] for line in run.metrics("servers/concurrency")] == limits


class AwayServer(FakeServer):
    base_url = "http://127.0.0.1:2"

    async def wait_until_ready(self) -> None:
        await asyncio.Event().wait()

    async def is_well(self) -> bool:
        return False


def test_a_server_that_is_late_is_not_waited_for(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.orchestrator.servers.GRACE_S", 0.0)
    run = make_run(max_steps=1)
    run.servers[AwayServer.base_url] = away = AwayServer(run.tokenizer)
    run.urls.append(away.base_url)
    run.start()
    assert away.loaded == [] and away.requests == []
    assert [line["servers/present"] for line in run.metrics("servers/present")] == [1]


def test_servers_that_are_listed_in_a_file_are_added(make_run, tmp_path: Path) -> None:
    (tmp_path / "servers.txt").write_text("http://127.0.0.1:1\nhttp://127.0.0.1:2\n")
    run = make_run(max_steps=1, client={"servers_file": tmp_path / "servers.txt"})
    run.servers["http://127.0.0.1:2"] = FakeServer(run.tokenizer)
    run.start()
    assert [event["server"] for event in run.events("server_added")] == ["http://127.0.0.1:2"]


def test_batches_are_removed_once_they_were_trained_on(make_run) -> None:
    run = make_run(keep_rollouts=2).start()
    assert sorted(path.name for path in run.dir.rollouts.iterdir()) == ["step_000003", "step_000004"]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_staleness_is_as_configured(make_run, max_staleness: int) -> None:
    """On-policy, step n is trained on version n − 1. One step ahead, the groups of step 2 are started with those of
    step 1, under version 0."""
    run = make_run(max_staleness=max_staleness).start()
    ages = [line["staleness/max"] for line in run.metrics("staleness/max")]
    assert ages[1] == max_staleness and max(ages) == max_staleness


def test_nothing_is_made_that_no_step_will_train_on(make_run) -> None:
    """Staleness would allow twelve groups at once; four steps of two need eight."""
    assert len(make_run(max_staleness=5).start().training_requests) == 8


def test_steps_are_logged_with_what_they_were_made_of(make_run) -> None:
    run = make_run().start()
    lines = run.metrics("reward/mean")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert (line["reward/mean"], line["reward/min"], line["reward/max"]) == (0.5, 0.0, 1.0)
        assert line["completion_tokens/total"] == 12
        assert (line["groups/stale"], line["rollouts/failed"], line["tasks/set_aside"]) == (0, 0, 0)
        assert 0 < line["tokens_per_s"] <= 12 * line["step"] / sum(one["step_s"] for one in lines[: line["step"]])
        assert 0 < line["batch_s"] < line["step_s"] and line["generate_s"] >= 0 and line["score_s"] >= 0
        assert "reward/shaped_mean" not in line


def test_a_run_without_signal_is_told_in_its_lines_and_once_as_an_event(
    make_run, caplog: pytest.LogCaptureFixture
) -> None:
    """Four steps of two groups: with the fourth, there are enough of them."""
    with caplog.at_level("INFO"):
        run = make_run(0.0, 0.0, 0.0).start()
    (event,) = run.events("finding")
    assert (event["code"], event["severity"], event["step"]) == ("no_signal", "error", 4)
    told = "all groups have equal rewards, nothing is learned: every reward is 0"
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [line.split(":")[0] for line in lines if told in line] == ["step 4", "step 4"]
    assert lines[-1].endswith(f"tokens/s; {told}")
    assert "Read samples/" in lines[-2] and event["advice"].startswith("Read samples/")


def test_failures_are_counted_in_the_metrics_and_kept_in_the_state(make_run) -> None:
    """The third token of task 1 cannot be rewarded; the other tasks can."""
    run = make_run(max_steps=2)
    score = run.environment.score

    async def fails_on_task_1(task: Task, completion: str) -> float:
        return float("nan") if task.index == 1 and len(completion) == 3 else await score(task, completion)

    run.environment.score = fails_on_task_1
    run.start()
    (event,) = run.events("task_set_aside")
    assert event["task"] == 1
    assert run.metrics("rollouts/failed")[-1]["rollouts/failed"] == 1
    assert run.metrics("tasks/set_aside")[-1]["tasks/set_aside"] == 1
    assert run.state(2).set_aside == [1]
    (line,) = read_json_lines(run.dir.failures)
    assert (line["purpose"], line["task"], line["completion"]) == ("train", 1, "xxx")


def test_a_failed_rollout_is_tried_as_often_as_configured(make_run) -> None:
    run = make_run(max_steps=1, prompts_per_step=1, env={"tries": 2})
    run.environment.train_tasks = TASKS[:1]

    async def fails(task: Task, completion: str) -> float:
        if task.index == 0:
            raise KeyError(completion)
        return 1.0

    run.environment.score = fails
    with pytest.raises(TooManyFailures, match="all 1 training tasks failed and are set aside: 6 × KeyError"):
        run.start()
    assert len(run.training_requests) == 2


def test_too_many_failures_end_the_run_without_wrapping(make_run) -> None:
    run = make_run(max_failed_share=0.0, prompts_per_step=1)

    async def fails(task: Task, completion: str) -> float:
        if task in TASKS[:4]:
            raise KeyError(completion)
        return 1.0

    run.environment.score = fails
    with pytest.raises(TooManyFailures, match=r"3 of the 3 rollouts .*\(max_failed_share = 0 .*\): 3 × KeyError"):
        run.start()


@pytest.mark.parametrize("lost_after", [1, 3])
def test_a_lost_server_ends_the_run_and_no_task_is_blamed(make_run, lost_after: int) -> None:
    """In the first evaluation, or while groups are made."""
    run = make_run(max_failed_share=0.0)
    run.server.lost_after = lost_after
    with pytest.raises(ServerLost, match="run 'theirs-1' has taken it"):
        run.start()
    assert {event["event"] for event in read_json_lines(run.dir.events)} == {"started"}
    assert not run.dir.failures.exists()


def test_metrics_are_forwarded_before_the_first_step_and_with_every_step(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = make_run(), list[int]()
    monkeypatch.setattr(MetricsForwarder, "forward", lambda _: seen.append(len(run.metrics("reward/mean"))))
    run.start()
    assert set(seen) == {0, 1, 2, 3, 4}


def test_metrics_are_forwarded_all_along(monkeypatch: pytest.MonkeyPatch) -> None:
    forwarded: list[int] = []

    class Forwarder:
        def forward(self) -> None:
            forwarded.append(len(forwarded))

    class Loop:
        forwarder = Forwarder()

    async def pass_a_second(seconds: float) -> None:
        if len(forwarded) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", pass_a_second)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(Orchestrator._forward_metrics(Loop()))  # type: ignore[arg-type]
    assert forwarded == [0, 1, 2]


def test_a_server_that_would_refuse_our_weights_is_known_before_anything_is_loaded(make_run) -> None:
    run = make_run()
    run.server.refuses = True
    with pytest.raises(UserError, match="weights from weights are refused"):
        run.start()
    assert run.server.loaded == [] and run.server.requests == []


def test_evaluation_failures_are_recorded_as_such(make_run) -> None:
    run = make_run(max_steps=1)
    score = run.environment.score

    async def fails_on_task_4(task: Task, completion: str) -> float:
        if task.index == 4:
            raise KeyError("held out")
        return await score(task, completion)

    run.environment.score = fails_on_task_4
    run.start()
    assert [line["eval/num_failed"] for line in run.metrics("eval/num_failed")] == [1, 1]
    assert [line["purpose"] for line in read_json_lines(run.dir.failures)] == ["eval", "eval"]
    assert run.metrics("rollouts/failed")[-1]["rollouts/failed"] == 0


def test_every_prompt_is_tokenized_once(make_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four training and two held-out tasks, over two epochs and three evaluations."""
    run, encode, seen = make_run(eval={"every": 2}), Tokenizer.encode_chat, []

    def counted(self: Tokenizer, messages: list[Any], **options: Any) -> list[int]:
        seen.append(messages[0]["content"])
        return encode(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", counted)
    run.start()
    assert len(run.training_requests) == 8 and len(run.eval_requests) == 6
    assert sorted(seen) == list("abcdef")


def test_filtered_rollouts_leave_the_batch_and_are_counted(make_run) -> None:
    """Of three completions the first is too short to be trained on; its reward still counts in the group's mean."""
    run = make_run(max_steps=1, filters={"min_tokens": 2}).start()
    assert run.advantages(1) == [[-0.5] * 2, [0.0] * 3] * 2
    [line] = run.metrics("filters/rollouts/min_tokens")
    assert line["filters/rollouts/min_tokens"] == 2.0


def test_a_batch_that_cannot_be_filled_ends_the_run_with_the_reason(make_run) -> None:
    with pytest.raises(TooManyFailures, match="× equal_rewards"):
        make_run(1.0, 1.0, 1.0, filters={"equal_rewards": True, "max_refills": 1}).start()


def test_a_resumed_run_skips_what_an_uninterrupted_one_skips(make_run) -> None:
    """A third of every group is solved, too little here: tasks that were visited are in the hard pool."""
    options: dict[str, Any] = {"curriculum": {"hard_below": 0.5, "hard_share": 0.5}}
    run = make_run(**options).start()
    state = run.state(2)
    assert state.hard == sorted({run.tasks.place(group_id) for group_id in range(state.next_order)})
    assert run.state(4).next_order > 8, "some visits were skipped"
    resumed = make_run(**options).start(resumed_from=state)
    seeds = [request["seed"] for request in run.training_requests]
    assert [request["seed"] for request in resumed.training_requests] == seeds[4:]
    assert resumed.state(4) == run.state(4)


def test_weights_are_synced_as_often_as_configured(make_run) -> None:
    """The trainer publishes versions 2 and 4 only; batches of two steps are sampled from each version."""
    run = make_run(sync_every=2, max_staleness=1, eval={"num_prompts": 1})
    run.start()
    assert [version for _, version in run.server.loaded] == [0, 2, 4]
    assert [line["staleness/max"] for line in run.metrics("staleness/max")] == [0, 1, 0, 1]
