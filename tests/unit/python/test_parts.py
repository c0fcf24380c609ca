"""The small parts of the Python API: imports, data, rewards, GPUs."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE

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
from tandem.commands.export import ExportConfig
from tandem.commands.rl import RLConfig
from tandem.config.short_names import MODEL, RL
from tandem.python import backend, engines, run
from tandem.python.gpus import gpu_environment
from tandem.python.rewards import RewardedTasks
from tandem.python.run import parse
from tandem.rewards.pool import RewardFailed
from tandem.types.rollout import Task
from tandem.utils.imports import being_imported, load_object

SHORT_NAMES = MODEL | RL


def parse_rl(config: Any = None, **options: Any) -> RLConfig:
    return parse(RLConfig, config, options, SHORT_NAMES)


def test_importing_tandem_is_fast_and_none_of_its_names_brings_torch_or_ray() -> None:
    code = """
import sys, tandem
assert not {'torch', 'ray', 'pydantic', 'aiohttp'} & sys.modules.keys()
for name in tandem.__all__:
    getattr(tandem, name)
assert not {'torch', 'ray', 'transformers', 'starlette'} & sys.modules.keys()
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


def refusal(work: Callable[[], object]) -> str:
    """What a user is told, in one line."""
    with pytest.raises(UserError) as refused:
        work()
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("rows", [[], [{"question": "?"}], [{"prompt": "?", "messages": []}]])
def test_rows_that_are_none_are_refused(rows: list[Any]) -> None:
    assert "give" in refusal(lambda: DataBuffer(rows))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("abc", "rows = 'abc' is no list of rows"),
        ({"prompt": "a"}, "rows = {'prompt': 'a'} is no list of rows"),
        (None, "rows = None is no list of rows"),
        ([1], "row 0 is 1; give a prompt"),
        (["a", ("a", "b", "c", "d")], "row 1 is ('a', 'b', 'c', 'd'); give a prompt"),
        ([{}], "row 0 has no keys"),
        ([{"prompt": 5}], "row 0: prompt = 5 is no text"),
        ([(None, "b")], "row 0: prompt = None is no text"),
        ([("a", None)], "row 0: answer = None is no answer; give one, or leave it out"),
        ([{"messages": "a"}], "row 0: messages = 'a' is no list of messages"),
        ([{"messages": []}], "row 0: messages = [] is no list of messages"),
        ([("a", "b"), {"prompt": "a", "info": 5}], "row 1: info = 5 is no table"),
    ],
)
def test_what_is_no_row_is_named(rows: Any, problem: str) -> None:
    assert problem in refusal(lambda: DataBuffer(rows))
    assert problem.replace("rows =", "eval_rows =") in refusal(lambda: DataBuffer(["a"], eval_rows=rows))


def test_a_data_buffer_refuses_negative_numbers() -> None:
    buffer = DataBuffer(["a", "b"])
    assert buffer.sample(0) == []
    assert refusal(lambda: buffer.sample(-1)) == "sample(-1): give a whole number from 0 on"
    assert "there is no task number -2;" in refusal(lambda: setattr(buffer, "position", -2))


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


async def scores(reward: Any, *completions: str, timeout_s: float = 60) -> list[Any]:
    """Rewards of completions, one after the other; what went wrong in place of those that fail."""
    task = Task(0, [{"role": "user", "content": "What is 1/4 + 1/4?"}], "1/2", {"weight": 3})
    rewarded = RewardedTasks(reward, timeout_s)
    try:
        return [(await asyncio.gather(rewarded.score(task, one), return_exceptions=True))[0] for one in completions]
    finally:
        await rewarded.close()


def score(reward: Any, completion: str) -> Any:
    return asyncio.run(scores(reward, completion))[0]


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
    assert "did you mean 'numeric'?" in refusal(lambda: Reward("nmeric"))
    assert "one of: exact_match, normalized_match" in refusal(lambda: Reward("nope"))
    assert "did you mean 'tolerance'?" in refusal(lambda: Reward("numeric", tolerence=1))
    assert "tolerance = -1 is not valid" in refusal(lambda: Reward("numeric", tolerance=-1))
    assert "neither a function" in refusal(lambda: RewardedTasks(3, 1))  # type: ignore[arg-type]


