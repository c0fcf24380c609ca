"""Suspects run again before the others, few at a time."""

import asyncio

from tandem.isolation.suspects import SHARE, Suspects


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def run_again(count: int) -> tuple[Suspects, list[int], asyncio.Event, list[asyncio.Task[None]]]:
    """So many suspects that run until the event is set; the list says which have begun."""
    suspects, begun, end = Suspects(), [], asyncio.Event()

    async def one(number: int) -> None:
        async with suspects.turn():
            begun.append(number)
            await end.wait()

    for _ in range(count):
        suspects.add(count)
    tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
    await settle()
    return suspects, begun, end, tasks


def test_few_run_alone_and_many_in_parts() -> None:
    async def run() -> None:
        for count, at_once in ((2, 1), (SHARE, 1), (2 * SHARE - 1, 1), (10 * SHARE, 10)):
            suspects, begun, end, tasks = await run_again(count)
            assert len(begun) == at_once
            end.set()
            await asyncio.gather(*tasks)
            assert suspects.are_clear and begun == list(range(count))

    asyncio.run(run())


def test_when_the_culprit_is_found_the_others_run_at_once_and_the_rest_after_them() -> None:
    async def run() -> None:
        suspects, begun, end, tasks = await run_again(5)
        rest = asyncio.ensure_future(suspects.wait_until_clear())
        suspects.acquit()
        await settle()
        assert begun == [0, 1, 2, 3, 4] and not rest.done()
        end.set()
        await asyncio.gather(rest, *tasks)

    asyncio.run(run())


def test_who_is_called_off_is_no_suspect_any_more() -> None:
    async def run() -> None:
        suspects, _, _, tasks = await run_again(3)
        for task in reversed(tasks):
            assert not suspects.are_clear
            task.cancel()
            await settle()
        assert suspects.are_clear

    asyncio.run(run())
