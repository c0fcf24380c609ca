"""Damaged weights are not served: their trainer publishes them again."""

import asyncio
from pathlib import Path

import pytest

from tandem.orchestrator import weights
from tandem.orchestrator.weights import wait_for_whole
from tandem.transport.weights.manifest import verify_manifest, write_manifest
from tandem.utils.files import publish_directory, staging_directory
from tandem.utils.waiting import Deadline


def deadline(timeout_s: float = 60.0) -> Deadline:
    return Deadline("the trainer's weights", timeout_s, "is it running?")


def publish(folder: Path, content: bytes = b"weights") -> None:
    staging = staging_directory(folder)
    (staging / "model.safetensors").write_bytes(content)
    write_manifest(staging, 3)
    publish_directory(staging, folder)


def test_weights_that_are_whole_are_taken_at_once(tmp_path: Path) -> None:
    publish(tmp_path / "step_000003")
    asyncio.run(wait_for_whole(tmp_path / "step_000003", 3, deadline()))


def test_damaged_ones_are_read_once_and_waited_for(tmp_path: Path, monkeypatch, caplog) -> None:
    folder = tmp_path / "step_000003"
    publish(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    looks = []

    def counted(*arguments: object) -> None:
        looks.append(arguments)
        verify_manifest(folder, 3)

    monkeypatch.setattr(weights, "verify_manifest", counted)

    async def run() -> None:
        waiting = asyncio.ensure_future(wait_for_whole(folder, 3, deadline()))
        while not looks:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not waiting.done() and len(looks) == 1, "a large file is not read again and again"
        publish(folder)
        await waiting

    asyncio.run(run())
    assert "does not match its checksum; waiting for the trainer to publish version 3 again" in caplog.text


def test_a_new_version_is_read_even_if_its_timestamp_is_the_old_one(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "step_000003"
    publish(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    monkeypatch.setattr(weights, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(weights, "_stamp", lambda path: (1, 1))

    async def run() -> None:
        waiting = asyncio.ensure_future(wait_for_whole(folder, 3, deadline(10.0)))
        await asyncio.sleep(0.1)
        publish(folder)
        await waiting

    asyncio.run(run())


def test_the_wait_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the trainer's weights"):
        asyncio.run(wait_for_whole(tmp_path / "step_000003", 3, deadline(0.1)))
