"""A group is put together from what can be scored; what cannot costs its rollout."""

import asyncio
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.tasks import until_alone

from tandem.data.tokenizer import Tokenizer
from tandem.isolation.failures import Failure, UserCodeError
from tandem.orchestrator.failures import Attempt, TaskFailed
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.orchestrator.tasks import request_seed
from tandem.types.rollout import Completion, Group, SamplingOptions, SamplingRequest, Task

WAITS = "waits behind another"
OPTIONS = SamplingOptions(top_p=0.5)
PROMPT = [3, 1, 4]
TASK = Task(5, [{"role": "user", "content": "abc"}], "cba")


class FakeClient:
    """Completions of one letter each, in alphabetical order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.requests: list[dict[str, Any]] = []
        self.num_given = 0

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        self.requests.append({"prompt": prompt_ids} | vars(sampling))
        letters = [chr(ord("a") + self.num_given + index) for index in range(sampling.n)]
        self.num_given += len(letters)
        return [Completion(self.tokenizer.encode(letter), [-0.1], [3], "stop") for letter in letters]


class FakeClock:
    """Time that passes as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("tandem.orchestrator.rollouts.time", SimpleNamespace(monotonic=lambda: self.now))


class LetterRewards:
    """An environment that rewards letters as it is told to: a number, something else, or an exception."""

    train_tasks = eval_tasks = (TASK,)

    def __init__(self, rewards: dict[str, Any]) -> None:
        self.rewards = rewards
        self.num_waiting = self.num_given_up = 0

    async def score(self, task: Task, completion: str) -> float:
        if self.rewards.get(completion) is WAITS:
            self.num_waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.num_waiting -= 1
                self.num_given_up += 1
        reward = self.rewards.get(completion, 1.0)
        if isinstance(reward, BaseException):
            raise reward
        return reward


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def make(
    tokenizer: Tokenizer, rewards: dict[str, Any], tries: int = 3
) -> tuple[Group | None, FakeClient, list[Attempt]]:
    client, attempts = FakeClient(tokenizer), []
    maker = RolloutMaker(
        client,
        LetterRewards(rewards),
        tokenizer,
        tries=tries,
        record=attempts.append,
        delays_s=(0.0,),
    )
    try:
        group = asyncio.run(
            maker.make_group(
                TASK, array("I", PROMPT), 9, SamplingRequest(3, 8, temperature=0.7, seed=11, options=OPTIONS)
            )
        )
    except TaskFailed:
        group = None
    return group, client, attempts


def test_a_group_in_which_all_goes_well(tokenizer: Tokenizer) -> None:
    group, client, attempts = make(tokenizer, {"a": 0.25, "c": 0})
    assert group is not None and (group.task, group.group_id, group.rewards) == (TASK, 9, [0.25, 1.0, 0.0])
    assert [rollout.text for rollout in group.rollouts] == ["a", "b", "c"]
    assert [rollout.prompt_ids for rollout in group.rollouts] == [PROMPT] * 3
    (request,) = client.requests
    assert request == {"prompt": PROMPT} | vars(SamplingRequest(3, 8, temperature=0.7, seed=11, options=OPTIONS))
    assert attempts == [Attempt(TASK, 9, 0, 3, [])]
    assert group.generate_s > 0 and group.score_s > 0


@pytest.mark.parametrize("bad", [KeyError("x"), float("nan"), None, "text", 1e308])
def test_a_rollout_without_a_reward_is_replaced_by_another_sample(tokenizer: Tokenizer, bad: Any) -> None:
    group, client, attempts = make(tokenizer, {"b": bad, "d": bad})
    assert group is not None and [rollout.text for rollout in group.rollouts] == ["a", "c", "e"]
    assert [(request["n"], request["seed"]) for request in client.requests] == [
        (3, 11),
        (1, request_seed(11, "attempt", 1)),
        (1, request_seed(11, "attempt", 2)),
    ]
    assert [[one.completion for one in attempt.failed] for attempt in attempts] == [["b"], ["d"], []]


def test_a_task_whose_rollouts_keep_failing_has_failed(tokenizer: Tokenizer) -> None:
    group, client, attempts = make(tokenizer, {letter: KeyError(letter) for letter in "abcdefghi"}, tries=2)
    assert group is None
    assert [request["n"] for request in client.requests] == [3, 3]
    assert [attempt.number for attempt in attempts] == [0, 1]


def test_a_group_made_anew_goes_on_with_the_attempts_that_it_has_left(tokenizer: Tokenizer) -> None:
    client, attempts = FakeClient(tokenizer), list[Attempt]()
    rewards = LetterRewards({letter: KeyError(letter) for letter in "abcdefghijkl"})
    maker = RolloutMaker(client, rewards, tokenizer, tries=3, record=attempts.append, delays_s=(60.0, 0.0))
    request = SamplingRequest(3, 8, temperature=0.7, seed=11, options=OPTIONS)

    async def called_off_once() -> None:
        first = asyncio.ensure_future(maker.make_group(TASK, PROMPT, 9, request))
        while not attempts:
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(TaskFailed):
            await maker.make_group(TASK, PROMPT, 9, request)
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(called_off_once())
    assert [attempt.number for attempt in attempts] == [0, 1, 2]
    assert [one["seed"] for one in client.requests] == [11, *(request_seed(11, "attempt", number) for number in (1, 2))]
    assert not maker._spent


