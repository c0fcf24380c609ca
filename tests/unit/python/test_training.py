"""The loop: in which order it generates, trains and syncs, over fake parts."""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.patience import PATIENCE

from tandem import (
    DataBuffer,
    Prompt,
    PyTorchTrainingBackend,
    RemoteRolloutManager,
    RLTrainingConfig,
    RolloutManager,
    TrainingFailed,
    UserError,
    WorkerDied,
)
from tandem import run_rl_training as run
from tandem.commands.trainer import TrainerConfig
from tandem.config.sampling import EvalConfig
from tandem.orchestrator.state import OrchestratorState
from tandem.python.trainer import Metrics
from tandem.types.rollout import TrainBatch
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import read_metrics
from tandem.utils.run_dir import RunDir


class FakeBackend:
    """Learns nothing, and remembers what it was given."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self.model_dir = model_dir
        self.run_dir = RunDir(folder)
        self.batches: list[TrainBatch] = []
        self.is_closed = False

    async def start(self, config: RLTrainingConfig) -> int:
        self.run_dir.create()
        return 0

    async def train(self, batch: TrainBatch) -> Metrics:
        self.batches.append(batch)
        return {"loss": 0.5}

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    def weights(self, version: int) -> Path:
        return self.run_dir.weights / str(version)

    async def close(self) -> None:
        self.is_closed = True


class FakeWorker:
    """Answers the messages of an inference worker, in the caller's thread; dies at its `dies_at`-th prompts."""

    def __init__(self, name: str, dies_at: int | None = None, comes_back: bool = False) -> None:
        self.name = name
        self.dies_at = dies_at
        self.comes_back = comes_back
        self.version: int | None = None
        self.versions: list[int] = []
        self.num_prompts = 0
        self._lock = threading.Lock()

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._lock.acquire(blocking=False), "one message at a time"
        try:
            return self._answer(message)
        finally:
            self._lock.release()

    def restart(self) -> bool:
        self.dies_at, self.version = None, None
        return self.comes_back

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        match message:
            case {"cmd": "init_engine", "model_name": _}:
                self.version = 0
                return {"status": "ready"}
            case {"cmd": "update_weights", "version": version}:
                self.version = version
                self.versions.append(version)
                return {"status": "loaded"}
            case {"cmd": "generate", "prompts": prompts}:
                assert self.version is not None, "it has no model"
                self.num_prompts += len(prompts)
                if self.dies_at is not None and self.num_prompts >= self.dies_at:
                    raise WorkerDied(f"{self.name} died")
                return {"completions": [self._complete(one) for one in prompts]}
        raise AssertionError(message)

    def _complete(self, prompt: dict[str, Any]) -> list[dict[str, Any]]:
        one = {"token_ids": [50, 51], "logprobs": [-1.0, -2.0], "versions": [self.version] * 2, "finish_reason": "stop"}
        return [one for _ in range(prompt["sampling"]["n"])]


def train(
    tiny_model: Path, folder: Path, workers: list[FakeWorker], **options: Any
) -> tuple[FakeBackend, list[Metrics]]:
    backend = FakeBackend(tiny_model, folder)
    given: dict[str, Any] = {"num_steps": 4, "prompts_per_step": 7, "group_size": 2, "max_tokens": 4, **options}
    config = RLTrainingConfig(**given)
    rewards = iter(range(10_000))
    manager = RemoteRolloutManager(workers, DataBuffer(["a", "b", "c"]), reward=lambda text, answer: next(rewards) % 2)
    return backend, asyncio.run(run(backend, manager, config=config))


def test_batches_are_whole_and_weights_follow_each_sync(tiny_model: Path, tmp_path: Path) -> None:
    workers = [FakeWorker(f"worker {number}") for number in range(3)]
    backend, metrics = train(tiny_model, tmp_path, workers, sync_every=2)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4] and metrics[0]["loss"] == 0.5
    assert [line["staleness/max"] for line in metrics] == [0, 1, 0, 1]
    assert all(worker.versions == [2, 4] for worker in workers)
    assert [batch.packed.num_sequences for batch in backend.batches] == [14] * 4
    assert sum(worker.num_prompts for worker in workers) == 28 and backend.is_closed
    assert [line["step"] for line in read_metrics(backend.run_dir)] == [1, 2, 3, 4]
    assert [line["reward/mean"] for line in metrics] == [0.5] * 4


