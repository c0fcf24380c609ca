"""The small parts of the Python API: imports, data, rewards, GPUs."""

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem import (
    DataBuffer,
    MathReward,
    NativeEngine,
    Prompt,
    PyTorchTrainingBackend,
    Reward,
    RLTrainingConfig,
    UserError,
)
from tandem.api import backend, engines, run
from tandem.api.gpus import gpu_environment
from tandem.api.rewards import RewardedTasks
from tandem.api.run import parse
from tandem.types.rollout import Task


def test_importing_tandem_is_fast_and_none_of_its_names_brings_torch_or_ray() -> None:
    code = """
import sys, tandem
assert not {'torch', 'ray', 'pydantic', 'aiohttp'} & sys.modules.keys()
for name in tandem.__all__:
    getattr(tandem, name)
assert not {'torch', 'ray', 'transformers', 'fastapi'} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there_and_no_other_is() -> None:
    for name in tandem.__all__:
        assert getattr(tandem, name) is not None
    assert set(tandem.__all__) == set(dir(tandem))
    with pytest.raises(AttributeError, match="no attribute 'NativeEngin'"):
        getattr(tandem, "NativeEngin")  # noqa: B009


def test_a_data_buffer_gives_every_row_once_an_epoch_however_many_are_asked_for() -> None:
    buffer = DataBuffer([("2 + 2", "4"), "Say hello", {"messages": [{"role": "user", "content": "x"}], "answer": "y"}])
    given = [task.index for size in (2, 5, 1, 4) for task in buffer.sample(size)]
    assert all(sorted(given[epoch : epoch + 3]) == [0, 1, 2] for epoch in range(0, 12, 3))
    assert buffer.position == 12 and len(buffer) == 3
    again = DataBuffer(buffer.tasks)
    again.position = 2
    assert [task.index for task in again.sample(5)] == given[2:7]
    assert buffer.tasks[0].answer == "4" and buffer.tasks[1].messages[0]["content"] == "Say hello"


@pytest.mark.parametrize("rows", [[], [{"question": "?"}], [{"prompt": "?", "messages": []}]])
def test_rows_that_are_none_are_refused(rows: list[Any]) -> None:
    with pytest.raises(UserError, match="give"):
        DataBuffer(rows)


def test_what_is_set_aside_is_left_out() -> None:
    buffer = DataBuffer(["a", "b", "c"], eval_rows=["d"])
    buffer.set_aside.add(1)
    assert {task.index for task in buffer.sample(20)} == {0, 2} and buffer.position >= 20
    assert [task.messages[0]["content"] for task in buffer.eval_tasks] == ["d"]
    buffer.set_aside.update({0, 2})
    with pytest.raises(UserError, match=r"all 3 tasks .* are set aside"):
        buffer.sample(1)


def test_tasks_of_an_environment() -> None:
    buffer = DataBuffer.from_env({"id": "arithmetic", "args": {"num_train": 5, "num_eval": 3}})
    assert (len(buffer), len(buffer.eval_tasks), buffer.has_conversations) == (5, 3, False)
    assert DataBuffer.from_env("calculator").has_conversations
    with pytest.raises(UserError, match="did you mean 'args'"):
        DataBuffer.from_env({"id": "arithmetic", "arg": {}})


def score(reward: Any, completion: str) -> Any:
    task = Task(0, [{"role": "user", "content": "What is 1/4 + 1/4?"}], "1/2", {"weight": 3})
    return asyncio.run(RewardedTasks(reward, timeout_s=60).score(task, completion))


class ByPrompt:
    def score(self, prompt: str, response: str) -> float:
        assert isinstance(prompt, Prompt) and "1/4" in prompt
        return prompt.info["weight"] * float(response == prompt.answer)


class Async:
    async def score(self, prompt: str, response: str) -> float:
        await asyncio.sleep(0)
        return float(len(response))


def test_rewards_of_all_kinds() -> None:
    assert score(ByPrompt(), "1/2") == 3.0 and score(ByPrompt(), "1") == 0.0
    assert score(Async(), "four") == 4.0
    assert score(lambda completion, answer: float(completion == answer), "1/2") == 1.0
    assert score("exact_match", "1/2") == 1.0
    assert score(MathReward(), "It is \\boxed{0.5}") == 1.0
    assert Reward("numeric", tolerance=0.1).score(Prompt("?", answer="4"), "about 4.05") == 1.0
    assert Reward("exact_match").score("?", "") == 1.0


def test_rewards_that_are_none_are_refused() -> None:
    for wrong in (lambda: Reward("nmeric"), lambda: Reward("numeric", tolerence=1), lambda: RewardedTasks(3, 1)):  # type: ignore[arg-type]
        with pytest.raises(UserError):
            wrong()


def test_a_reward_that_hangs_is_given_up() -> None:
    class Hangs:
        async def score(self, prompt: str, response: str) -> float:
            await asyncio.Event().wait()
            return 0.0

    with pytest.raises(TimeoutError):
        asyncio.run(RewardedTasks(Hangs(), timeout_s=0.01).score(Task(0, [], ""), "x"))


def test_gpu_ids_count_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_environment(None, "gpu_ids") == {}
    assert gpu_environment([0, 3], "gpu_ids") == {"CUDA_VISIBLE_DEVICES": "0,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab,6")
    assert gpu_environment([2, 1], "gpu_ids") == {"CUDA_VISIBLE_DEVICES": "6,GPU-ab"}
    for wrong in ([3], [0, 0], [-1]):
        with pytest.raises(UserError, match="gpu_ids"):
            gpu_environment(wrong, "gpu_ids")


def test_mistakes_in_options_name_the_key() -> None:
    with pytest.raises(UserError, match="one GPU for each rank"):
        PyTorchTrainingBackend("models/x", world_size=4, gpu_ids=[0, 1])
    with pytest.raises(UserError, match="did you mean 'lr'"):
        PyTorchTrainingBackend("models/x", optimizer={"lrr": 1})
    with pytest.raises(UserError, match="did you mean 'seq_len'"):
        NativeEngine("models/x", seqlen=3)
    with pytest.raises(UserError, match="both given"):
        NativeEngine("models/x", 0, gpu_ids=[1])
    with pytest.raises(ValueError, match=r"group_size = 1 .* set group_size to 2 or more"):
        RLTrainingConfig(num_steps=1, group_size=1)
    with pytest.raises(ValueError, match="max_tokens = 64 leaves no room for a prompt"):
        RLTrainingConfig(num_steps=1, max_tokens=64, seq_len=64)
    assert PyTorchTrainingBackend("models/x", strategy="fsdp").config.parallel.strategy == "zero3"


def test_rl_takes_a_file_or_a_table_and_what_is_laid_over_it() -> None:
    config = parse("examples/reverse_text/rl.toml", {"max_steps": 7, "trainer": {"optimizer": {"lr": 0.5}}})
    assert config.trainer.max_steps == 7 and config.trainer.optimizer.lr == 0.5
    assert parse(config, {}) is config
    assert parse({"model": {"name": "models/x"}, "trainer": {}, "orchestrator": {}}, {}).inference is None
    with pytest.raises(UserError, match="max_step"):
        parse("examples/reverse_text/rl.toml", {"max_step": 7})
    with pytest.raises(UserError, match="final"):
        parse(config, {"max_steps": 7})


def test_names_of_others_lead_to_ours() -> None:
    with pytest.raises(AttributeError, match="that is MathReward"):
        getattr(tandem, "MathRewardModel")  # noqa: B009


class Hub:
    """Instead of fetching: what was asked for is in the cache from then on."""

    def __init__(self, cache: Path, model_dir: Path) -> None:
        self.cache = cache
        self.model_dir = model_dir
        self.asked: list[str] = []

    def fetch(self, name: Path) -> None:
        self.asked.append(str(name))
        folder = self.cache / ("models--" + str(name).replace("/", "--"))
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("abc")
        shutil.copytree(self.model_dir, folder / "snapshots" / "abc")


def test_models_are_fetched_by_their_names_when_something_starts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub = Hub(tmp_path / "hub", tiny_model)
    for module in (backend, engines, run):
        monkeypatch.setattr(module, "fetch_model", hub.fetch)
    monkeypatch.setattr(PyTorchTrainingBackend, "_launch", lambda self, config: None)
    trained = PyTorchTrainingBackend("someone/first", output_dir=tmp_path / "run")
    served = NativeEngine("someone/second")
    monkeypatch.setattr(served, "_open", lambda: asyncio.sleep(0))
    assert hub.asked == []

    async def start() -> None:
        await trained.start(RLTrainingConfig(num_steps=1, max_tokens=8, seq_len=64))
        await served.start()
        await trained.close()
        await served.close()

    asyncio.run(start())
    assert parse({"model": {"name": "someone/third"}, "trainer": {}, "orchestrator": {}}, {}).model.name.is_dir()
    assert hub.asked == ["someone/first", "someone/second", "someone/third"]
    assert trained.model_dir.is_dir() and served.model_dir.is_dir()
