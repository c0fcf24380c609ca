"""A judge over HTTP, and other servers that give rewards: what is asked, what is read, what is refused."""

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web
from pydantic import TypeAdapter
from tests.unit.rewards.misbehaving_server import Behaviour, Server, never, says, serving

from tandem.envs.config import EnvConfig
from tandem.envs.mixture import Mixture, costs_of
from tandem.envs.process import open_environment
from tandem.rewards.config import AnyReward, JudgeConfig
from tandem.rewards.judge import Judge, Usage, fill_in
from tandem.rewards.servers import RewardServerError
from tandem.rewards.weighted import WeightedRewards
from tandem.types.rollout import Task

TASK = Task(0, [{"role": "user", "content": "two?"}], "2")


def grading(text: str, **usage: int) -> Behaviour:
    answer = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
    return says(json.dumps(answer))


def judge(behaviour: Behaviour, times: int = 1, **options: Any) -> tuple[list[float], Judge, Server]:
    async def run() -> tuple[list[float], Judge, Server]:
        async with serving(behaviour) as (server,):
            config = JudgeConfig(type="judge", model="m", base_url=[server.url + "/v1"], retries=0, **options)
            asked = Judge(config)
            try:
                rewards = [await asked("It is {answer}.", "2", prompt="two?") for _ in range(times)]
            finally:
                await asked.close()
            return rewards, asked, server

    return asyncio.run(run())


def test_the_judge_sees_the_template_and_its_score_is_scaled() -> None:
    template = "Q: {prompt} A: {completion} R: {answer} {other}"
    (reward,), asked, server = judge(grading("Hm. Score: 3\nNo: score: 7.5"), template=template, max_tokens=9)
    assert reward == 0.75
    assert asked.usage == Usage(calls=1, prompt_tokens=0, completion_tokens=0)
    assert server.paths == ["/v1/chat/completions"]
    (body,) = server.bodies
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Q: two? A: It is {answer}. R: 2 {other}"}],
        "max_tokens": 9,
        "temperature": 0.0,
    }


def test_tokens_are_counted_and_the_same_question_is_free() -> None:
    behaviour = grading("Score: 10", prompt_tokens=1000, completion_tokens=50)
    rewards, asked, server = judge(behaviour, times=3, input_price=2.0, output_price=10.0)
    assert rewards == [1.0] * 3 and len(server.bodies) == 1
    assert asked.usage == Usage(calls=1, prompt_tokens=1000, completion_tokens=50)
    assert asked.cost == 0.0025
    _, _, server = judge(behaviour, times=3, cache_size=0)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("said", "options", "reward"),
    [
        ("Score: 0", {}, 0.0),
        ("Score: 10", {}, 1.0),
        ("Score: 2", {"lowest": 1, "highest": 5}, 0.25),
        ("Score: 1, score: 2 or Score: 7.5", {"score_pattern": r"[Ss]core: (\d+)(\.\d+)?"}, 0.7),
    ],
)
def test_the_last_score_counts_from_the_lowest_to_the_highest(said: str, options: dict, reward: float) -> None:
    assert judge(grading(said), **options)[0] == [reward]


def test_a_judge_logs_what_it_has_taken_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.rewards.judge")
    asked = Judge(JudgeConfig(type="judge", model="m", base_url=["http://x"]))
    for _ in range(2100):
        asked._count({})
    logged = [int(record.getMessage().split()[2]) for record in caplog.records]
    assert logged == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2000, 2048]