def test_a_reward_that_hangs_is_given_up() -> None:
    class Hangs:
        async def score(self, prompt: str, response: str) -> float:
            await asyncio.Event().wait()
            return 0.0

    with pytest.raises(TimeoutError):
        asyncio.run(RewardedTasks(Hangs(), timeout_s=0.01).score(Task(0, [], ""), "x"))


ENDLESS = "\\boxed{9^{9^{9^9}}}"


def test_a_reward_that_holds_the_interpreter_costs_its_own_rollout() -> None:
    right = "\\boxed{0.5}"
    before, lost, after = asyncio.run(scores("math", right, ENDLESS, right, timeout_s=PATIENCE))
    assert isinstance(lost, RewardFailed) and f"timeout_s = {PATIENCE:g} s" in str(lost)
    assert before == after == 1.0
    (lost,) = asyncio.run(scores(Reward("math", timeout_s=0.5), ENDLESS, timeout_s=600))
    assert "timeout_s = 0.5 s" in str(lost), "its own limit comes first"


def test_so_does_one_that_is_part_of_a_users() -> None:
    class WithLength:
        def __init__(self) -> None:
            self.math = Reward("math", timeout_s=PATIENCE, weight=2.0)

        def score(self, prompt: Prompt, response: str) -> float:
            return self.math.score(prompt, response) + len(response)

    lost, found = asyncio.run(scores(WithLength(), ENDLESS, "0.5"))
    assert isinstance(lost, RewardFailed) and found == 5.0


def test_rewards_by_import_path_run_in_processes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "pids_as_rewards.py").write_text("import os\n\ndef pid(completion, answer):\n    return os.getpid()\n")
    assert score(f"{tmp_path}/pids_as_rewards.py:pid", "x") != os.getpid()