def test_overlapped_batches_are_one_version_older(tiny_model: Path, tmp_path: Path) -> None:
    _, metrics = train(tiny_model, tmp_path, [FakeWorker("worker")], overlap=True)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["staleness/max"] <= 1 for line in metrics)


def test_all_workers_work_at_once_however_many_there_are(tiny_model: Path, tmp_path: Path) -> None:
    everybody = threading.Barrier(40)

    class Waiting(FakeWorker):
        def _complete(self, prompt: dict[str, Any]) -> list[dict[str, Any]]:
            everybody.wait(60 * PATIENCE)  # until all of them are asked
            return super()._complete(prompt)

    workers: list[FakeWorker] = [Waiting(f"worker {number}") for number in range(40)]
    backend, _ = train(tiny_model, tmp_path, workers, prompts_per_step=40, num_steps=1)
    assert backend.batches[0].packed.num_sequences == 80 and all(worker.num_prompts == 1 for worker in workers)


def test_a_slow_worker_does_not_hold_up_the_others(tiny_model: Path, tmp_path: Path) -> None:
    class Slow(FakeWorker):
        def _complete(self, prompt: dict[str, Any]) -> list[dict[str, Any]]:
            """Not before all other prompts have been taken by the other."""
            deadline = time.monotonic() + 60 * PATIENCE
            while self.num_prompts + fast.num_prompts < 21:
                assert time.monotonic() < deadline, "the other waits for this one"
                time.sleep(0.001)
            return super()._complete(prompt)

    slow, fast = Slow("slow"), FakeWorker("fast")
    backend, _ = train(tiny_model, tmp_path, [slow, fast], prompts_per_step=21, num_steps=1)
    assert backend.batches[0].packed.num_sequences == 42 and fast.num_prompts > slow.num_prompts


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_dead_workers_share_is_redone(tiny_model: Path, tmp_path: Path, comes_back: bool) -> None:
    mortal, other = FakeWorker("mortal", dies_at=3, comes_back=comes_back), FakeWorker("other")
    backend, metrics = train(tiny_model, tmp_path, [mortal, other])
    assert len(metrics) == 4 and [batch.packed.num_sequences for batch in backend.batches] == [14] * 4
    assert (mortal.version == 4) is comes_back and other.versions == [1, 2, 3, 4]


class Hanging(FakeWorker):
    """Never answers the message that it is to die of; the next start gives it another life."""

    is_hanging = False

    def __init__(self, name: str, hangs_at: str, comes_back: bool) -> None:
        super().__init__(name, comes_back=comes_back)
        self.hangs_at: str | None = hangs_at

    def restart(self) -> bool:
        self.hangs_at, self._lock = None, threading.Lock()
        return super().restart()

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["cmd"] == self.hangs_at:
            self.is_hanging = True
            threading.Event().wait()
        return super()._answer(message)


@pytest.mark.parametrize(
    ("hangs_at", "comes_back"), [("generate", True), ("generate", False), ("update_weights", True)]
)
def test_a_worker_that_never_answers_is_a_dead_one(
    tiny_model: Path, tmp_path: Path, hangs_at: str, comes_back: bool
) -> None:
    hanging, other = Hanging("hanging", hangs_at, comes_back), FakeWorker("other")
    backend, metrics = train(tiny_model, tmp_path, [hanging, other], worker_timeout_s=0.5 * PATIENCE)
    assert len(metrics) == 4 and [batch.packed.num_sequences for batch in backend.batches] == [14] * 4
    assert (hanging.version == 4) is comes_back and other.versions == [1, 2, 3, 4]


