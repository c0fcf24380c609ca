"""What a reward server may answer, and what becomes of answers that are none."""

import asyncio
from typing import Any

import pytest
from tests.unit.rewards.misbehaving_server import Behaviour, Server, says, serving

from tandem.rewards.server_client import RewardClient, RewardServerError
from tandem.utils import server_pool

TALK = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "It is 2."}]


def ask(behaviour: Behaviour, method: str, question: Any, **options: Any) -> tuple[Any, Server]:
    async def run() -> tuple[Any, Server]:
        async with serving(behaviour) as (server,), RewardClient(server.url, **options) as client:
            return await getattr(client, method)(question), server

    return asyncio.run(run())


def score(text: str, status: int = 200) -> list[float]:
    return ask(says(text, status), "score_texts", ["one", "two"], retries=0)[0]


def test_scores_come_back_in_their_order() -> None:
    assert score('{"scores": [1, -0.5]}') == [1.0, -0.5]
    scores, server = ask(says('{"scores": [1, -0.5]}'), "score_all", [TALK, []])
    assert (scores, server.bodies, server.paths) == ([1.0, -0.5], [{"messages": [TALK, []]}], ["/score"])
    one, server = ask(says('{"scores": [2]}'), "score", TALK)
    assert (one, server.bodies) == (2.0, [{"messages": [TALK]}])
    texts, server = ask(says('{"scores": [3]}'), "score_texts", ["one"])
    assert (texts, server.bodies, server.paths) == ([3.0], [{"texts": ["one"]}], ["/score"])


def test_a_busy_server_is_asked_four_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_PAUSE_S", 0.001)
    answers = iter([says("", 429)] * 3 + [says('{"scores": [1]}')])
    assert ask(lambda body: next(answers)(body), "score_texts", ["one"])[0] == [1.0]


def test_much_of_an_answer_that_is_none_is_left_out() -> None:
    with pytest.raises(RewardServerError, match=r": a{200}$"):
        score("a" * 201)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ('{"error": {"message": "out of memory"}}', 500, "failed: 500: out of memory"),
        ("<html>gateway</html>", 502, "failed: 502: <html>gateway</html>"),
        ('{"scores": [1]}', 200, "gave 1 scores instead of 2"),
        ('{"scores": [1, NaN]}', 200, "did not answer with scores .*NaN"),
        ('{"scores": [1, null]}', 200, "the reward is None, not a number"),
        ('{"scores": [1, 1e308]}', 200, "the reward is 1e[+]308"),
        ('{"scores": 3}', 200, "did not answer with scores"),
        ('{"score": [1, 2]}', 200, "did not answer with scores .*KeyError"),
        ("[]", 200, "did not answer with scores"),
        ("", 200, "did not answer with scores"),
    ],
)
def test_an_answer_that_is_none_is_an_error_with_its_reason(text: str, status: int, message: str) -> None:
    with pytest.raises(RewardServerError, match=message):
        score(text, status)
