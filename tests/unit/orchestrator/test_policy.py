"""The policy follows the newest published weights."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.orchestrator.client import InferenceError
from tandem.orchestrator.policy import Policy
from tandem.transport.weights.manifest import write_manifest
from tandem.utils.run_dir import step_name

BASE = Path("models/base")


class FakeClient:
    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []

    async def update_weights(self, path: Path, version: int) -> None:
        self.loaded.append((path.name, version))

    async def load_adapter(self, path: Path, version: int) -> None:
        self.loaded.append((f"adapter {path.name}", version))


def publish(folder: Path, version: int, *, adapter: bool = False) -> None:
    path = folder / step_name(version)
    path.mkdir(parents=True)
    if adapter:
        (path / "adapter_config.json").write_text("{}")
    write_manifest(path, version)


def test_follow_takes_the_newest_and_ends_with_the_last(tmp_path: Path) -> None:
    updates: list[tuple[int, int]] = []
    client = FakeClient()

    async def on_update(old: int, new: int) -> None:
        updates.append((old, new))
        if new == 3:
            (tmp_path / step_name(9)).mkdir()  # unfinished: no manifest
            publish(tmp_path, 4)
            publish(tmp_path, 5)

    async def run() -> None:
        policy = Policy(client, BASE, tmp_path, version=0)  # pyright: ignore[reportArgumentType]
        following = asyncio.ensure_future(policy.follow(5, on_update))
        await asyncio.sleep(0.02)
        assert policy.version == 0
        for version in (1, 2, 3):
            publish(tmp_path, version)
        await asyncio.wait_for(following, 5)
        assert policy.version == 5

    asyncio.run(run())
    assert updates == [(0, 3), (3, 5)]
    assert client.loaded == [("step_000003", 3), ("step_000005", 5)]


def test_whoever_waits_for_the_next_update_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        policy = Policy(FakeClient(), BASE, tmp_path, version=0)  # pyright: ignore[reportArgumentType]
        first = policy.next_update
        await policy.load(tmp_path, 1)
        assert first.result() == 1
        assert not policy.next_update.done()
        await policy.load(tmp_path, 2)
        assert first.result() == 1 and policy.version == 2

    asyncio.run(run())


class RefusingClient(FakeClient):
    """Refuses version 1; `meanwhile` happens while it looks at it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    async def update_weights(self, path: Path, version: int) -> None:
        if version == 1:
            self.meanwhile()
            raise InferenceError("step_000001 does not match its checksum")
        await super().update_weights(path, version)


async def ignore(old: int, new: int) -> None:
    pass


def test_refused_weights_end_the_run_with_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        policy = Policy(RefusingClient(lambda: None), BASE, tmp_path, version=0)  # pyright: ignore[reportArgumentType]
        publish(tmp_path, 1)
        await policy.follow(2, ignore)

    with pytest.raises(InferenceError, match="checksum"):
        asyncio.run(run())


def test_a_refused_version_that_was_replaced_meanwhile_is_passed_over(tmp_path: Path) -> None:
    client = RefusingClient(lambda: publish(tmp_path, 2))

    async def run() -> None:
        publish(tmp_path, 1)
        await Policy(client, BASE, tmp_path, version=0).follow(2, ignore)  # pyright: ignore[reportArgumentType]

    asyncio.run(run())
    assert client.loaded == [("step_000002", 2)]


def test_adapters_are_served_over_the_model_they_belong_to(tmp_path: Path) -> None:
    client = FakeClient()

    async def on_update(old: int, new: int) -> None:
        if new < 2:
            publish(tmp_path, new + 1, adapter=True)

    async def run() -> None:
        policy = Policy(client, BASE, tmp_path, version=0)  # pyright: ignore[reportArgumentType]
        await policy.load(BASE, 0)
        publish(tmp_path, 1, adapter=True)
        await policy.follow(2, on_update)
        assert policy.version == 2

    asyncio.run(run())
    assert client.loaded == [("base", 0), ("adapter step_000001", 1), ("adapter step_000002", 2)]


def test_a_run_resumed_at_an_adapter_first_puts_its_model_below(tmp_path: Path) -> None:
    """The server may have been kept alive by a run of other weights."""
    client = FakeClient()
    publish(tmp_path, 3, adapter=True)

    async def run() -> None:
        policy = Policy(client, BASE, tmp_path, version=3)  # pyright: ignore[reportArgumentType]
        await policy.load(tmp_path / step_name(3), 3)

    asyncio.run(run())
    assert client.loaded == [("base", 0), ("adapter step_000003", 3)]
