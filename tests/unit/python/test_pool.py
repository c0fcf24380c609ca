"""Prompts over samplers: none is lost, whatever their number, and whoever dies on the way."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.python.samplers import SAMPLING, FakeSampler

from tandem.orchestrator.client import InferenceError
from tandem.python import pool as pool_module
from tandem.python.pool import Job, NoSamplersLeft, SamplerGone, SamplerPool
from tandem.types.rollout import Completion


def make_pool() -> SamplerPool:
    """Without samplers yet."""
    return SamplerPool(nullcontext(()), version=0)


async def generate_all(pool: SamplerPool, num_prompts: int) -> list[list[Completion]]:
    return await asyncio.gather(*(pool.generate([1, number], SAMPLING) for number in range(num_prompts)))


def check_echoes(answers: list[list[Completion]], num_prompts: int) -> None:
    assert [[one.token_ids for one in group] for group in answers] == [[[1, n]] * 2 for n in range(num_prompts)]


@settings(max_examples=25)
@given(
    num_prompts=st.integers(0, 40),
    samplers=st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(1, 4)), min_size=1, max_size=5),
)
def test_every_prompt_is_answered_once_while_one_sampler_lives(
    num_prompts: int, samplers: list[tuple[int, int | None]]
) -> None:
    async def run() -> None:
        pool = make_pool()
        pool.add(FakeSampler("survivor"))
        for number, (slots, dies_at) in enumerate(samplers):
            pool.add(FakeSampler(f"sampler {number}", slots, dies_at))
        check_echoes(await generate_all(pool, num_prompts), num_prompts)
        await pool.close()

    asyncio.run(run())


def test_a_slow_sampler_does_not_hold_up_a_fast_one() -> None:
    async def run() -> None:
        pool = make_pool()
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
        pool = make_pool()
        mortal = FakeSampler("mortal", dies_at=1, lives=1)
        pool.add(mortal)
        await pool.load(Path("weights"), 3)
        check_echoes(answers := await generate_all(pool, 5), 5)
        assert mortal.loaded == [3, 3] and {v for group in answers for one in group for v in one.versions} == {3}
        await pool.close()

    asyncio.run(run())


def test_nothing_is_asked_of_one_that_was_lost_until_it_is_back_with_its_weights() -> None:
    class DiesOfWeights(FakeSampler):
        """Dies when it is given version 2; comes back when `may_return` is set."""

        may_return = asyncio.Event()
        is_there = True

        async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
            assert self.is_there and self.loaded == [1, 2]
            return await super().sample(jobs)

        async def load(self, path: Path, version: int) -> None:
            if version == 2 and not self.may_return.is_set():
                self.is_there = False
                raise SamplerGone(f"{self.name} died")
            await super().load(path, version)

        async def revive(self) -> bool:
            await self.may_return.wait()
            self.is_there = True
            return True

    async def run() -> None:
        pool = make_pool()
        mortal, other = DiesOfWeights("mortal", slots=3), FakeSampler("other")
        for sampler in (mortal, other):
            pool.add(sampler)
        for version in (1, 2):
            await asyncio.sleep(0)  # all wait for prompts
            await pool.load(Path("weights"), version)
        check_echoes(await generate_all(pool, 7), 7)
        assert not mortal.taken and sum(other.taken) == 7
        mortal.may_return.set()
        while not mortal.taken:
            check_echoes(await generate_all(pool, 7), 7)
        await pool.close()

    asyncio.run(run())


def test_what_one_that_dies_was_asked_at_the_same_time_goes_to_the_others() -> None:
    """Its other requests may never be answered; and who comes back has as many at a time as before."""

    class Stuck(FakeSampler):
        most = running = 0

        async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                if self.lives and len(self.taken) + 1 < self.slots:
                    self.taken.append(len(jobs))
                    await asyncio.Event().wait()
                return await super().sample(jobs)
            finally:
                self.running -= 1

    async def run() -> None:
        pool = make_pool()
        stuck = Stuck("stuck", slots=4, dies_at=4, lives=1)
        pool.add(stuck)
        check_echoes(await generate_all(pool, 40), 40)
        assert stuck.lives == 0 and stuck.most == 4
        await pool.close()

    asyncio.run(run())


def test_one_that_dies_while_it_is_started_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile(FakeSampler):
        """Its first start fails, and after the second one it dies of its weights."""

        starts = 0

        async def revive(self) -> bool:
            self.starts += 1
            if self.starts == 1:
                raise SamplerGone(f"{self.name} did not start")
            return await super().revive()

        async def load(self, path: Path, version: int) -> None:
            if self.starts == 2:
                raise SamplerGone(f"{self.name} died of its weights")
            await super().load(path, version)

    async def run() -> None:
        pool = make_pool()
        fragile = Fragile("fragile", dies_at=1, lives=9)
        pool.add(fragile)
        await pool.load(Path("weights"), 1)
        check_echoes(await generate_all(pool, 5), 5)
        assert fragile.starts == 3 and fragile.loaded == [1, 1]
        await pool.close()

    monkeypatch.setattr(pool_module, "RETRY_S", (0.0, 0.0))
    asyncio.run(run())


def test_one_that_cannot_be_brought_back_is_named() -> None:
    class Broken(FakeSampler):
        async def revive(self) -> bool:
            raise ValueError("no memory")

    async def run() -> None:
        pool = make_pool()
        pool.add(Broken("broken", dies_at=1))
        generating = asyncio.ensure_future(pool.generate([1], SAMPLING))
        with pytest.raises(NoSamplersLeft, match="no memory"):
            await pool.watch()
        assert not generating.done()
        generating.cancel()
        await pool.close()

    asyncio.run(run())


def test_when_the_last_one_dies_the_run_ends_with_who_it_was() -> None:
    async def run() -> None:
        pool = make_pool()
        pool.add(FakeSampler("the only one", dies_at=2))
        generating = [asyncio.ensure_future(pool.generate([1, number], SAMPLING)) for number in range(9)]
        with pytest.raises(NoSamplersLeft, match="the only one died"):
            await pool.watch()
        assert not all(one.done() for one in generating)
        for one in generating:
            one.cancel()
        await pool.close()

    asyncio.run(run())


def test_a_prompt_that_is_refused_fails_alone() -> None:
    class Refusing(FakeSampler):
        async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
            if any(job.prompt_ids == [1, 2] for job in jobs):
                raise InferenceError("too long")
            return await super().sample(jobs)

    async def run() -> None:
        pool = make_pool()
        pool.add(Refusing("refusing", slots=8))
        generating = [asyncio.ensure_future(pool.generate([1, number], SAMPLING)) for number in range(4)]
        outcomes = await asyncio.gather(*generating, return_exceptions=True)
        assert [isinstance(one, InferenceError) for one in outcomes] == [False, False, True, False]
        await pool.close()

    asyncio.run(run())
