"""The policy follows the newest published weights."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.orchestrator.client import InferenceError
from tandem.orchestrator.policy import Policy
from tandem.transport.weights.manifest import write_manifest
from tandem.utils.run_dir import step_name


class FakeClient:
    def __init__(self) -> None:
        self.loaded: list[tuple[str, int]] = []

    async def update_weights(self, path: Path, version: int) -> None:
        self.loaded.append((path.name, version))


def publish(folder: Path, version: int) -> None:
    path = folder / step_name(version)
    path.mkdir(parents=True)
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
        policy = Policy(client, tmp_path, version=0)  # pyright: ignore[reportArgumentType]
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
        policy = Policy(FakeClient(), tmp_path, version=0)  # pyright: ignore[reportArgumentType]
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
        policy = Policy(RefusingClient(lambda: None), tmp_path, version=0)  # pyright: ignore[reportArgumentType]
        publish(tmp_path, 1)
        await policy.follow(2, ignore)

    with pytest.raises(InferenceError, match="checksum"):
        asyncio.run(run())


def test_a_refused_version_that_was_replaced_meanwhile_is_passed_over(tmp_path: Path) -> None:
    client = RefusingClient(lambda: publish(tmp_path, 2))

    async def run() -> None:
        publish(tmp_path, 1)
        await Policy(client, tmp_path, version=0).follow(2, ignore)  # pyright: ignore[reportArgumentType]

    asyncio.run(run())
    assert client.loaded == [("step_000002", 2)]
