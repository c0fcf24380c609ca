"""The control plane in front of vLLM: weight updates against an engine that writes down what it is asked."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.protocol import EngineBusy, EngineError
from tandem.serving.updates import ControlPlane
from tandem.serving.vllm.adapters import Adapters
from tandem.serving.vllm.backend import VllmBackend
from tandem.serving.vllm.versions import VersionLedger
from tandem.types.openai import LoadAdapterRequest
from tandem.utils.manifest import write_manifest
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused

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


class Control(ControlPlane):
    """With the ledger that it marks."""

    def __init__(self, engine: FakeEngine, served: FakeServed | None = None) -> None:
        self.ledger = VersionLedger()
        given: Any = served or FakeServed()
        self.backend = VllmBackend(engine, given, OLD, self.ledger)  # pyright: ignore[reportArgumentType]
        super().__init__(self.backend, given)


def test_an_update_is_one_operation_in_order() -> None:
    engine = FakeEngine()
    control = Control(engine)
    asyncio.run(control.update(NEW, 4, "keep"))
    assert engine.calls == [
        "check_weights /weights/new",
        "pause keep",
        "reload_weights /weights/new",
        "reset",
        "resume",
    ]
    assert control.ledger.version == 4


def test_bad_files_are_refused_before_anything_is_paused() -> None:
    engine = FakeEngine()
    with pytest.raises(WeightUpdateRefused, match="checksum"):
        asyncio.run(Control(engine, FakeServed("bad checksum")).update(NEW, 4, "keep"))
    assert engine.calls == []
    engine = FakeEngine(unreadable=True)
    with pytest.raises(WeightUpdateRefused, match="no such file on node 2"):
        asyncio.run(Control(engine).update(NEW, 4, "keep"))
    assert engine.calls == ["check_weights /weights/new"]


def test_a_reload_that_fails_brings_the_old_weights_back() -> None:
    engine = FakeEngine(unloadable=(str(NEW),))
    control = Control(engine)
    with pytest.raises(WeightUpdateRefused, match="version 0 was loaded again and serves: out of memory"):
        asyncio.run(control.update(NEW, 4, "keep"))
    assert engine.calls[1:] == [
        "pause keep",
        "reload_weights /weights/new",
        "reload_weights /weights/old",
        "reset",
        "resume",
    ]
    assert control.ledger.version == 0 and control.failure is None


def test_without_any_loadable_weights_nothing_is_served() -> None:
    engine = FakeEngine(unloadable=(str(NEW), str(OLD)))
    control = Control(engine)
    with pytest.raises(EngineError, match="stays paused: restart it"):
        asyncio.run(control.update(NEW, 4, "keep"))
    assert "resume" not in engine.calls and control.failure is not None
    with pytest.raises(EngineError, match="restart it"):
        asyncio.run(control.update(NEW, 5, "keep"))
    with pytest.raises(EngineError, match="restart it"):
        asyncio.run(control.resume())
    assert "resume" not in engine.calls


def test_old_keys_and_values_never_meet_new_weights() -> None:
    engine = FakeEngine(cache_resets=False)
    control = Control(engine)
    with pytest.raises(EngineError, match="could not be reset"):
        asyncio.run(control.update(NEW, 4, "keep"))
    assert "resume" not in engine.calls and control.ledger.version == 0


def test_a_pause_outlasts_an_update() -> None:
    engine = FakeEngine()
    control = Control(engine)

    async def scenario() -> None:
        await control.pause("keep")
        await control.update(NEW, 1, "abort")
        assert control.paused and "resume" not in engine.calls
        await control.resume()

    asyncio.run(scenario())
    assert engine.calls[-1] == "resume" and not control.paused


def test_waiting_for_requests_that_a_pause_holds_is_refused() -> None:
    engine = FakeEngine()
    control = Control(engine)

    async def scenario() -> None:
        await control.pause("keep")
        for waiting in (control.pause("wait"), control.update(NEW, 1, "wait")):
            with pytest.raises(EngineBusy, match="resume it first"):
                await waiting

    asyncio.run(scenario())
    assert "pause wait" not in engine.calls and control.version == 0


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


class FakeAdapters(Adapters):
    def __init__(self, control: Control, engine: FakeEngine, refuse: bool) -> None:
        super().__init__(control, control.backend, FakeRegistry(), is_enabled=True)
        self.engine, self.refuse = engine, refuse

    async def _put(self, name: str, path: str) -> None:
        self.engine.calls.append("load")
        if self.refuse:
            raise AdapterRefused("rank 64 is greater than 16")


class FakeRegistry:
    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}
        self.lora_id_counter: Any = None

    def is_base_model(self, model_name: str) -> bool:
        return False


def load_adapter(control: Control, engine: FakeEngine, path: Path, refuse: bool = False) -> None:
    asked = LoadAdapterRequest(lora_name="policy", lora_path=str(path), version=5, mode="wait")
    asyncio.run(FakeAdapters(control, engine, refuse).load(asked, path))


def test_an_adapter_is_loaded_while_nothing_runs_and_meets_no_old_cache(adapter: Path) -> None:
    engine = FakeEngine()
    control = Control(engine)
    load_adapter(control, engine, adapter)
    assert engine.calls == ["pause wait", "load", "reset", "resume"]
    assert control.ledger.adapters == {"policy": 5} and control.ledger.version == 0


def test_a_refused_adapter_changes_nothing(adapter: Path) -> None:
    engine = FakeEngine()
    control = Control(engine)
    with pytest.raises(AdapterRefused, match="greater than 16"):
        load_adapter(control, engine, adapter, refuse=True)
    assert engine.calls == ["pause wait", "load", "resume"] and control.ledger.adapters == {}
    write_manifest(adapter, 5)
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(AdapterRefused, match="the manifest says 2"):
        load_adapter(control, engine, adapter)
    assert engine.calls == ["pause wait", "load", "resume"], "nothing was paused"


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_may_clear_the_cache(mode: Any) -> None:
    engine = FakeEngine()
    asyncio.run(Control(engine).pause(mode, clear_cache=True))
    assert engine.calls == [f"pause {mode}", "reset"]
    with pytest.raises(EngineError, match="paused, but its prefix cache could not be cleared"):
        asyncio.run(Control(FakeEngine(cache_resets=False)).pause(mode, clear_cache=True))
