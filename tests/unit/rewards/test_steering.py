"""Goal space seen from the client: chunks, bad answers, and the errors of a step by hand."""

import asyncio
import gc
import math
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.unit.rewards.misbehaving_server import Behaviour, Server, never, says, serving

from tandem.rewards import goal_client
from tandem.rewards.config import AnyReward, SteeringConfig
from tandem.rewards.goal_client import GoalClient
from tandem.rewards.servers import RewardServerError, Servers
from tandem.rewards.steering import SteeringErrors, draw_target, steering_errors
from tandem.rewards.weighted import WeightedRewards
from tandem.types.rollout import Task
from tandem.utils import server_pool

GOALS = ["words", "letters"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_PAUSE_S", 0.01)


def measuring(body: Any) -> web.StreamResponse:
    texts = body["texts"]
    return web.json_response(
        {"words": [len(text.split()) / 10 for text in texts], "letters": [len(text) / 100 for text in texts], "x": []}
    )


def place_all(behaviour: Behaviour, texts: list[str], **options: Any) -> tuple[list[tuple[float, ...]], Server]:
    async def run() -> tuple[list[tuple[float, ...]], Server]:
        async with serving(behaviour) as (server,):
            sizes = {"chunk_size": 64, "cache_size": 100} | options
            client = GoalClient(Servers([server.url], retries=0), GOALS, **sizes)
            try:
                return await client.place_all(texts), server
            finally:
                await client.close()

    return asyncio.run(run())


def test_texts_travel_in_chunks_each_once() -> None:
    texts = [f"text {number % 20}" for number in range(50)]
    vectors, server = place_all(measuring, texts, chunk_size=8)
    assert vectors == [(0.2, len(text) / 100) for text in texts]
    assert sorted(len(body["texts"]) for body in server.bodies) == [4, 8, 8]
    assert all(body["normalize"] is True for body in server.bodies)


def test_a_chunk_that_is_full_is_sent_at_once_and_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goal_client, "LINGER_S", 0.02)

    async def run() -> list[list[str]]:
        async with serving(measuring) as (server,):
            client = GoalClient(Servers([server.url]), GOALS, chunk_size=2, cache_size=9)
            await client.place_all(["a", "b"])
            late = asyncio.ensure_future(client.place("c"))
            await asyncio.sleep(0.01)
            await client.place("d")  # which fills the chunk
            assert await late == (0.1, 0.01)
            await asyncio.sleep(0.03)
            assert not client._sending
            await client.close()
            return [body["texts"] for body in server.bodies]

    assert asyncio.run(run()) == [["a", "b"], ["c", "d"]]


def test_who_gives_up_costs_no_other_text_of_its_chunk() -> None:
    async def run(behaviour: Behaviour) -> Any:
        async with serving(behaviour) as (server,):
            client = GoalClient(Servers([server.url], retries=0), GOALS, chunk_size=2, cache_size=0)
            gone, stays = (asyncio.ensure_future(client.place(text)) for text in ("a", "b"))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait([gone, stays])
            await client.close()
            return stays.exception() or stays.result()

    assert asyncio.run(run(measuring)) == (0.1, 0.01)
    assert isinstance(asyncio.run(run(says("", 500))), RewardServerError)


def test_closing_ends_what_still_waits() -> None:
    async def run() -> None:
        async with serving(never) as (server,):
            client = GoalClient(Servers([server.url]), GOALS, chunk_size=1, cache_size=9)
            asked = asyncio.ensure_future(client.place("a"))
            while not server.now:
                await asyncio.sleep(0.001)
            await client.close()
            await asyncio.wait([asked], timeout=5)
            assert asked.cancelled()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"words": [1, 2]}', "knows no goal 'letters'; it has words"),
        ('{"words": [1], "letters": [1, 2]}', "gave 1 values of 'words' for 2 texts"),
        ('{"words": [1, NaN], "letters": [1, 2]}', "returned an invalid response"),
        ('{"words": [1, null], "letters": [1, 2]}', "gave no value of 'words': the reward is None"),
        ('{"words": [1, "2"], "letters": [1, 2]}', "gave no value of 'words': the reward is '2'"),
        ('{"words": 3, "letters": [1, 2]}', "returned an invalid response"),
        ("[]", "knows no goal 'words'; it has none"),
    ],
)
def test_what_is_no_place_is_an_error(answer: str, message: str) -> None:
    with pytest.raises(RewardServerError, match=message):
        place_all(says(answer), ["a", "b"])