@pytest.mark.parametrize("hangs_at", ["init_engine", "generate"])
def test_a_trainer_that_fails_ends_the_run_though_a_worker_hangs(
    tiny_model: Path, tmp_path: Path, hangs_at: str
) -> None:
    class Failing(FakeBackend):
        async def watch(self) -> NoReturn:
            while not any(worker.is_hanging for worker in workers):
                await asyncio.sleep(0.01)
            raise TrainingFailed("the trainer ended with exit code 1")

    workers = [Hanging("hanging", hangs_at, comes_back=False)]
    manager = RemoteRolloutManager(workers, DataBuffer(["a"]), lambda text, answer: 1.0)
    backend = Failing(tiny_model, tmp_path)
    with pytest.raises(TrainingFailed, match="exit code 1"):
        asyncio.run(run(backend, manager, config=RLTrainingConfig(num_steps=2, max_tokens=4)))
    assert backend.is_closed


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_trainer_that_dies_while_prompts_are_completed_is_started_again_so_often(
    tiny_model: Path, tmp_path: Path, max_restarts: int
) -> None:
    class Dying(PyTorchTrainingBackend):
        num_starts = 0

        def _launch(self, config: TrainerConfig) -> None:
            self.num_starts += 1
            self._process = subprocess.Popen(["false"], start_new_session=True)

    async def watch() -> None:
        await backend.start(RLTrainingConfig(num_steps=1, max_tokens=8, seq_len=64))
        try:
            async with asyncio.timeout(60 * PATIENCE):
                await backend.watch()
        finally:
            await backend.close()

    backend = Dying(tiny_model, output_dir=tmp_path / "run", max_restarts=max_restarts)
    with pytest.raises(TrainingFailed, match="exit code 1"):
        asyncio.run(watch())
    assert backend.num_starts == 1 + max_restarts


def test_without_overlap_no_more_prompts_are_asked_than_the_step_needs(tiny_model: Path, tmp_path: Path) -> None:
    """Though the weights of two steps are the same: which prompts a batch has depends on their order alone."""

    class Uneven(FakeWorker):
        def _complete(self, prompt: dict[str, Any]) -> list[dict[str, Any]]:
            time.sleep(0.02 * (prompt["sampling"]["seed"] % 3))
            return super()._complete(prompt)

    workers: list[FakeWorker] = [Uneven(f"worker {number}") for number in range(3)]
    backend, _ = train(tiny_model, tmp_path, workers, sync_every=2, prompts_per_step=3)
    states = [json.loads(batch.orchestrator_state) for batch in backend.batches]
    assert [(state["next_order"], state["unfinished"]) for state in states] == [(3, []), (6, []), (9, []), (12, [])]