def test_a_program_ends_though_a_reward_hangs() -> None:
    code = """
import asyncio, time
from tandem.python.rewards import RewardedTasks
from tandem.types.rollout import Task

def reward(completion, answer):
    time.sleep(float(completion))
    return 1.0

async def main():
    rewarded, task = RewardedTasks(reward, timeout_s=1), Task(0, [], "")
    lost = await asyncio.gather(*(rewarded.score(task, "1e6") for _ in range(40)), return_exceptions=True)
    print(sum("reward_timeout_s = 1 s" in str(one) for one in lost), await rewarded.score(task, "0"))

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * PATIENCE)
    assert ended.stdout.split() == ["40", "1.0"], ended.stderr


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
    assert "set group_size to 2 or more" in refusal(lambda: RLTrainingConfig(num_steps=1, group_size=1))
    too_long = refusal(lambda: RLTrainingConfig(num_steps=1, max_tokens=64, seq_len=64))
    assert "max_tokens = 64 leaves no room for a prompt" in too_long
    unknown = refusal(lambda: RLTrainingConfig(num_steps=1, groupsize=2))  # type: ignore[call-arg]
    assert "did you mean 'group_size'?" in unknown
    assert PyTorchTrainingBackend("models/x", strategy="fsdp").config.parallel.strategy == "zero3"


def test_prompts_that_are_none_are_refused_before_anything_is_asked() -> None:
    engine = NativeEngine("models/none", seq_len=64)
    with pytest.raises(UserError, match=r"prompts = 'abc' is one text; give a list of prompts: \['abc'\]"):
        asyncio.run(engine.generate("abc"))
    with pytest.raises(UserError, match="temperature = inf is not finite"):
        asyncio.run(engine.generate(["abc"], temperature=float("inf")))


def test_rl_takes_a_file_or_a_table_and_what_is_laid_over_it() -> None:
    config = parse_rl(
        "examples/reverse_text/rl.toml", max_steps=7, optimizer={"lr": 0.5}, loss="gspo", env="arithmetic"
    )
    assert config.trainer.max_steps == 7 and config.trainer.optimizer.lr == 0.5
    assert (config.trainer.loss.type, config.orchestrator.env.id) == ("gspo", "arithmetic")
    assert parse_rl(config) is config
    assert parse_rl(model="models/x").inference is None
    with pytest.raises(UserError, match="max_step"):
        parse_rl("examples/reverse_text/rl.toml", max_step=7)
    with pytest.raises(UserError, match="RLConfig is final: max_steps cannot be laid over it"):
        parse_rl(config, max_steps=7)
    twice = refusal(lambda: parse_rl(model="m", loss="gspo", trainer={"loss": {"type": "grpo"}}))
    assert twice == "trainer.loss.type is also given as 'loss' at the top; give it once"
    wrong: Any = 5
    for command in (tandem.rl, tandem.sft, tandem.align, tandem.evaluate):
        assert "config = 5 is none of a file" in refusal(partial(command, wrong))


def own_reward(completion: str, answer: str) -> float:
    return 1.0


def test_callables_reach_the_configuration_by_import_path(tmp_path: Path) -> None:
    def own_advantages(groups: list[list[float]]) -> list[list[float]]:
        return [[reward * len(group) for reward in group] for group in groups]

    class OwnEnv:
        def __init__(self) -> None:
            self.train_tasks = self.eval_tasks = [Task(0, [{"role": "user", "content": "a"}], "b")]

        def score(self, task: Task, completion: str) -> float:
            return 1.0

    given = {"model": "m", "output_dir": str(tmp_path), "advantage": own_advantages, "env": OwnEnv}
    config = parse_rl(given, reward=own_reward, trainer={"loss": {"type": own_reward}})
    env, advantage, loss = config.orchestrator.env, config.orchestrator.advantage.type, config.trainer.loss.type
    named = {advantage: "own_advantages", env.id: "OwnEnv", env.reward or "": "own_reward", loss: "own_reward"}
    assert {path: load_object(path, "k").__name__ for path in named} == named
    assert advantage.startswith(str(tmp_path / "functions" / "own_advantages_"))
    trained = PyTorchTrainingBackend("m", output_dir=tmp_path, loss=own_reward).config
    assert load_object(trained.loss.type, "k") is own_reward
    assert PyTorchTrainingBackend("m", loss="gspo", lr=0.5).config.loss.type == "gspo"
    mine = load_object(str(RLTrainingConfig(num_steps=1, advantage=own_advantages).advantage), "k")
    assert mine([[1.0, 2.0]]) == [[2.0, 4.0]]
    assert [task.answer for task in DataBuffer.from_env(OwnEnv).tasks] == ["b"]
    told = refusal(lambda: parse_rl(model="m", reward=partial(own_reward, answer="")))
    assert told.startswith(
        "orchestrator.env.reward = functools.partial(<function own_reward>, answer='') is an object of type"
    )


def test_a_file_that_starts_a_run_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "starts_a_run.py"
    script.write_text("import tandem\n\ndef score(completion, answer):\n    return 1.0\n\ntandem.rl(model='m')\n")
    told = refusal(lambda: load_object(f"{script}:score", "orchestrator.env.reward"))
    assert 'starts a run while it is imported; put what it does as a program below `if __name__ == "__main__":`' in told
    assert being_imported() is None


def test_a_command_ends_with_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ExportConfig(run_dir=tmp_path / "none")
    assert (
        refusal(lambda: run.run_command("export", config))
        == f"run_dir = '{tmp_path / 'none'}' holds no complete checkpoint"
    )
    assert "export-model: run_dir" in capsys.readouterr().out


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
    assert parse_rl(model="someone/third").model.name.is_dir()
    assert hub.asked == ["someone/first", "someone/second", "someone/third"]
    assert trained.model_dir.is_dir() and served.model_dir.is_dir()
