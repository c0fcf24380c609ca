"""One run holds the server at a time, for as long as it is heard of."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tandem.engine.protocol import EngineBusy
from tandem.serving import lease as lease_module
from tandem.serving.identity import Identity
from tandem.serving.lease import Lease
from tandem.types.openai import ClaimRequest

ONE = ClaimRequest(run="one-1", lease="1" * 16, place="/runs/one on gpu1")
ONE_AGAIN = ONE.model_copy(update={"run": "one-2"})
TWO = ClaimRequest(run="two-1", lease="2" * 16, place="")


class Clock:
    """Seconds pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def use(body: Callable[[Lease, Clock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = Clock()
        async with asyncio.timeout(60):
            await body(Lease("now", clock), clock)

    asyncio.run(run())


def refused(lease: Lease, run: str | None) -> bool:
    try:
        lease.refuse_others(run)
    except EngineBusy:
        return True
    return False


async def begin(work: Awaitable[None]) -> "asyncio.Future[None]":
    started = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return started


def test_a_newcomer_is_refused_as_soon_as_the_holder_is_heard_of() -> None:
    async def body(lease: Lease, clock: Clock) -> None:
        await lease.claim(ONE)
        clock.now += 59
        coming = await begin(lease.claim(TWO))
        await asyncio.sleep(0.01)
        assert not coming.done()
        await lease.claim(ONE)
        with pytest.raises(EngineBusy, match=r"^run 'one-1' \(/runs/one on gpu1\) uses this server for its training; "):
            await coming
        clock.now += 59
        assert refused(lease, "two-1") and refused(lease, None) and not refused(lease, "one-1")

    use(body)


def test_the_next_start_of_the_same_run_has_it_at_once() -> None:
    async def body(lease: Lease, clock: Clock) -> None:
        await lease.claim(ONE)
        await lease.claim(ONE_AGAIN)
        assert refused(lease, "one-1") and not refused(lease, "one-2")

    use(body)


def test_a_server_that_is_given_back_is_free_for_who_waits() -> None:
    async def body(lease: Lease, clock: Clock) -> None:
        await lease.claim(ONE)
        coming = await begin(lease.claim(TWO))
        lease.release(TWO.lease)  # which is not the holder's
        await asyncio.sleep(0)
        assert not coming.done()
        lease.release(ONE.lease)
        await coming
        assert refused(lease, "one-1") and not refused(lease, "two-1")

    use(body)


def test_a_run_that_is_not_heard_of_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(lease: Lease, clock: Clock) -> None:
        await lease.claim(ONE)
        clock.now += 60
        assert not refused(lease, "two-1")
        await lease.claim(TWO)
        assert refused(lease, "one-1")

    use(body)
    monkeypatch.setattr(lease_module, "LEASE_S", 0.05)

    async def wait() -> None:
        lease = Lease("now")
        await lease.claim(ONE)
        await lease.claim(TWO)  # waits until it is clear
        assert refused(lease, "one-1")

    asyncio.run(asyncio.wait_for(wait(), 60))


def test_a_run_gets_back_a_server_that_was_started_again_from_a_newcomer_that_was_faster() -> None:
    held_before, holds_now = {"instance": "before"}, {"instance": "now"}

    async def body(lease: Lease, clock: Clock) -> None:
        await lease.claim(TWO)
        await lease.claim(TWO.model_copy(update=holds_now))
        await lease.claim(ONE.model_copy(update=held_before))
        assert refused(lease, "two-1") and not refused(lease, "one-1")
        coming = await begin(lease.claim(TWO.model_copy(update=holds_now)))
        await lease.claim(ONE.model_copy(update=holds_now))
        with pytest.raises(EngineBusy, match="run 'one-1'"):
            await coming

    use(body)


@pytest.mark.parametrize(
    ("held_by_one", "held_by_two", "age_s"),
    [(None, "now", 0), ("now", "now", 0), ("before", "before", 0), ("before", "now", 60)],
)
def test_who_holds_a_server_rightly_keeps_it(held_by_one: str | None, held_by_two: str, age_s: int) -> None:
    """The other never held it, both held it before, or it was started too long ago."""

    async def body(lease: Lease, clock: Clock) -> None:
        clock.now += age_s
        holding = TWO.model_copy(update={"instance": held_by_two})
        await lease.claim(holding)
        coming = await begin(lease.claim(ONE.model_copy(update={"instance": held_by_one})))
        await lease.claim(holding)
        with pytest.raises(EngineBusy, match="run 'two-1'"):
            await coming

    use(body)


def test_of_two_who_wait_one_gets_it() -> None:
    async def body(lease: Lease, clock: Clock) -> None:
        await lease.claim(ONE)
        three = TWO.model_copy(update={"run": "three-1", "lease": "3" * 16})
        coming = [await begin(lease.claim(asked)) for asked in (TWO, three)]
        lease.release(ONE.lease)
        await coming[0]
        with pytest.raises(EngineBusy, match="run 'two-1' uses"):
            await coming[1]

    use(body)


def test_who_only_asks_takes_nothing() -> None:
    async def body(lease: Lease, clock: Clock) -> None:
        await lease.claim(TWO.model_copy(update={"check_only": True}))
        await lease.claim(ONE)
        await lease.claim(ONE_AGAIN.model_copy(update={"check_only": True}))
        assert not refused(lease, "one-1")
        asking = await begin(lease.claim(TWO.model_copy(update={"check_only": True})))
        await lease.claim(ONE)
        with pytest.raises(EngineBusy):
            await asking

    use(body)


def test_weights_and_adapters_of_others_are_refused_while_a_run_holds_the_server() -> None:
    async def load(identity: Identity, run: str | None, adapter: str | None = None) -> None:
        async with identity.change(run, adapter):
            pass

    async def body() -> None:
        identity = Identity("models/little", lambda: 0)
        await load(identity, "somebody")
        await identity.lease.claim(ONE)
        await load(identity, "one-1")
        await load(identity, "one-1", adapter="tandem-policy")
        for run, adapter in (("two-1", None), (None, None), ("two-1", "theirs"), (None, "tandem-policy")):
            with pytest.raises(EngineBusy, match="run 'one-1'"):
                await load(identity, run, adapter)
        assert identity.run == "one-1"
        await load(identity, None, adapter="somebody's")  # beside it
        identity.lease.release(ONE.lease)
        await load(identity, "two-1")

    asyncio.run(body())
