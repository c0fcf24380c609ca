"""Users' code in a process of its own: whatever it does costs one call, and the next one works."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.envs.config import EnvConfig
from tandem.envs.process import EnvironmentProcess, open_environment
from tandem.isolation.failures import Failure, UserCodeError
from tandem.utils.errors import UserError
from tandem.utils.processes import descendants

# Long enough for a slow machine to answer a call that does nothing.
LIMIT_S = 2.0

pytestmark = pytest.mark.usefixtures("importable")


def config(*behaviours: str, cls: str = "Misbehaving", **options: object) -> EnvConfig:
    args = {"behaviours": list(behaviours)}
    return EnvConfig.model_validate({"id": f"misbehaving:{cls}", "args": args, "score_timeout_s": LIMIT_S} | options)


def run_with(env: EnvConfig, body: Callable[[EnvironmentProcess], Awaitable[None]]) -> None:
    async def run() -> None:
        async with open_environment(env) as environment:
            await body(environment)

    asyncio.run(run())


def failures(env: EnvConfig) -> list[Failure | float]:
    """What each training task gives, scored at the same time, after which a good one must still work."""
    found: list[Failure | float] = []

    async def body(environment: EnvironmentProcess) -> None:
        scores = [environment.score(task, "a text") for task in environment.train_tasks]
        outcomes = await asyncio.gather(*scores, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, float | UserCodeError), outcome
            found.append(outcome.failure if isinstance(outcome, UserCodeError) else outcome)
        assert await environment.score(environment.eval_tasks[0], "a text") == 1.0

    run_with(env, body)
    return found


@pytest.mark.parametrize("cls", ["Misbehaving", "Sync"])
def test_what_is_raised_or_is_no_reward_costs_its_call_and_says_where(cls: str) -> None:
    behaviours = ["good", "raises", "recurses", "exits", "interrupts", "cancels", "nan", "infinite", "none", "text"]
    good, *bad = failures(config(*behaviours, "1e308", "raises a novel", "raises half a character", cls=cls))
    assert good == 1.0
    assert all(isinstance(failure, Failure) for failure in bad)
    reasons = [failure.reason for failure in bad if isinstance(failure, Failure)]
    assert reasons[0] == "KeyError: 'no such key'"
    assert reasons[1].startswith("RecursionError: maximum recursion depth exceeded")
    assert reasons[2:5] == ["SystemExit: 3", "KeyboardInterrupt", "CancelledError"]
    assert [reason.partition(";")[0] for reason in reasons[5:10]] == [
        "the reward is nan",
        "the reward is -inf",
        "the reward is None, not a number",
        "the reward is '0.7', not a number",
        "the reward is 1e+308",
    ]
    assert reasons[10].startswith("ValueError: xxx") and len(reasons[10]) < 500
    assert reasons[11] == "ValueError: no number in \\ud83d"
    for failure in bad:
        assert isinstance(failure, Failure) and failure.where.startswith("misbehaving.py:")
        assert len(failure.traceback) < 10_000
    raised = bad[0]
    assert isinstance(raised, Failure) and raised.where.endswith("in misbehave")
    assert 'raise KeyError("no such key")' in raised.traceback and "calls.py" not in raised.traceback


@pytest.mark.parametrize(
    ("cls", "behaviour"),
    [
        *(("Misbehaving", behaviour) for behaviour in ("awaits for ever", "refuses to be cancelled")),
        *(("Misbehaving", behaviour) for behaviour in ("sleeps", "spins", "holds the interpreter")),
        *(("InTasks", behaviour) for behaviour in ("sleeps", "holds the interpreter")),
        *(("Sync", behaviour) for behaviour in ("sleeps", "spins", "holds the interpreter")),
    ],
)
def test_what_hangs_is_ended_at_its_limit_and_named(cls: str, behaviour: str) -> None:
    """Beside it a call that waits for something else, which is not to blame for what blocks its event loop."""
    hung, waiting, good = failures(config(behaviour, "waits", "good", cls=cls))
    assert isinstance(hung, Failure)
    assert hung.reason == f"the score took longer than env.score_timeout_s = {LIMIT_S:g} s"
    assert hung.where.startswith("misbehaving.py:")
    assert "misbehaving.py" in hung.traceback
    assert (waiting, good) == (0.5, 1.0)


def test_a_score_over_its_limit_names_the_rewards_it_waited_for() -> None:
    never = {"type": "misbehaving:never_rewards", "timeout_s": 1000, "weight": 0.5}
    rewards = [{"type": "exact_match"}, never | {"name": "slow"}, never | {"name": "slower"}]

    async def body(environment: EnvironmentProcess) -> None:
        with pytest.raises(UserCodeError) as caught:
            await environment.score(environment.train_tasks[0], "a text")
        assert caught.value.failure.reason == (
            f"the score took longer than env.score_timeout_s = {LIMIT_S:g} s; pending: slow, slower of env.rewards"
        )

    run_with(config("good", rewards=rewards), body)


@pytest.mark.parametrize("cls", ["Misbehaving", "Sync"])
def test_a_process_that_dies_is_replaced(cls: str) -> None:
    (died,) = failures(config("dies", cls=cls))
    assert died == Failure("the environment's process ended with exit code 7", fault="crash")


def test_one_of_two_that_wait_for_the_next_process_may_be_cancelled() -> None:
    async def body(environment: EnvironmentProcess) -> None:
        lost = environment._process.worker
        lost.process.kill()
        while not lost.is_lost:
            await asyncio.sleep(0.01)
        first, second = (asyncio.ensure_future(environment.score(environment.eval_tasks[0], "")) for _ in range(2))
        await asyncio.sleep(0.01)  # both wait
        assert environment._process.worker is lost
        first.cancel()
        assert await second == 1.0
        assert first.cancelled()

    run_with(config("good"), body)


ENDED = {
    "dies": "the environment's process ended with exit code 7",
    "crashes": "the environment's process ended with signal SIGSEGV",
    "holds the interpreter": f"the score took longer than env.score_timeout_s = {LIMIT_S:g} s",
}


@pytest.mark.parametrize(
    ("cls", "culprits"),
    [
        ("Misbehaving", ["dies"]),
        ("Sync", ["dies", "crashes"]),
        ("Sync", ["holds the interpreter"]),
        ("InThreads", ["crashes"]),
    ],
)
def test_of_several_that_run_only_the_culprits_are_blamed(cls: str, culprits: list[str]) -> None:
    first, *others = failures(config("waits", *culprits, *["waits"] * 5, cls=cls))
    blamed, rest = others[: len(culprits)], others[len(culprits) :]
    for failure, behaviour in zip(blamed, culprits, strict=True):
        assert isinstance(failure, Failure) and failure.reason == ENDED[behaviour]
        assert failure.where.endswith("in misbehave") or failure.fault != "time"
    assert [first, *rest] == [0.5] * 6


def test_nobody_is_blamed_for_a_process_that_is_killed_from_outside() -> None:
    async def body(environment: EnvironmentProcess) -> None:
        scoring = [asyncio.ensure_future(environment.score(task, "")) for task in environment.train_tasks]
        await asyncio.sleep(0.2)
        environment._process.worker.process.kill()
        assert await asyncio.gather(*scoring) == [0.5] * 20

    run_with(config(*["waits"] * 20), body)


def test_answers_that_lie_unread_are_not_over_their_limit() -> None:
    """More than the connection holds: the process must neither wait for the orchestrator, nor be killed for it."""

    async def body(environment: EnvironmentProcess) -> None:
        good, waits = environment.train_tasks
        scoring = [asyncio.ensure_future(environment.score(task, "")) for task in [waits] * 100 + [good] * 3000]
        worker = environment._process.worker
        await asyncio.sleep(0.2)
        time.sleep(LIMIT_S + 2)
        assert await asyncio.gather(*scoring) == [0.5] * 100 + [1.0] * 3000
        assert environment._process.worker is worker

    run_with(config("good", "waits"), body)


def test_children_of_a_hung_score_end_with_it() -> None:
    async def body(environment: EnvironmentProcess) -> None:
        scoring = asyncio.ensure_future(environment.score(environment.train_tasks[0], ""))
        while len(children := descendants(environment._process.worker.process.pid)) < 2:  # the worker, and its child
            await asyncio.sleep(0.05)
        with pytest.raises(UserCodeError, match="took longer"):
            await scoring
        deadline = time.monotonic() + 30
        while any((Path("/proc") / str(pid)).exists() for pid in children):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    run_with(config("waits for a child", cls="Sync"), body)


def test_a_call_nobody_waits_for_any_more_does_not_hold_up_the_others() -> None:
    async def body(environment: EnvironmentProcess) -> None:
        hanging = asyncio.ensure_future(environment.score(environment.train_tasks[0], ""))
        await asyncio.wait([hanging], timeout=0.5)
        hanging.cancel()
        assert await environment.score(environment.eval_tasks[0], "") == 1.0

    run_with(config("sleeps"), body)


def test_signals_to_the_whole_run_are_the_orchestrators_matter() -> None:
    async def body(environment: EnvironmentProcess) -> None:
        scoring = asyncio.ensure_future(environment.score(environment.train_tasks[0], ""))
        for number in (signal.SIGINT, signal.SIGTERM):
            environment._process.worker.process.send_signal(number)
        assert await scoring == 0.5

    run_with(config("waits"), body)


def test_nothing_that_hangs_keeps_the_end_waiting() -> None:
    async def body(environment: EnvironmentProcess) -> None:
        hanging = [asyncio.ensure_future(environment.score(task, "")) for task in environment.train_tasks]
        await asyncio.wait(hanging, timeout=0.5)
        for task in hanging:
            task.cancel()

    started = time.monotonic()
    run_with(config("sleeps", "spins", score_timeout_s=1000), body)
    assert time.monotonic() - started < 100


@contextmanager
def written_to(output: int) -> Iterator[None]:
    """What processes that are started meanwhile print."""
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in kept:
            os.dup2(output, number)
        yield
    finally:
        for number, before in kept.items():
            os.dup2(before, number)
            os.close(before)


def broken_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


OUTPUTS = {"closed pipe": broken_pipe, "full disk": lambda: os.open("/dev/full", os.O_WRONLY)}
PRINTS = {
    "environment": config("prints", score_timeout_s=60),
    "reward": config("good", rewards=[{"type": "misbehaving:prints", "timeout_s": 60}], score_timeout_s=60),
}


async def score_first(environment: EnvironmentProcess) -> None:
    await environment.score(environment.train_tasks[0], "a text")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("who", PRINTS)
def test_a_reward_that_prints_does_not_care_who_reads_it(who: str, output: str) -> None:
    descriptor = OUTPUTS[output]()
    with written_to(descriptor):
        run_with(PRINTS[who], score_first)
    os.close(descriptor)


@pytest.mark.parametrize("who", PRINTS)
def test_what_a_reward_prints_cannot_change_a_terminal(who: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_with(PRINTS[who], score_first)
    for told in capfd.readouterr():
        assert "\\x1b]0;title\\x07\\x9b2J\rxxx" in told, "it may go back in its line, as progress bars do"
        assert not {"\x1b", "\x07", "\x9b"} & set(told)


def test_a_close_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert failures(config("good", cls="ClosesBadly")) == [1.0]
    assert "close failed: LookupError: nothing to close (misbehaving.py:" in capfd.readouterr().err


def test_tasks_come_over_without_what_only_the_scorer_needs() -> None:
    async def body(environment: EnvironmentProcess) -> None:
        (task,) = environment.train_tasks
        assert (task.index, task.messages, task.answer) == (0, [{"role": "user", "content": "x"}], "good")
        assert [task.index for task in environment.eval_tasks] == [100]

    run_with(config("good"), body)


BROKEN = {
    "raises": "raise KeyError('dataset')",
    "exits": "import sys; sys.exit(1)",
    "dies": "import os; os._exit(9)",
    "hangs": "import time; time.sleep(1000)",
    "lacks all": "pass",
    "lacks tasks": "self.score = print",
}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"env\.id = 'broken:Env' cannot be created: KeyError: 'dataset' \(broken\.py:3 in __init__\)"),
        ("exits", r"cannot be created: SystemExit: 1 \(broken\.py:3 in __init__\)"),
        ("dies", r"cannot be created: its process ended with exit code 9"),
        ("hangs", r"waited 2 s for env\.id = 'broken:Env' to be made; env\.startup_timeout_s allows no more"),
        ("lacks all", r"env\.id = 'broken:Env' has neither `score` nor `rollout`; docs/environments\.md has examples"),
        ("lacks tasks", r"env\.id = 'broken:Env' has no `train_tasks`; docs/environments\.md has examples"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(f"class Env:\n    def __init__(self):\n        {BROKEN[how]}\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def body(environment: EnvironmentProcess) -> None:
        raise AssertionError

    with pytest.raises(UserError, match=message):
        run_with(EnvConfig(id="broken:Env", startup_timeout_s=2 if how == "hangs" else 600), body)


def test_an_environment_that_makes_other_tasks_each_time_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unseeded.py").write_text(
        "import os, random\n"
        "from misbehaving import Misbehaving\n"
        "class Env(Misbehaving):\n"
        "    def __init__(self):\n"
        "        super().__init__(['dies', str(random.random())])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def body(environment: EnvironmentProcess) -> None:
        with pytest.raises(UserCodeError, match="exit code 7"):
            await environment.score(environment.train_tasks[0], "")
        with pytest.raises(UserCodeError, match="cannot be created again: its tasks changed"):
            await environment.score(environment.eval_tasks[0], "")

    run_with(EnvConfig(id="unseeded:Env"), body)
