"""Sending again what failed on its way, against a server that answers as planned."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tandem.utils.files import json_bytes
from tandem.utils.http import RETRY_STATUS, HttpClient, Reply, RequestFailed, Unreachable


@asynccontextmanager
async def answering(*plan: tuple[int, str], delay_s: float = 0) -> AsyncIterator[HttpClient]:
    left = list(plan)

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(delay_s)
        status, text = left.pop(0)
        return web.Response(text=text, status=status, headers={"X-Key": request.headers.get("Authorization", "none")})

    app = web.Application()
    app.router.add_post("/do", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}/", "secret", timeout_s=60)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def post(*plan: tuple[int, str], retries: int = 2) -> tuple[Reply | str, list[str]]:
    """The reply, or why there is none, and the problems that were told on the way."""
    problems: list[str] = []

    async def send_again(reply: Reply | None, problem: str) -> bool:
        problems.append(problem)
        return reply is None or reply.status in RETRY_STATUS

    async def run() -> Reply | str:
        async with answering(*plan) as client:
            try:
                return await client.post("/do", {}, retries, send_again)
            except RequestFailed as error:
                return str(error)

    return asyncio.run(run()), problems


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    noted: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds > 0:
            noted.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return noted


def test_what_may_pass_is_sent_again_after_growing_pauses(pauses: list[float]) -> None:
    reply, problems = post((503, "starting"), (429, "full"), (200, "done"))
    assert isinstance(reply, Reply) and reply.body == b"done" and reply.headers["X-Key"] == "Bearer secret"
    assert problems == ["503: starting", "429: full", ""]
    assert pauses == [0.5, 1.0]


def test_a_request_is_given_up_after_its_retries(pauses: list[float]) -> None:
    failed, problems = post((503, "one"), (503, "two"), (200, "never asked for"), retries=1)
    assert str(failed).endswith("/do failed: 503: two") and len(problems) == 2


def test_a_refusal_is_not_sent_again_and_its_reason_is_read() -> None:
    failed, problems = post((400, '{"error": {"message": "no such field"}}'))
    assert str(failed).endswith("/do failed: 400: no such field") and len(problems) == 1


def test_no_answer_in_time_is_told_apart_from_a_refusal() -> None:
    async def run() -> None:
        async with answering((200, "late"), delay_s=60) as client:
            with pytest.raises(Unreachable, match=r"^no answer within 0\.05 s$"):
                await client.send("POST", "/do", timeout_s=0.05)

    asyncio.run(run())


def test_bodies_are_json_whatever_the_text() -> None:
    """Half of a surrogate pair comes from data files that were written carelessly."""
    assert json.loads(json_bytes({"text": "ä\ud83d", "n": 1.5})) == {"text": "ä\ud83d", "n": 1.5}
    assert json_bytes({"text": "ä"}) == '{"text":"ä"}'.encode()


def test_who_sends_nothing_needs_no_aiohttp() -> None:
    """Environments and rewards are known to every process of a run; few of them send requests."""
    probe = "import sys, tandem.launch.preflight, tandem.envs.service; sys.exit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0
