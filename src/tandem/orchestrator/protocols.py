"""What the parts of the orchestrator ask of each other and of the server: no more than they need, so that each can be
tested on its own."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tandem.orchestrator.concurrency import EngineLoad
from tandem.types.rollout import Completion, Group, SamplingRequest, Task, TrainBatch
from tandem.utils.waiting import Deadline


class Generator(Protocol):
    """Whoever completes prompts: the policy, and the server behind it."""

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        """`sampling.n` completions of one prompt."""
        ...


class PolicyServer(Generator, Protocol):
    """What the policy asks of the server: it is met, given weights and then adopted, and asked from then on."""

    @property
    def instance(self) -> str | None:
        """The one that serves the weights of this run; None: none yet, or it went away."""
        ...

    @property
    def base_url(self) -> str: ...

    on_trouble: Callable[[], None]
    """Called whenever the server is found not to be well."""

    async def is_well(self) -> bool: ...

    async def read_load(self) -> EngineLoad | None:
        """None where the server does not tell."""
        ...

    async def meet(self) -> None: ...

    def adopt(self) -> None: ...

    async def update_weights(self, path: Path, version: int) -> None: ...

    async def load_adapter(self, path: Path, version: int) -> None: ...


class Server(PolicyServer, Protocol):
    """What the loop asks of it besides."""

    async def wait_until_ready(self) -> None: ...

    async def check_access(self, folder: Path) -> None:
        """Hold it from here on. Raises UserError unless it takes our key, weights from below this folder, and no other
        run holds it."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether it was asked for something that has not come."""
        ...

    async def release(self) -> None:
        """Give it back: another run may have it."""
        ...

    async def close(self) -> None: ...


class ServedVersion(Protocol):
    """What the loop and its dispatcher know of the policy."""

    @property
    def version(self) -> int: ...

    @property
    def next_update(self) -> asyncio.Future[int]:
        """Done when another version is served, and then replaced by a new one."""
        ...


class ServedWeights(ServedVersion, Protocol):
    """What is given new versions."""

    async def load(self, path: Path, version: int) -> None:
        """Returns when this version is served. Raises InferenceError where it is refused."""
        ...


class ServedPolicy(Generator, ServedWeights, Protocol):
    """The policy, on whatever serves it: HTTP servers, or objects of the Python API. As text, where that is."""

    async def wait_until_ready(self) -> None:
        """Until something is there that can be given weights."""
        ...

    async def watch(self) -> None:
        """Raises as soon as nothing can generate any more. Run this as a task."""
        ...

    def metrics(self) -> dict[str, float]: ...


class Trainer(Protocol):
    """Whoever turns batches into versions of the weights: another process, or an object of the Python API."""

    async def watch(self) -> None:
        """Raises as soon as training cannot go on, where it is ours to notice. Run this as a task."""
        ...

    def stage(self, batch: TrainBatch) -> None:
        """Take a batch, in a thread; it is not trained on yet."""
        ...

    async def publish(self, step: int) -> None:
        """The staged batch may be trained on."""
        ...

    def remove_trained(self, version: int) -> None:
        """Batches that this version has been trained on are not needed any more."""
        ...

    def weights(self, version: int) -> Path: ...

    async def wait_for_whole(self, version: int, deadline: Deadline) -> None:
        """Until the weights of a version that a run is resumed from are there, undamaged."""
        ...

    async def next_version(self, served: int) -> int:
        """The newest version, as soon as it is newer than the one served."""
        ...

    def is_replaced(self, version: int) -> bool:
        """Whether there is a newer one: what is older may be gone."""
        ...


class GroupMaker(Protocol):
    """Whoever turns a task into a group."""

    async def make_group(self, task: Task, prompt: Sequence[int], group_id: int, sampling: SamplingRequest) -> Group:
        """`sampling.n` rollouts with rewards; TaskFailed where they do not come together."""
        ...
