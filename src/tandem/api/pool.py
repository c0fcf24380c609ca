"""Prompts over whatever samples them: engines on this machine, workers on others.

generate ─► queue ─┬─► sampler 1    each takes more when it has room: a slow one takes few, and a fast one many
             ▲     └─► sampler 2
             └────────── gone: what it had taken comes first again, for the others
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.types.rollout import Completion, SamplingRequest

logger = logging.getLogger(__name__)
GATHER_S = 0.005  # prompts of a batch arrive one by one; whoever takes many at once waits for them so long


class SamplerGone(RuntimeError):
    """It ended, or does not answer: which one, and what is known."""


class NoSamplersLeft(RuntimeError):
    """All of them are gone."""


@dataclass(frozen=True)
class Job:
    """One prompt, and where its completions are waited for."""

    prompt_ids: list[int]
    sampling: SamplingRequest
    answer: "asyncio.Future[list[Completion]]"


class Sampler(Protocol):
    """Whoever completes prompts. All but `name` and `slots` may raise SamplerGone."""

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int:
        """How many calls of `sample` it takes at a time."""
        ...

    async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
        """The completions of each job."""
        ...

    async def load(self, path: Path, version: int) -> None:
        """Serve these weights from here on."""
        ...

    async def revive(self) -> bool:
        """After it was gone: whether it is there again, with no weights of ours yet."""
        ...


class SamplerPool:
    """For one event loop. `generate` may be called for any number of prompts at once."""

    def __init__(self) -> None:
        self.samplers: list[Sampler] = []
        self._queue: deque[Job] = deque()
        self._filled = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reviving = 0
        self._weights: tuple[Path, int] | None = None
        self._last_loss: SamplerGone | None = None

    def add(self, sampler: Sampler) -> None:
        """It has the weights that are served."""
        self.samplers.append(sampler)
        for _ in range(sampler.slots):
            self._start(self._work(sampler))

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        """`sampling.n` completions of one prompt."""
        if not self.samplers and not self._reviving:
            raise self._none_left()
        job = Job(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        async with self._filled:
            self._queue.append(job)
            self._filled.notify()
        return await job.answer

    async def load(self, path: Path, version: int) -> None:
        """Returns when every sampler that is there has the weights."""
        self._weights = (path, version)
        samplers = list(self.samplers)
        results = await asyncio.gather(*(one.load(path, version) for one in samplers), return_exceptions=True)
        for sampler, result in zip(samplers, results, strict=True):
            if isinstance(result, SamplerGone):
                self._lose(sampler, result)
            elif isinstance(result, BaseException):
                raise result
        if not self.samplers and not self._reviving:
            raise self._none_left()

    async def close(self) -> None:
        """Whoever made the samplers ends them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, sampler: Sampler) -> None:
        while sampler in self.samplers:
            jobs = await self._take(sampler)
            try:
                completions = await sampler.sample(jobs)
            except SamplerGone as error:
                self._queue.extendleft(reversed(jobs))
                self._lose(sampler, error)
                await self._wake_all()
                return
            except Exception as error:  # whoever waits for the prompt learns why it cannot be completed
                for job in jobs:
                    _end(job, error)
                continue
            for job, found in zip(jobs, completions, strict=True):
                _end(job, found)

    async def _take(self, sampler: Sampler) -> list[Job]:
        """What comes next: of many prompts several at a time, of few one, so that all have something to do to the
        end."""
        async with self._filled:
            await self._filled.wait_for(lambda: self._queue)
        if sampler.slots == 1:
            await asyncio.sleep(GATHER_S)
        slots = sum(one.slots for one in self.samplers)
        count = min(max(1, len(self._queue) // (2 * max(1, slots))), len(self._queue))
        jobs = [self._queue.popleft() for _ in range(count)]
        return jobs if jobs else await self._take(sampler)

    def _lose(self, sampler: Sampler, error: SamplerGone) -> None:
        """The first who notices takes it out and tries to bring it back."""
        if sampler not in self.samplers:
            return
        self.samplers.remove(sampler)
        self._last_loss = error
        self._reviving += 1
        logger.warning("%s; %d are left", error, len(self.samplers))
        self._start(self._bring_back(sampler))

    async def _bring_back(self, sampler: Sampler) -> None:
        try:
            if await sampler.revive():
                loaded = None
                while self._weights is not None and loaded != self._weights:
                    loaded = self._weights
                    await sampler.load(*loaded)
                logger.info("%s takes part again", sampler.name)
                self.add(sampler)
        except SamplerGone as error:
            logger.warning("%s did not come back: %s", sampler.name, error)
        finally:
            self._reviving -= 1
            if not self.samplers and not self._reviving:
                while self._queue:
                    _end(self._queue.popleft(), self._none_left())

    def _none_left(self) -> NoSamplersLeft:
        return NoSamplersLeft(f"nothing is left that could complete prompts; the last loss: {self._last_loss}")

    async def _wake_all(self) -> None:
        async with self._filled:
            self._filled.notify_all()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _end(job: Job, outcome: list[Completion] | Exception) -> None:
    if job.answer.done():  # whoever waited has gone
        return
    if isinstance(outcome, Exception):
        job.answer.set_exception(outcome)
    else:
        job.answer.set_result(outcome)
