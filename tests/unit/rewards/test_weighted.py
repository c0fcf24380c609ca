"""Several rewards of one completion: by name, by import path, in and out of worker processes."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.unit.tasks import until_alone

from tandem.envs.config import EnvConfig
from tandem.envs.results import checked_score
from tandem.isolation import process
from tandem.isolation.calls import CancelledWaiting
from tandem.isolation.clock import Limit
from tandem.rewards.checked import BadReward
from tandem.rewards.config import AnyReward
from tandem.rewards.pool import SPEC, RewardFailed
from tandem.rewards.weighted import WeightedRewards
from tandem.types.rollout import Task
from tandem.utils.errors import UserError
from tandem.utils.processes import descendants, process_exists

BRING = str(Path(__file__).with_name("bring.py"))
TASK = Task(0, [{"role": "system", "content": "Hi."}, {"role": "user", "content": "two?"}], "2", info={"bonus": 0.5})


def own(name: str, **options: Any) -> dict[str, Any]:
    return {"type": f"{BRING}:{name}"} | options


def score(*tables: dict[str, Any], completion: str = "2", task: Task = TASK) -> dict[str, float]:
    async def run() -> dict[str, float]:
        rewards = make(*tables)
        try:
            return await rewards.score(task, completion)
        finally:
            await rewards.close()

    return asyncio.run(run())


def make(*tables: dict[str, Any], num_workers: int = 2) -> WeightedRewards:
    return WeightedRewards(TypeAdapter(list[AnyReward]).validate_python(tables), num_workers)


def test_each_reward_has_its_weight_and_its_name() -> None:
    found = score(
        {"type": "numeric", "weight": 0.8, "tolerance": 0.5},
        {"type": "exact_match", "weight": -1.0},
        {"type": "regex", "pattern": r"^\d", "name": "begins"},
        {"type": "length", "most": 0, "slack": 3},
        {"type": "math", "weight": 2},
        {"type": "xml", "tags": ["answer"]},
        {"type": "json_schema", "json_schema": {"type": "integer"}},
        {"type": "lcs"},
        {"type": "normalized_match", "extract": r"\d"},
        {"type": "positional_match"},
    )
    assert found == {
        "numeric": 0.8,
        "exact_match": -1.0,
        "begins": 1.0,
        "length": 0.75,
        "math": 2.0,
        "xml": 0.0,
        "json_schema": 1.0,
        "lcs": 1.0,
        "normalized_match": 1.0,
        "positional_match": 1.0,
    }


@pytest.mark.parametrize(
    ("table", "reward"),
    [
        (own("brief"), 1.0),
        (own("brief", args={"most": 1}), 0.0),
        (own("asked"), 4.5),
        (own("waits"), 0.25),
        (own("returns_a_coroutine"), 0.25),
        (own("Scorer"), 2.0),
        (own("Scorer", args={"scale": 0.5}), 1.0),
        (own("AsyncScorer", weight=0.5), 1.0),
        (own("Counted"), 1.0),
        (own("called"), 0.125),
        (own("made"), 6.0),
        (own("decorated"), 0.5),
        (own("decorated_for_any"), 8.0),
        (own("decorated_for_any", args={"most": 3}), 6.0),
        (own("remembered"), 4.0),
    ],
)
def test_rewards_that_users_bring(table: dict[str, Any], reward: float) -> None:
    assert list(score(table, completion="22").values()) == [reward]


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("raises", r"misbehaves: KeyError: 'no such key' \(bring\.py:\d+ in misbehaves\)"),
        ("raises elsewhere", r"misbehaves: JSONDecodeError: .* \(bring\.py:\d+ in misbehaves\)"),
        ("raises half a character", r"misbehaves: ValueError: \\ud83d \(bring\.py:\d+ in misbehaves\)"),
        ("exits", "misbehaves: SystemExit: 3"),
        ("dies", "misbehaves ended its process with exit code 7"),
        ("nan", "misbehaves: BadReward: the reward is nan"),
        ("none", "misbehaves: BadReward: the reward is None, not a number$"),
        ("text", "misbehaves: BadReward: the reward is '0.7', not a number"),
    ],
)
def test_what_goes_wrong_is_named(completion: str, message: str) -> None:
    with pytest.raises(RewardFailed, match=message):
        score(own("misbehaves", timeout_s=60), {"type": "exact_match"}, completion=completion)


def test_the_child_of_a_reward_that_ends_its_process_ends_too(tmp_path: Path) -> None:
    with pytest.raises(RewardFailed, match="misbehaves ended its process with exit code 7"):
        score(own("misbehaves", timeout_s=60), completion=str(tmp_path / "pid"))
    assert not process_exists(int((tmp_path / "pid").read_text()))


def test_the_event_loop_checks_too() -> None:
    async def broken() -> None:
        rewards = make({"type": "exact_match", "weight": 1.0})
        rewards._calls[0].function = lambda completion, answer: None
        await rewards.score(TASK, "2")

    with pytest.raises(BadReward, match="exact_match: the reward is None, not a number"):
        asyncio.run(broken())


def test_a_reward_that_fails_ends_those_that_still_wait() -> None:
    """Nobody reads their answers, and a judge's cost money."""

    async def broken() -> None:
        rewards = make({"type": "exact_match"}, own("waits_for_ever", timeout_s=1000))
        rewards._calls[0].function = lambda completion, answer: None
        with pytest.raises(BadReward, match="exact_match"):
            await rewards.score(TASK, "2")
        await until_alone()

    asyncio.run(broken())


