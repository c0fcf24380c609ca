"""Prompts over samplers: none is lost, whatever their number, and whoever dies on the way."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.api.samplers import SAMPLING, FakeSampler

from tandem.api.pool import Job, NoSamplersLeft, SamplerPool
from tandem.types.rollout import Completion


async def generate_all(pool: SamplerPool, num_prompts: int) -> list[list[Completion]]:
    return await asyncio.gather(*(pool.generate([1, number], SAMPLING) for number in range(num_prompts)))


def check_echoes(answers: list[list[Completion]], num_prompts: int) -> None:
    assert [[one.token_ids for one in group] for group in answers] == [[[1, n]] * 2 for n in range(num_prompts)]


@settings(max_examples=25, deadline=None)
@given(
    num_prompts=st.integers(0, 40),
    samplers=st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(1, 4)), min_size=1, max_size=5),
)
def test_every_prompt_is_answered_once_while_one_sampler_lives(
    num_prompts: int, samplers: list[tuple[int, int | None]]
) -> None:
    async def run() -> None:
        pool = SamplerPool()
        pool.add(FakeSampler("survivor"))
        for number, (slots, dies_at) in enumerate(samplers):
            pool.add(FakeSampler(f"sampler {number}", slots, dies_at))
        check_echoes(await generate_all(pool, num_prompts), num_prompts)
        await pool.close()

    asyncio.run(run())


def test_a_slow_sampler_does_not_hold_up_a_fast_one() -> None:
    async def run() -> None:
        pool = SamplerPool()
        slow, fast = FakeSampler("slow"), FakeSampler("fast")
        slow.gate.clear()
        pool.add(slow)
        pool.add(fast)
        generating = [asyncio.ensure_future(pool.generate([1, number], SAMPLING)) for number in range(20)]
        while sum(one.done() for one in generating) + sum(slow.taken) < 20 or not slow.taken:
            await asyncio.sleep(0.001)
        assert len(slow.taken) == 1 and sum(fast.taken) == 20 - slow.taken[0] > slow.taken[0]
        slow.gate.set()
        check_echoes(await asyncio.gather(*generating), 20)
        await pool.close()

    asyncio.run(run())


def test_what_comes_back_has_the_weights_that_are_served_by_then() -> None:
    async def run() -> None:
        pool = SamplerPool()
        mortal = FakeSampler("mortal", dies_at=1, lives=1)
        pool.add(mortal)
        await pool.load(Path("weights"), 3)
        check_echoes(answers := await generate_all(pool, 5), 5)
        assert mortal.loaded == [3, 3] and {v for group in answers for one in group for v in one.versions} == {3}
        await pool.close()

    asyncio.run(run())


def test_when_the_last_one_dies_everybody_who_waits_is_told_who_it_was() -> None:
    async def run() -> None:
        pool = SamplerPool()
        pool.add(FakeSampler("the only one", dies_at=2))
        generating = [asyncio.ensure_future(pool.generate([1, number], SAMPLING)) for number in range(9)]
        outcomes = await asyncio.gather(*generating, return_exceptions=True)
        failures = [one for one in outcomes if isinstance(one, Exception)]
        assert failures and all(isinstance(one, NoSamplersLeft) and "the only one died" in str(one) for one in failures)
        with pytest.raises(NoSamplersLeft):
            await pool.generate([1], SAMPLING)
        with pytest.raises(NoSamplersLeft):
            await pool.load(Path("weights"), 1)
        await pool.close()

    asyncio.run(run())


def test_a_prompt_that_is_refused_fails_alone() -> None:
    class Refusing(FakeSampler):
        async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
            if any(job.prompt_ids == [1, 2] for job in jobs):
                raise ValueError("too long")
            return await super().sample(jobs)

    async def run() -> None:
        pool = SamplerPool()
        pool.add(Refusing("refusing", slots=8))
        generating = [asyncio.ensure_future(pool.generate([1, number], SAMPLING)) for number in range(4)]
        outcomes = await asyncio.gather(*generating, return_exceptions=True)
        assert [isinstance(one, ValueError) for one in outcomes] == [False, False, True, False]
        await pool.close()

    asyncio.run(run())