def test_a_program_ends_though_a_worker_hangs(tiny_model: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tests.unit.python.test_training import Hanging, FakeWorker, train
train(Path({str(tiny_model)!r}), Path({str(tmp_path)!r}), [Hanging("one", "generate", False), FakeWorker("two")],
      worker_timeout_s=1)
print("trained")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert ended.stdout == "trained\n", ended.stderr


def test_a_worker_is_called_in_one_thread(tiny_model: Path, tmp_path: Path) -> None:
    """The kernel ends processes with the thread that started them, where they ask it to, as our servers do."""

    class Threads(FakeWorker):
        used: set[threading.Thread] = set()

        def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
            self.used.add(threading.current_thread())
            assert all(thread.is_alive() for thread in self.used)
            return super()._answer(message)

    train(tiny_model, tmp_path, [worker := Threads("worker")])
    assert len(worker.used) == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_a_worker_that_dies_of_new_weights_is_asked_nothing_before_it_has_them(
    tiny_model: Path, tmp_path: Path, overlap: bool
) -> None:
    class DiesOfWeights(FakeWorker):
        def restart(self) -> bool:
            restarted = super().restart()
            time.sleep(0.1)  # the others ask for work meanwhile
            return restarted

        def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
            if message["cmd"] == "update_weights" and self.dies_at is not None:
                raise WorkerDied(f"{self.name} died")
            return super()._answer(message)

    mortal, other = DiesOfWeights("mortal", dies_at=10_000, comes_back=True), FakeWorker("other")
    backend, metrics = train(tiny_model, tmp_path, [mortal, other], num_steps=8, overlap=overlap)
    assert len(metrics) == 8 and [batch.packed.num_sequences for batch in backend.batches] == [14] * 8
    assert other.versions == list(range(1, 9))


def test_a_reward_that_fails_ends_the_run_with_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    def reward(completion: str, answer: str) -> float:
        raise KeyError("no such column")

    backend = FakeBackend(tiny_model, tmp_path)
    manager = RemoteRolloutManager([FakeWorker("worker")], DataBuffer(["a"]), reward)
    with pytest.raises(UserError, match="no such column"):
        asyncio.run(run(backend, manager, config=RLTrainingConfig(num_steps=1, max_tokens=4, reward_tries=1)))
    assert backend.is_closed


def run_with(
    tiny_model: Path, folder: Path, buffer: DataBuffer, reward: Any, **options: Any
) -> tuple[FakeBackend, list[Metrics]]:
    backend = FakeBackend(tiny_model, folder)
    given: dict[str, Any] = {"num_steps": 2, "prompts_per_step": 2, "group_size": 2, "max_tokens": 4, **options}
    manager = RemoteRolloutManager([FakeWorker("one"), FakeWorker("two")], buffer, reward)
    return backend, asyncio.run(run(backend, manager, config=RLTrainingConfig(**given)))


def test_a_task_that_cannot_be_scored_is_set_aside(tiny_model: Path, tmp_path: Path) -> None:
    def reward(completion: str, answer: str) -> float:
        return {"good": 1.0, "fine": 0.0}[answer]

    rows = [("a", "good"), ("b", "bad"), ("c", "fine")]
    backend, metrics = run_with(tiny_model, tmp_path, buffer := DataBuffer(rows), reward, num_steps=4, reward_tries=1)
    assert len(metrics) == 4 and buffer.set_aside == {1}
    assert {group["answer"] for step in range(1, 5) for group in samples(backend, step)} == {"good", "fine"}
    states = [json.loads(batch.orchestrator_state) for batch in backend.batches]
    assert [state["step"] for state in states] == [1, 2, 3, 4] and states[-1]["set_aside"] == [1]
    assert states[-1]["next_order"] == buffer.position > 8


def samples(backend: FakeBackend, step: int) -> list[dict[str, Any]]:
    return read_json_lines(backend.run_dir.samples(step))


class Alternating:
    """Right, wrong, right, wrong; but always wrong where the answer says so."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def score(self, prompt: Prompt, response: str) -> float:
        return 0.0 if prompt.answer == "never" else float(next(self.count) % 2)


def test_filtered_groups_are_replaced_by_other_prompts(tiny_model: Path, tmp_path: Path) -> None:
    rows = [("a", "often"), ("b", "never"), ("c", "often")]
    filters = {"equal_rewards": True, "max_refills": 1000}  # groups scored side by side may share out their rewards
    backend, metrics = run_with(tiny_model, tmp_path, DataBuffer(rows), Alternating(), filters=filters, num_steps=3)
    assert [batch.packed.num_sequences for batch in backend.batches] == [4, 4, 4]
    assert {row["answer"] for step in (1, 2, 3) for row in samples(backend, step)} == {"often"}
    assert sum(line.get("filters/groups/equal_rewards", 0) for line in metrics) > 0


def test_held_out_rows_are_evaluated_when_due(tiny_model: Path, tmp_path: Path) -> None:
    buffer = DataBuffer([("a", "often")], eval_rows=[("b", "never"), ("c", "never")])
    backend, metrics = run_with(tiny_model, tmp_path, buffer, Alternating(), eval={"every": 2}, num_steps=5)
    assert [line["step"] for line in metrics if "eval/reward" in line] == [0, 2, 4, 5]
    assert [line["eval/reward"] for line in metrics if "eval/reward" in line] == [0.0] * 4
    assert [line["step"] for line in read_metrics(backend.run_dir) if "eval/reward" in line] == [0, 2, 4, 5]
    with pytest.raises(UserError, match="give DataBuffer eval_rows"):
        run_with(tiny_model, tmp_path, DataBuffer(["a"]), Alternating(), eval={})


def test_an_answer_to_somebody_elses_message_is_named(tiny_model: Path, tmp_path: Path) -> None:
    class Behind(FakeWorker):
        """Its first answer was not received: from then on each is the one before."""

        last: Any = None

        def call(self, message: dict[str, Any]) -> dict[str, Any]:
            before, self.last = self.last or {"status": "ready"}, super().call(message)
            return before

    with pytest.raises(UserError, match=r"answered `generate` with {'status': 'ready'}"):
        train(tiny_model, tmp_path, [Behind("behind")])


@pytest.mark.parametrize(
    "answer", [None, "x", {"completions": "x"}, {"completions": [None]}, {"completions": [[{"token_ids": [1]}]]}]
)
def test_an_answer_of_another_shape_is_named(tiny_model: Path, tmp_path: Path, answer: Any) -> None:
    class Confused(FakeWorker):
        def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
            return answer if message["cmd"] == "generate" else super()._answer(message)

    with pytest.raises(UserError, match="confused answered `generate` with ") as refused:
        train(tiny_model, tmp_path, [Confused("confused")])
    assert "\n" not in str(refused.value)


class ResumedBackend(FakeBackend):
    """After two steps of a run that had set a task aside."""

    async def start(self, config: RLTrainingConfig) -> int:
        await super().start(config)
        state = OrchestratorState(step=2, next_order=7, unfinished=[], set_aside=[1])
        folder = self.run_dir.checkpoints / "step_000002"
        folder.mkdir(parents=True)
        (folder / "orchestrator.json").write_bytes(state.encode())
        return 2


def test_a_resumed_run_goes_on_with_the_next_prompts(tiny_model: Path, tmp_path: Path) -> None:
    backend, worker = ResumedBackend(tiny_model, tmp_path), FakeWorker("worker")
    buffer = DataBuffer(["a", "b", "c"], eval_rows=["d"])
    manager = RemoteRolloutManager([worker], buffer, lambda text, answer: 1.0)
    config = RLTrainingConfig(num_steps=4, prompts_per_step=2, group_size=2, max_tokens=4, eval=EvalConfig())
    metrics = asyncio.run(run(backend, manager, config=config))
    assert [line["step"] for line in metrics] == [3, 4] and worker.versions == [2, 3, 4]
    assert [line["staleness/max"] for line in metrics] == [0, 0] and buffer.set_aside == {1}
    orders = [json.loads(batch.orchestrator_state)["next_order"] for batch in backend.batches]
    assert 9 <= orders[0] < orders[1] == buffer.position
    assert [line["step"] for line in read_metrics(backend.run_dir) if "eval/reward" in line] == [4]


def test_penalties_on_length_reach_the_trainer(tiny_model: Path, tmp_path: Path) -> None:
    overlong = {"buffer_tokens": 4, "penalty": 2.0}  # completions have two of at most four tokens
    backend, metrics = run_with(tiny_model, tmp_path, DataBuffer(["a"]), Alternating(), overlong=overlong)
    assert [line["reward/shaped_mean"] for line in metrics] == [-0.5, -0.5]
    assert set(backend.batches[0].packed.streams["rewards"].tolist()) == {-1.0, 0.0}


def test_conversations_are_played_in_the_environments_process(tiny_model: Path, tmp_path: Path) -> None:
    buffer = DataBuffer.from_env("guessing-game")
    options = {"num_steps": 1, "advantage": "per_turn", "seq_len": 512, "eval": {"num_prompts": 2}}
    backend, metrics = run_with(tiny_model, tmp_path, buffer, None, **options)
    assert metrics[1]["turns/mean"] > 1 and "eval/reward" in metrics[0]
    assert backend.batches[0].packed.num_sequences >= 4
    with pytest.raises(UserError, match="scores its own conversations"):
        run_with(tiny_model, tmp_path, buffer, "exact_match", **options)


def test_what_is_missing_is_said(tiny_model: Path, tmp_path: Path) -> None:
    backend, config = FakeBackend(tiny_model, tmp_path), RLTrainingConfig(num_steps=1, max_tokens=4, seq_len=64)
    short = config.model_copy(update={"seq_len": 8})
    worker, data = FakeWorker("worker"), DataBuffer(["a long prompt"])
    for manager, workers, options, message in (
        (None, [worker], config, "there is no data"),
        (RemoteRolloutManager((), data), [worker], config, "there is no reward"),
        (RolloutManager((), data, "exact_match"), [], config, "nothing to generate with"),
        (RolloutManager((), data, "exact_match"), [worker], config, "RemoteRolloutManager"),
        (RemoteRolloutManager((), data, "exact_match"), [worker], short, "seq_len = 8 is too short"),
    ):
        with pytest.raises(UserError, match=message):
            asyncio.run(run(backend, manager, config=options, inference_workers=workers))
        assert backend.is_closed is (options is short), "nothing is started for what can be seen at once"