def test_what_a_judge_costs_reaches_the_metrics_of_the_run() -> None:
    reward = {"type": "judge", "name": "grade", "model": "m", "retries": 0, "input_price": 2.0, "output_price": 10.0}

    async def run() -> tuple[dict[str, float], ...]:
        async with serving(grading("Score: 10", prompt_tokens=1000, completion_tokens=50)) as (server,):
            table = {"id": "arithmetic", "args": {"num_train": 4, "num_eval": 4}, "system_prompt": "Be brief."}
            config = EnvConfig.model_validate(table | {"rewards": [reward | {"base_url": server.url}]})
            async with open_environment(config) as environment:
                before = costs_of(environment)
                for completion in ("1", "2", "2"):
                    await environment.score(environment.train_tasks[0], completion)
                return before, costs_of(environment), costs_of(Mixture({"sums": environment}))

    before, after, mixed = asyncio.run(run())
    assert before == {}
    assert after == {"reward/grade/calls": 2, "reward/grade/tokens": 2100, "reward/grade/cost": pytest.approx(0.005)}
    assert mixed == {f"sums/{name}": value for name, value in after.items()}


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (grading("I like it"), r"gave no score .*'I like it'"),
        (grading("Score: 11"), "gave the score 11, which is not between 0 and 10"),
        (grading("Score: -1"), "gave the score -1"),
        (says('{"choices": []}'), "returned an invalid response"),
        (says("nope", 500), "failed: 500: nope"),
    ],
)
def test_a_judge_that_gives_no_score_is_an_error(behaviour: Behaviour, message: str) -> None:
    with pytest.raises(RewardServerError, match=message):
        judge(behaviour)


@pytest.mark.parametrize(("temperature", "num_calls"), [(0.0, 1), (0.7, 4)])
def test_one_that_would_say_the_same_again_is_not_asked_again(
    temperature: float, num_calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is not a sick server that rests: it serves other questions."""

    async def run() -> int:
        async with serving(grading("I like it")) as (server,):
            options: dict[str, Any] = {"retries": 3, "temperature": temperature}
            asked = Judge(JudgeConfig(type="judge", model="m", base_url=[server.url], **options))
            try:
                with pytest.raises(RewardServerError, match="gave no score"):
                    await asked("It is 2.", "2", prompt="two?")
            finally:
                await asked.close()
            return len(server.bodies)

    assert asyncio.run(run()) == num_calls
    assert "resting" not in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "grade!"}, r"template has no \{completion\}"),
        ({"score_pattern": r"\d"}, "has no group"),
        ({"lowest": 1.0, "highest": 1.0}, "is not below"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JudgeConfig(type="judge", model="m", base_url=["http://x"], **options)


def test_what_is_filled_in_is_not_filled_in_again() -> None:
    assert fill_in("{prompt}{answer}", prompt="{answer}", answer="{prompt}", completion="") == "{answer}{prompt}"


def score(kind: str, behaviour: Behaviour, **options: Any) -> tuple[float, Server]:
    async def run() -> tuple[float, Server]:
        async with serving(behaviour) as (server,):
            table = {"type": kind, "base_url": server.url, "retries": 0} | options
            rewards = WeightedRewards(TypeAdapter(list[AnyReward]).validate_python([table]), 1)
            try:
                return (await rewards.score(TASK, "It is 2."))[kind], server
            finally:
                await rewards.close()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["judge", "remote"])
def test_all_attempts_together_have_as_long_as_each_of_them(kind: str) -> None:
    """Two attempts of 0.1 s, with a pause between them: the second is cut short."""
    with pytest.raises(RewardServerError, match=r"^no answer within 0\.2 s"):
        score(kind, never, timeout_s=0.1, retries=1, **({"model": "m"} if kind == "judge" else {}))


def test_a_reward_model_scores_the_whole_conversation() -> None:
    reward, server = score("reward_model", says('{"scores": [-1.5]}'))
    assert reward == -1.5
    assert server.paths == ["/score"]
    assert server.bodies == [{"messages": [[*TASK.messages, {"role": "assistant", "content": "It is 2."}]]}]
    with pytest.raises(RewardServerError, match="gave 2 scores instead of 1"):
        score("reward_model", says('{"scores": [1, 2]}'))


def test_a_server_of_ones_own() -> None:
    def answer(body: Any) -> web.StreamResponse:
        return web.json_response({"score": len(body["completion"]) + len(body["messages"]) + float(body["answer"])})

    reward, server = score("remote", answer)
    assert reward == 8 + 1 + 2 and server.paths == ["/"]
    with pytest.raises(RewardServerError, match="gave no score: the reward is None"):
        score("remote", says('{"score": null}'))
