"""Whose weights serve, as every answer tells it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from tandem.engine.protocol import EngineBusy
from tandem.serving.identity import Identify, Identity
from tandem.types.identity import ServerIdentity
from tandem.weights.versions import WeightUpdateRefused


def make(version: int = 3) -> Identity:
    return Identity("models/little", lambda: version)


async def load(identity: Identity, run: str | None, adapter: str | None = None) -> None:
    async with identity.change(run, adapter):
        pass


def test_every_start_is_another_instance() -> None:
    assert make().instance != make().instance


def test_an_answer_names_every_run_that_had_a_part_in_it() -> None:
    async def run() -> None:
        identity = make()
        assert identity.run is None and identity.since(identity.now()).runs == ("-",)
        await load(identity, "one")
        start = identity.now()
        await load(identity, "one")
        assert identity.since(start).runs == ("one",)
        await load(identity, "two")
        assert identity.since(start).runs == ("one", "two")
        assert identity.since(identity.now()).runs == ("two",) and identity.run == "two"
        await load(identity, None)
        assert identity.since(start).runs == ("one", "two", "-") and identity.run is None

    asyncio.run(run())


def test_a_run_that_was_displaced_cannot_come_back() -> None:
    async def run() -> None:
        identity = make()
        await load(identity, "one")
        await load(identity, "two")
        with pytest.raises(EngineBusy, match="that run 'one' loaded here have been replaced by run 'two'"):
            await load(identity, "one")
        assert identity.run == "two"
        await load(identity, None)
        with pytest.raises(EngineBusy, match="replaced by a client that named no run"):
            await load(identity, "two")
        await load(identity, "three")

    asyncio.run(run())


def test_weights_that_are_refused_change_no_owner() -> None:
    async def run() -> None:
        identity = make()
        await load(identity, "one")
        with pytest.raises(WeightUpdateRefused):
            async with identity.change("two"):
                raise WeightUpdateRefused("of another shape")
        assert identity.run == "one"
        await identity.settled()
        await load(identity, "one")

    asyncio.run(run())


def test_an_adapter_of_another_name_is_nobodys_business() -> None:
    async def run() -> None:
        identity = make()
        await load(identity, "one", adapter="tandem-policy")
        await load(identity, None, adapter="somebody's")
        assert identity.run == "one"
        await load(identity, None, adapter="tandem-policy")
        assert identity.run is None

    asyncio.run(run())


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def ask(identity: Identity, app: Callable[[Scope, Receive, Send], Awaitable[None]], method: str) -> Any:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    await Identify(app, identity)({"type": "http", "method": method}, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert headers["content-length"] == "0"
    return ServerIdentity.from_headers(headers)


def test_answers_wait_until_it_is_clear_whose_tokens_they_are() -> None:
    """Between the moment the weights are swapped and the moment the update is known to have succeeded."""

    async def run() -> None:
        identity = make()
        await load(identity, "one")
        begun = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            await answer(scope, receive, send)

        async with identity.change("two"):
            answering = asyncio.ensure_future(ask(identity, slow, "POST"))
            await begun.wait()
            await asyncio.sleep(0.01)
            assert not answering.done()
            assert (await ask(identity, answer, "GET")).runs == ("one",)  # who only looks need not wait
        assert (await answering).runs == ("one", "two")

    asyncio.run(run())


def test_a_runs_own_update_holds_nothing_up() -> None:
    async def run() -> None:
        identity = make()
        await load(identity, "one")
        async with identity.change("one"):
            told = await asyncio.wait_for(ask(identity, answer, "POST"), 5)
        assert told == ServerIdentity(identity.instance, "models/little", 3, ("one",))

    asyncio.run(run())
