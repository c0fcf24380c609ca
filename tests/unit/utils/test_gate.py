"""Who is let in, and when."""

import asyncio

from tandem.utils.gate import Gate


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_gate_lets_in_first_come_first_served_up_to_its_limit() -> None:
    async def run() -> None:
        gate, entered = Gate(4), []

        async def enter(name: str, count: int) -> None:
            await gate.enter(count)
            entered.append(name)

        tasks = [asyncio.ensure_future(enter(name, count)) for name, count in (("a", 3), ("b", 2), ("c", 1))]
        await settle()
        assert entered == ["a"], "c would fit, and waits behind b"
        gate.leave(3)
        await settle()
        assert entered == ["a", "b", "c"]
        assert gate.num_inside == 3
        large = asyncio.ensure_future(enter("large", 9))
        await settle()
        gate.leave(3)
        await asyncio.gather(large, *tasks)
        assert gate.num_inside == 9, "more samples than the limit enter alone"

    asyncio.run(run())


def test_who_stops_waiting_leaves_no_trace() -> None:
    async def run() -> None:
        gate = Gate(1)
        await gate.enter(1)
        waiting = [asyncio.ensure_future(gate.enter(1)) for _ in range(3)]
        await settle()
        waiting[0].cancel()  # while it waits
        await settle()
        gate.leave(1)
        waiting[1].cancel()  # when it has been let in, and has not noticed
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not waiting[2].cancelled()
        assert gate.num_inside == 1
        gate.leave(1)
        assert gate.num_inside == 0

    asyncio.run(run())


def test_a_higher_limit_lets_in_what_waits() -> None:
    async def run() -> None:
        gate = Gate(1)
        await gate.enter(1)
        waiting = asyncio.ensure_future(gate.enter(1))
        await settle()
        assert not waiting.done()
        gate.limit = 2
        await waiting

    asyncio.run(run())
