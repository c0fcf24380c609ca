"""What a reward server may answer, and what becomes of answers that are none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tandem.rewards.server_client import RewardClient, RewardServerError


@asynccontextmanager
async def answering(text: str, status: int) -> AsyncIterator[RewardClient]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_post("/score", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with RewardClient(f"http://127.0.0.1:{runner.addresses[0][1]}", retries=0) as client:
            yield client
    finally:
        await runner.cleanup()


def score(text: str, status: int = 200) -> list[float]:
    async def run() -> list[float]:
        async with answering(text, status) as client:
            return await client.score_texts(["one", "two"])

    return asyncio.run(run())


def test_scores_come_back_in_their_order() -> None:
    assert score('{"scores": [1, -0.5]}') == [1.0, -0.5]


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