def test_a_group_that_is_there_leaves_no_count_of_its_attempts(tokenizer: Tokenizer) -> None:
    rewards = LetterRewards({"b": KeyError("b")})
    maker = RolloutMaker(FakeClient(tokenizer), rewards, tokenizer, tries=3, record=lambda _: None, delays_s=(0.0,))
    request = SamplingRequest(3, 8, temperature=0.7, seed=11, options=OPTIONS)
    group = asyncio.run(maker.make_group(TASK, PROMPT, 9, request))
    assert [rollout.text for rollout in group.rollouts] == ["a", "c", "d"] and not maker._spent


def test_a_rollout_that_hangs_takes_along_those_that_wait_behind_it(tokenizer: Tokenizer) -> None:
    """b hangs, and c is not scored by then: both are lost, and sampled again."""
    hung = UserCodeError(Failure("took too long", fault="time"))
    group, client, attempts = make(tokenizer, {"b": hung, "c": WAITS})
    assert group is not None and [rollout.text for rollout in group.rollouts] == ["a", "d", "e"]
    assert [request["n"] for request in client.requests] == [3, 2]
    assert [[one.completion for one in attempt.failed] for attempt in attempts] == [["b", "b"], []]


def test_a_rollout_that_hangs_takes_along_those_before_it_too(tokenizer: Tokenizer) -> None:
    hung = UserCodeError(Failure("took too long", fault="time"))
    group, _, attempts = make(tokenizer, {"a": WAITS, "c": hung})
    assert group is not None and [rollout.text for rollout in group.rollouts] == ["b", "d", "e"]
    assert [len(attempt.failed) for attempt in attempts] == [2, 0]


def test_times_count_all_attempts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of eight seconds each, and four scores of one second each."""
    clock = FakeClock(monkeypatch)

    class SlowClient(FakeClient):
        async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
            clock.now += 8
            return await super().generate(prompt_ids, sampling)

    class SlowRewards(LetterRewards):
        async def score(self, task: Task, completion: str) -> float:
            clock.now += 1
            return await super().score(task, completion)

    rewards = SlowRewards({"b": KeyError("b")})
    maker = RolloutMaker(SlowClient(tokenizer), rewards, tokenizer, tries=2, record=lambda _: None, delays_s=(0.0,))
    group = asyncio.run(maker.make_group(TASK, PROMPT, 9, SamplingRequest(3, 8, temperature=1.0, seed=1)))
    assert (group.generate_s, group.score_s) == (16, 4)


def test_the_delays_before_attempts_grow_and_the_last_is_repeated(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attempt also lets others have a turn of the event loop, which is a sleep of nothing."""
    sleep, slept = asyncio.sleep, list[float]()

    async def pass_at_once(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pass_at_once)
    rewards = LetterRewards({chr(letter): KeyError() for letter in range(ord("a"), ord("z"))})
    maker = RolloutMaker(FakeClient(tokenizer), rewards, tokenizer, tries=5, record=lambda _: None)
    with pytest.raises(TaskFailed):
        asyncio.run(maker.make_group(TASK, PROMPT, 9, SamplingRequest(3, 8, temperature=1.0, seed=1)))
    assert slept == [0, 1.0, 0, 4.0, 0, 15.0, 0, 15.0, 0]


def test_rewards_by_name_are_kept_and_their_sum_counts(tokenizer: Tokenizer) -> None:
    group, _, _ = make(tokenizer, {"a": {"right": 0.5, "short": 0.25}})
    assert group is not None and group.rewards == [0.75, 1.0, 1.0]
    assert [rollout.rewards for rollout in group.rollouts] == [{"right": 0.5, "short": 0.25}, {}, {}]


def test_a_completion_ends_before_the_text_that_stopped_it(tokenizer: Tokenizer) -> None:
    class StoppedClient(FakeClient):
        async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
            token_ids = self.tokenizer.encode("ab.c")
            return [Completion(token_ids, [-0.1] * len(token_ids), [3] * len(token_ids), "stop", stop="b.")]

    rewards = LetterRewards({"a": 0.25})
    maker = RolloutMaker(StoppedClient(tokenizer), rewards, tokenizer, tries=1, record=lambda _: None)
    group = asyncio.run(maker.make_group(TASK, PROMPT, 9, SamplingRequest(1, 8, temperature=1.0, seed=1)))
    assert [(rollout.text, rollout.reward) for rollout in group.rollouts] == [("a", 0.25)]


def test_nothing_is_scored_any_more_once_a_group_is_called_off(tokenizer: Tokenizer) -> None:
    """What a score waits for costs memory, a worker, or money; of a group that hangs, and of one that is too stale."""
    rewards = LetterRewards({"b": UserCodeError(Failure("took too long", fault="time")), "c": WAITS, "d": WAITS})

    async def called_off() -> None:
        client, request = FakeClient(tokenizer), SamplingRequest(3, 8, temperature=1.0, seed=1)
        maker = RolloutMaker(client, rewards, tokenizer, tries=2, record=attempts.append, delays_s=(0.0,))
        making = asyncio.ensure_future(maker.make_group(TASK, PROMPT, 9, request))
        while rewards.num_waiting + rewards.num_given_up < 2:
            await asyncio.sleep(0)
        assert (len(attempts), rewards.num_given_up, rewards.num_waiting) == (1, 1, 1), "c with b; d waits"
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await until_alone()
        assert rewards.num_given_up == 2

    attempts: list[Attempt] = []
    asyncio.run(called_off())
