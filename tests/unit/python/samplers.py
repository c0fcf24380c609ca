"""Samplers without a model: they echo, slowly, not at all, or die."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tandem.python.pool import Job, SamplerGone
from tandem.types.rollout import Completion, SamplingRequest

SAMPLING = SamplingRequest(n=2, max_tokens=4, temperature=1.0, seed=0)


def echo(job: Job, version: int = 0) -> list[Completion]:
    """Completions that are the prompt."""
    ids = job.prompt_ids
    return [Completion(ids, [-1.0] * len(ids), [version] * len(ids), "stop") for _ in range(job.sampling.n)]


class FakeSampler:
    """Dies at its `dies_at`-th call, and comes back as often as `lives` says. `gate` holds its answers back."""

    def __init__(self, name: str, slots: int = 1, dies_at: int | None = None, lives: int = 0) -> None:
        self.name = name
        self.slots = slots
        self.dies_at = dies_at
        self.lives = lives
        self.gate = asyncio.Event()
        self.gate.set()
        self.taken: list[int] = []  # number of jobs of every call
        self.loaded: list[int] = []

    async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
        self.taken.append(len(jobs))
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.dies_at is not None and len(self.taken) >= self.dies_at:
            raise SamplerGone(f"{self.name} died")
        return [echo(job, self.loaded[-1] if self.loaded else 0) for job in jobs]

    async def load(self, path: Path, version: int) -> None:
        self.loaded.append(version)

    async def revive(self) -> bool:
        self.lives -= 1
        self.dies_at = None
        return self.lives >= 0
