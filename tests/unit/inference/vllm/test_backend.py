"""Weight updates against an engine that writes down what it is asked."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.inference.control.updates import WeightUpdater
from tandem.inference.engine import AdapterRefused, EngineError, WeightUpdateRefused
from tandem.inference.vllm.versions import VersionLedger
from tandem.transport.weights.manifest import write_manifest

OLD, NEW = Path("/weights/old"), Path("/weights/new")


class FakeEngine:
    def __init__(self, unloadable: tuple[str, ...] = (), unreadable: bool = False, cache_resets: bool = True) -> None:
        self.calls: list[str] = []
        self.unloadable = unloadable
        self.unreadable = unreadable
        self.cache_resets = cache_resets

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(f"{method.removeprefix('tandem_')} {args[0]}")
        if method == "tandem_check_weights" and self.unreadable:
            raise RuntimeError("no such file on node 2")
        if method == "tandem_reload_weights" and args[0] in self.unloadable:
            raise RuntimeError("out of memory")
        return [None]

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests and reset_connector
        self.calls.append("reset")
        return self.cache_resets

    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def check_health(self) -> None: ...


class FakeServed:
    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem
        self.layout: dict[str, Any] = {}
        self.tied = False

    def check(self, path: Path, version: int) -> None:
        if self.problem:
            raise WeightUpdateRefused(self.problem)


def make_updater(engine: FakeEngine, served: FakeServed | None = None) -> WeightUpdater:
    return WeightUpdater(engine, served or FakeServed(), OLD, VersionLedger())  # pyright: ignore[reportArgumentType]


def test_an_update_is_one_operation_in_order() -> None:
    engine = FakeEngine()
    updater = make_updater(engine)
    asyncio.run(updater.update(NEW, 4, "keep"))
    assert engine.calls == [
        "check_weights /weights/new",
        "pause keep",
        "reload_weights /weights/new",
        "reset",
        "resume",
    ]
    assert updater.ledger.version == 4


def test_bad_files_are_refused_before_anything_is_paused() -> None:
    engine = FakeEngine()
    with pytest.raises(WeightUpdateRefused, match="checksum"):
        asyncio.run(make_updater(engine, FakeServed("bad checksum")).update(NEW, 4, "keep"))
    assert engine.calls == []
    engine = FakeEngine(unreadable=True)
    with pytest.raises(WeightUpdateRefused, match="no such file on node 2"):
        asyncio.run(make_updater(engine).update(NEW, 4, "keep"))
    assert engine.calls == ["check_weights /weights/new"]


def test_a_reload_that_fails_brings_the_old_weights_back() -> None:
    engine = FakeEngine(unloadable=(str(NEW),))
    updater = make_updater(engine)
    with pytest.raises(WeightUpdateRefused, match="old weights serve again: out of memory"):
        asyncio.run(updater.update(NEW, 4, "keep"))
    assert engine.calls[1:] == [
        "pause keep",
        "reload_weights /weights/new",
        "reload_weights /weights/old",
        "reset",
        "resume",
    ]
    assert updater.ledger.version == 0 and updater.failure is None


def test_without_any_loadable_weights_nothing_is_served() -> None:
    engine = FakeEngine(unloadable=(str(NEW), str(OLD)))
    updater = make_updater(engine)
    with pytest.raises(EngineError, match="stays paused: restart it"):
        asyncio.run(updater.update(NEW, 4, "keep"))
    assert "resume" not in engine.calls and updater.failure is not None
    with pytest.raises(EngineError, match="restart it"):
        asyncio.run(updater.update(NEW, 5, "keep"))


def test_old_keys_and_values_never_meet_new_weights() -> None:
    engine = FakeEngine(cache_resets=False)
    updater = make_updater(engine)
    with pytest.raises(EngineError, match="could not be reset"):
        asyncio.run(updater.update(NEW, 4, "keep"))
    assert "resume" not in engine.calls and updater.ledger.version == 0


def test_a_pause_outlasts_an_update() -> None:
    engine = FakeEngine()
    updater = make_updater(engine)

    async def scenario() -> None:
        await updater.pause("keep")
        await updater.update(NEW, 1, "abort")
        assert updater.paused and "resume" not in engine.calls
        await updater.resume()

    asyncio.run(scenario())
    assert engine.calls[-1] == "resume" and not updater.paused


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


def load_adapter(updater: WeightUpdater, path: Path, refuse: bool = False) -> None:
    async def load() -> None:
        updater.engine.calls.append("load")  # pyright: ignore[reportAttributeAccessIssue]
        if refuse:
            raise AdapterRefused("rank 64 is greater than 16")

    asyncio.run(updater.load_adapter("policy", path, 5, "wait", load))


def test_an_adapter_is_loaded_while_nothing_runs_and_meets_no_old_cache(adapter: Path) -> None:
    engine = FakeEngine()
    updater = make_updater(engine)
    load_adapter(updater, adapter)
    assert engine.calls == ["pause wait", "load", "reset", "resume"]
    assert updater.ledger.adapters == {"policy": 5} and updater.ledger.version == 0


def test_a_refused_adapter_changes_nothing(adapter: Path) -> None:
    engine = FakeEngine()
    updater = make_updater(engine)
    with pytest.raises(AdapterRefused, match="greater than 16"):
        load_adapter(updater, adapter, refuse=True)
    assert engine.calls == ["pause wait", "load", "resume"] and updater.ledger.adapters == {}
    write_manifest(adapter, 5)
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(AdapterRefused, match="the manifest says 2"):
        load_adapter(updater, adapter)
    assert engine.calls == ["pause wait", "load", "resume"], "nothing was paused"


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_may_clear_the_cache(mode: Any) -> None:
    engine = FakeEngine()
    asyncio.run(make_updater(engine).pause(mode, clear_cache=True))
    assert engine.calls == [f"pause {mode}", "reset"]
    with pytest.raises(EngineError, match="paused, but its prefix cache could not be cleared"):
        asyncio.run(make_updater(FakeEngine(cache_resets=False)).pause(mode, clear_cache=True))
