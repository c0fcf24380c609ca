"""The policy on whatever samples from it: engines on this machine, workers on others.

generate ─► queue ─┬─► sampler 1    each takes more when it has room: a slow one takes few, and a fast one many
             ▲     └─► sampler 2
             └────────── gone: what it had taken comes first again, for the others
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tandem.orchestrator.client import InferenceError
from tandem.types.rollout import Completion, SamplingRequest

logger = logging.getLogger(__name__)
GATHER_S = 0.005  # prompts of a batch arrive one by one; whoever takes many at once waits for them so long
RETRY_S = (1.0, 5.0, 20.0)  # one that dies while it is started again is tried after so long, as often as this


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


@dataclass(eq=False)
class Member:
    """A sampler from when it joins the pool until it is lost; one that comes back is another member."""

    sampler: Sampler
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class SamplerPool:
    """For one event loop. `generate` may be called for any number of prompts at once. `opening` starts the samplers,
    with version 0 of the weights, and ends them. Once nothing can be sampled any more, `watch` raises, and nobody is
    answered: the run ends."""

    def __init__(self, opening: AbstractAsyncContextManager[Sequence[Sampler]], version: int) -> None:
        loop = asyncio.get_running_loop()
        self.version = version
        self.next_update: asyncio.Future[int] = loop.create_future()
        self._opening = opening
        self._closing = AsyncExitStack()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._members: list[Member] = []
        self._queue: deque[Job] = deque()
        self._filled = asyncio.Event()  # set while there are jobs in the queue
        self._tasks: set[asyncio.Task[None]] = set()
        self._reviving = 0
        self._num_moved = 0  # prompts that another sampler was asked for
        self._weights: tuple[Path, int] | None = None
        self._last_loss: Exception | None = None

    def __str__(self) -> str:
        return "engines and workers"

    async def wait_until_ready(self) -> None:
        for sampler in await self._closing.enter_async_context(self._opening):
            self.add(sampler)

    async def watch(self) -> None:
        await self._lost

    def metrics(self) -> dict[str, float]:
        return {"servers/present": len(self._members), "servers/requests_moved": self._num_moved}

    def add(self, sampler: Sampler) -> None:
        """It has the weights that are served."""
        member = Member(sampler)
        self._members.append(member)
        member.tasks = [self._start(self._work(member)) for _ in range(sampler.slots)]

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        """`sampling.n` completions of one prompt."""
        job = Job(prompt_ids, sampling, asyncio.get_running_loop().create_future())
        self._queue.append(job)
        self._filled.set()
        return await job.answer

    async def load(self, path: Path, version: int) -> None:
        """Returns when every sampler that is there has the weights. One that is lost meanwhile gets them when it comes
        back."""
        members: list[Member] = []
        if version:  # else they have them
            self._weights = (path, version)
            members = list(self._members)
        loading = (member.sampler.load(path, version) for member in members)
        results = await asyncio.gather(*loading, return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, SamplerGone):
                self._lose(member, result)
            elif isinstance(result, BaseException) and member in self._members:
                raise result
        self.version = version
        self.next_update.set_result(version)
        self.next_update = asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._closing.aclose()

    async def _work(self, member: Member) -> None:
        while member in self._members:
            jobs = await self._take(member.sampler)
            try:
                completions = await member.sampler.sample(jobs)
            except SamplerGone as error:
                self._put_back(jobs)
                self._lose(member, error)
                return
            except asyncio.CancelledError:  # it was lost while it had them
                self._put_back(jobs)
                raise
            except InferenceError as error:  # whoever waits for the prompt learns why it cannot be completed
                for job in jobs:
                    _end(job, error)
                continue
            except Exception as error:  # ends the run
                self._fail(error)
                return
            for job, found in zip(jobs, completions, strict=True):
                _end(job, found)

    async def _take(self, sampler: Sampler) -> list[Job]:
        """What comes next: of many prompts several at a time, of few one, so that all have something to do to the
        end."""
        while not self._queue:
            await self._filled.wait()
            if sampler.slots == 1:
                await asyncio.sleep(GATHER_S)
        slots = sum(member.sampler.slots for member in self._members)
        count = max(1, len(self._queue) // (2 * max(1, slots)))
        jobs = [self._queue.popleft() for _ in range(count)]
        if not self._queue:
            self._filled.clear()
        return jobs

    def _put_back(self, jobs: Sequence[Job]) -> None:
        self._num_moved += len(jobs)
        self._queue.extendleft(reversed(jobs))
        self._filled.set()

    def _lose(self, member: Member, error: SamplerGone) -> None:
        """The first who notices takes it out and tries to bring it back."""
        if member not in self._members:
            return
        self._members.remove(member)
        self._last_loss = error
        self._reviving += 1
        logger.warning("%s; %d are left", error, len(self._members))
        self._start(self._bring_back(member))

    async def _bring_back(self, member: Member) -> None:
        """Nothing is asked of it until it has the weights that are served by then."""
        try:
            for task in member.tasks:
                task.cancel()
            await asyncio.gather(*member.tasks, return_exceptions=True)
            if await self._revive(member.sampler):
                logger.info("%s takes part again", member.sampler.name)
                self.add(member.sampler)
        except Exception as error:  # cleans up: the others go on without it
            self._last_loss = error
            logger.warning("%s did not come back: %s", member.sampler.name, error)
        finally:
            self._reviving -= 1
            if not self._members and not self._reviving:
                last = f"the last loss: {self._last_loss}"
                self._fail(NoSamplersLeft(f"nothing is left that could complete prompts; {last}"))

    async def _revive(self, sampler: Sampler) -> bool:
        waits = iter(RETRY_S)
        while True:
            try:
                if not await sampler.revive():
                    return False
                loaded = None
                while self._weights is not None and loaded != self._weights:
                    loaded = self._weights
                    await sampler.load(*loaded)
                return True
            except SamplerGone as error:
                if (wait_s := next(waits, None)) is None:
                    raise
                logger.warning("%s; the next try is in %g s", error, wait_s)
                await asyncio.sleep(wait_s)

    def _fail(self, error: Exception) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _end(job: Job, outcome: list[Completion] | Exception) -> None:
    if job.answer.done():  # whoever waited has gone
        return
    if isinstance(outcome, Exception):
        job.answer.set_exception(outcome)
    else:
        job.answer.set_result(outcome)