def test_errors_are_not_remembered(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> tuple[float, ...]:
        async with serving(says("", 500)) as (server,):
            client = GoalClient(Servers([server.url], retries=0), GOALS, chunk_size=2, cache_size=1)
            with pytest.raises(RewardServerError, match="failed: 500"):
                await client.place("a b")
            gc.collect()
            assert not caplog.records  # such as "Task exception was never retrieved"
            server.behave = measuring
            try:
                return await client.place("a b")
            finally:
                await client.close()

    assert asyncio.run(run()) == (0.2, 0.03)


def test_steering_errors_by_hand() -> None:
    # From (0, 0) to (1, 0), reached (0.7, 0.4): 0.3 short, 0.4 aside.
    errors = steering_errors((0, 0), (1, 0), (0.7, 0.4), (1, 1), 0.0)
    assert (errors.distance, errors.miscalibration, errors.side_effects) == pytest.approx((0.5, 0.3, 0.4))
    weighted = steering_errors((0, 0), (1, 0), (0.7, 0.4), (1, 0.25), 0.0)
    assert weighted.side_effects == pytest.approx(0.2)
    near = steering_errors((0, 0), (1, 0), (0.7, 0.4), (1, 1), 0.35)
    assert (near.distance, near.miscalibration, near.side_effects) == pytest.approx((0.4, 0.0, 0.4))
    just_near = steering_errors((0, 0), (1, 0), (0.5, 0.75), (1, 1), 0.5)
    assert (just_near.distance, just_near.miscalibration, just_near.side_effects) == (0.75, 0.0, 0.75)
    assert steering_errors((0, 0), (1, 0), (1.25, 0), (1, 1), 0.0) == SteeringErrors(0.25, 0.25, 0.0)
    stay = steering_errors((0.5, 0.5), (0.5, 0.5), (0.5, 0.9), (1, 1), 0.0)
    assert (stay.distance, stay.miscalibration, stay.side_effects) == pytest.approx((0.4, 0.0, 0.4))


point = st.tuples(*[st.floats(0, 1, width=32)] * 3)


@settings(max_examples=100)
@given(point, point, point)
def test_the_two_parts_make_up_the_distance(start: Any, target: Any, reached: Any) -> None:
    errors = steering_errors(start, target, reached, (1, 1, 1), 0.0)
    assert errors.distance == pytest.approx(math.dist(target, reached), abs=1e-9)
    assert math.hypot(errors.miscalibration, errors.side_effects) == pytest.approx(errors.distance, abs=1e-7)


def test_targets_are_drawn_by_prompt() -> None:
    ranges = {"words": (0.2, 0.4), "letters": 0.5}
    drawn = [draw_target(ranges, f"prompt {number}") for number in range(50)]
    assert all(0.2 <= target["words"] <= 0.4 and target["letters"] == 0.5 for target in drawn)
    assert len({target["words"] for target in drawn}) == 50
    assert draw_target(ranges, "prompt 7") == drawn[7]
    assert draw_target(ranges, "prompt 7", seed=1) != drawn[7]


def score(completion: str, info: dict[str, Any], **options: Any) -> float:
    async def run() -> float:
        async with serving(measuring) as (server,):
            table = {"type": "steering", "base_url": server.url, "goals": GOALS, "retries": 0, **options}
            rewards = WeightedRewards(TypeAdapter(list[AnyReward]).validate_python([table]), 1)
            try:
                task = Task(0, [{"role": "user", "content": "aaaaaaaaaa"}], "", info=info)
                return (await rewards.score(task, completion))["steering"]
            finally:
                await rewards.close()

    return asyncio.run(run())


def test_the_reward_is_minus_the_errors() -> None:
    # The prompt lies at (0.1, 0.1), "bb cccc" at (0.2, 0.07).
    assert score("bb cccc", {}, targets={"words": 0.5, "letters": 0.47}) == pytest.approx(-0.5)
    # Letters have no target: they are to stay at 0.1.
    assert score("bb cccc", {}, targets={"words": 0.5}) == pytest.approx(-math.hypot(0.3, 0.03))
    only = {"distance": 0.0, "side_effects": 2.0}
    assert score("bb cccc", {}, targets={"words": 0.5}, **only) == pytest.approx(-0.06)
    assert score("bb cccc", {}, targets={"words": 0.5}, distance=0.0, miscalibration=1.0) == pytest.approx(-0.3)
    assert score("bb cccc", {"target": {"words": 0.2}, "source": "ee fffff"}) == pytest.approx(-0.01)
    assert score("bb cccc", {"target": {"words": 0.2}, "source": "ee fffff"}, threshold=0.02) == 0.0
    # A source and a target may be numbers, and written as text.
    assert score("bb cccc", {"target": {"words": "0.2"}, "source": 12}) == pytest.approx(-0.05)


def test_a_task_without_a_target_or_with_a_wrong_one() -> None:
    with pytest.raises(ValueError, match="there is no target"):
        score("a", {})
    with pytest.raises(ValueError, match="the task's target has 'taste'"):
        score("a", {"target": {"taste": 1}})
    with pytest.raises(ValueError, match="the task's target has 'words' = True, which is not a number"):
        score("a", {"target": {"words": True}})


def test_one_goal_as_a_reward() -> None:
    async def run() -> dict[str, float]:
        async with serving(measuring) as (server,):
            table = {"type": "goal", "goal": "words", "base_url": [server.url], "name": "brevity", "weight": -1}
            rewards = WeightedRewards(TypeAdapter(list[AnyReward]).validate_python([table]), 1)
            try:
                return await rewards.score(Task(0, [], ""), "a b c")
            finally:
                await rewards.close()

    assert asyncio.run(run()) == {"brevity": pytest.approx(-0.3)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": {"taste": 0.5}}, "targets has 'taste', which is not among goals"),
        ({"targets": {"words": 1.5}}, "is not between 0 and 1"),
        ({"targets": {"words": (0.5, 0.2)}}, "its ends are reversed"),
        ({"goal_weights": {"words": 0.0}}, "is not above 0"),
        ({"distance": 0.0}, "are all 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SteeringConfig(type="steering", base_url=["http://x"], goals=GOALS, **options)