def test_what_is_called_off_says_which_rewards_it_waited_for() -> None:
    async def called_off() -> None:
        rewards = make({"type": "exact_match"}, own("waits_for_ever", timeout_s=1000))
        scoring = asyncio.ensure_future(rewards.score(TASK, "2"))
        for _ in range(3):
            await asyncio.sleep(0)
        scoring.cancel()
        with pytest.raises(CancelledWaiting, match=r"^pending: waits_for_ever of env\.rewards$"):
            await scoring

    asyncio.run(called_off())


@pytest.mark.parametrize("completion", ["sleeps", "holds the interpreter"])
def test_one_that_hangs_costs_its_own_worker_alone(completion: str) -> None:
    async def run() -> list[Any]:
        rewards = make(own("misbehaves", timeout_s=5.0), num_workers=2)
        try:
            texts = ["good", completion, "is signalled", "prints", "good"]
            return await asyncio.gather(*(rewards.score(TASK, text) for text in texts), return_exceptions=True)
        finally:
            await rewards.close()

    good, hung, *others = asyncio.run(run())
    assert isinstance(hung, RewardFailed) and str(hung) == "misbehaves took longer than timeout_s = 5 s"
    assert [good, *others] == [{"misbehaves": 0.5}] * 4
    assert not descendants(os.getpid())


@pytest.mark.parametrize("when", ["starts", "computes"])
def test_a_worker_whose_call_is_called_off_is_killed(tmp_path: Path, when: str) -> None:
    async def run() -> None:
        rewards = make(own("misbehaves", timeout_s=1000), num_workers=1)
        scoring = asyncio.ensure_future(rewards.score(TASK, f"at {tmp_path / 'here'}"))
        while not (descendants(os.getpid()) if when == "starts" else (tmp_path / "here").exists()):
            await asyncio.sleep(0.001)
        scoring.cancel()
        with pytest.raises(CancelledWaiting):
            await scoring
        assert not descendants(os.getpid())
        await rewards.close()

    asyncio.run(run())


def test_a_worker_that_hangs_up_without_an_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CLOSE_S", 0.05)
    with pytest.raises(RewardFailed, match="misbehaves ended its process with nothing, and was killed"):
        score(own("misbehaves", timeout_s=60), completion="hangs up")
    assert not descendants(os.getpid())


def test_a_worker_ends_with_its_connection_whatever_threads_are_left() -> None:
    async def run() -> int | None:
        worker = process.WorkerProcess(SPEC)
        try:
            await worker.start([own("misbehaves")])
            arguments = {"completion": "leaves a thread", "answer": ""}
            assert await worker.call({"reward": 0, "arguments": arguments}, Limit(60, "it hangs")) == 0.5
        finally:
            await worker.close()
        return worker.process.returncode

    assert asyncio.run(run()) == 0


