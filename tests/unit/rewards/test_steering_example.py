"""The tasks of examples/steering: each tells its target, and a text at the target gets more than others."""

import asyncio
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter
from tests.unit.rewards.misbehaving_server import serving

from tandem.config.goals import GoalConfig
from tandem.rewards.config import AnyReward
from tandem.rewards.weighted import WeightedRewards
from tandem.serving.rewards.goals import GoalSpace, make_goals

GOALS = GoalSpace(
    make_goals(
        [
            GoalConfig(type="length", lowest=0, highest=120),
            GoalConfig(type="reading_difficulty", lowest=0, highest=16),
            GoalConfig(type="lexical_diversity"),
        ]
    )
)
TABLE = {"type": "steering", "goals": ["length", "reading_difficulty", "lexical_diversity"], "side_effects": 0.25}


def measuring(body: Any) -> web.StreamResponse:
    vectors = GOALS.place_all(body["texts"])
    return web.json_response(GOALS.by_goal(vectors, normalize=body["normalize"]))


def test_tasks_tell_their_targets(load_script: Callable[[str], ModuleType]) -> None:
    rewrites = load_script("steering/rewrites")
    environment, again = rewrites.Rewrites(num_train=40, num_eval=8), rewrites.Rewrites(num_train=40, num_eval=8)
    assert environment.train_tasks == again.train_tasks
    assert len({task.messages[0]["content"] for task in environment.train_tasks}) == 40
    for task in environment.eval_tasks:
        target = task.info["target"]
        assert json.loads(task.answer) == target
        assert f"about {round(120 * target['length'])} words" in task.messages[0]["content"]
        assert task.info["source"] in task.messages[0]["content"]


def test_a_text_at_the_target_gets_most(load_script: Callable[[str], ModuleType]) -> None:
    task = load_script("steering/rewrites").Rewrites().eval_tasks[0]
    num_words = round(120 * task.info["target"]["length"])
    sentence = "The old lamp turns all night and warns the ships of hidden rocks below."
    near = " ".join((sentence.split() * 10)[:num_words])

    async def rewards() -> list[float]:
        async with serving(measuring) as (server,):
            tables = [TABLE | {"base_url": server.url}]
            weighted = WeightedRewards(TypeAdapter(list[AnyReward]).validate_python(tables), 1)
            try:
                return [(await weighted.score(task, text))["steering"] for text in (near, "No.", "word " * 400)]
            finally:
                await weighted.close()

    near_reward, short, long = asyncio.run(rewards())
    assert 0 >= near_reward > max(short, long)