def test_a_worker_makes_each_reward_once_and_imports_what_its_parent_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rewards_elsewhere", raising=False)

    async def run() -> list[dict[str, float]]:
        tables = ({"type": f"rewards_elsewhere:{name}", "timeout_s": 60} for name in ("Counted", "process"))
        rewards = make(*tables, num_workers=1)
        try:
            return [await rewards.score(TASK, "2") for _ in range(3)]
        finally:
            await rewards.close()

    first, *others = asyncio.run(run())
    assert first["Counted"] == 1 and first["process"] != os.getpid()
    assert others == [first] * 2
    monkeypatch.delitem(sys.modules, "rewards_elsewhere")


ELSEWHERE = """
import os
class Counted:
    made = 0
    def __init__(self):
        Counted.made += 1
    def score(self, prompt, response):
        return self.made
def process(completion, answer):
    return os.getpid()
"""


def test_an_async_reward_has_a_time_limit() -> None:
    with pytest.raises(RewardFailed, match=r"waits_for_ever took longer than timeout_s = 0\.1 s"):
        score(own("waits_for_ever", timeout_s=0.1))
    with pytest.raises(TimeoutError, match="the judge is asleep"):  # its own, not ours
        score(own("gives_up", timeout_s=60))


def test_what_has_an_end_of_its_own_is_closed() -> None:
    async def run() -> None:
        rewards = make(own("called"), {"type": "exact_match"})
        await rewards.close()
        assert rewards._calls[0].function.is_closed  # pyright: ignore[reportFunctionMemberAccess]

    asyncio.run(run())


def test_a_regular_expression_that_never_ends() -> None:
    with pytest.raises(RewardFailed, match="regex took longer"):
        score({"type": "regex", "pattern": r"^(a+)+$", "timeout_s": 1}, completion="a" * 60 + "b")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (own("number"), "is int 3; give a function of completion and answer"),
        (own("none"), "has no 'none'"),
        (own("brief", args={"least": 1}), "does not take a completion and an answer"),
        (own("AsyncScorer", args={"size": 1}), "cannot be made with args = {'size': 1}"),
        (own("made", args={"scale": 1}), "is an object that exists already"),
        ({"type": "json_schema", "json_schema": "none.json"}, "'none.json' cannot be read"),
        ({"type": "json_schema", "json_schema": {"type": "objekt"}}, r"is no JSON schema: \$\.type: 'objekt'"),
        ({"type": "judge", "model": "m", "base_url": "http://x", "api_key_var": "NO_SUCH_VAR"}, "is not set"),
    ],
)
def test_what_cannot_be_had_is_refused_at_the_start(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(table)


def test_a_file_that_holds_no_schema_is_named(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(UserError, match=r"json_schema = '.*list\.json' is no JSON schema: \$: \[1\] is not of type"):
        make({"type": "json_schema", "json_schema": str(path)})


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.rewards.registry.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"'math' needs math_verify; pip install 'tandem-rl\[rewards\]'"):
        make({"type": "math"})


def test_names_are_distinct_and_one_way_is_given() -> None:
    for name in ("mean", "max"):
        with pytest.raises(ValueError, match=f"no reward can be called '{name}'"):
            EnvConfig(rewards=[{"type": "regex", "pattern": "a", "name": name}])  # pyright: ignore
        with pytest.raises(BadReward, match=f"no reward can be called '{name}'"):
            checked_score({name: 1.0})
    with pytest.raises(ValueError, match="two of rewards are called 'regex'; give one of them another `name`"):
        EnvConfig(rewards=[{"type": "regex", "pattern": "a"}, {"type": "regex", "pattern": "b"}])  # pyright: ignore
    with pytest.raises(ValueError, match="reward = 'lcs' and rewards are both given"):
        EnvConfig(reward="lcs", rewards=[{"type": "math"}])  # pyright: ignore
