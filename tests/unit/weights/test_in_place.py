"""Weights that trainer and engine have in common: who waits for whom. Nobody looks by himself here: all are told."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE

from tandem.weights import in_place as live_module
from tandem.weights.in_place import LiveWeights, NotOffered
from tandem.weights.shared_memory import OwnMemory

WAIT_S = 5 * PATIENCE
QUIET_S = 0.02


@pytest.fixture(autouse=True)
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "LOOK_S", 2 * WAIT_S)


@pytest.fixture
def told() -> list[int]:
    """The versions that the engine was told to serve."""
    return []


@pytest.fixture
def live(told: list[int]) -> LiveWeights:
    return LiveWeights({}, OwnMemory(torch.float32), told.append, timeout_s=2 * WAIT_S)


def start(call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
    """In a thread that nobody waits for."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call(*arguments))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def is_waiting(*started: "Future[Any]") -> bool:
    threading.Event().wait(QUIET_S)
    return not any(one.done() for one in started)


def test_the_trainer_waits_for_the_engine_and_the_engine_for_the_trainer(live: LiveWeights, told: list[int]) -> None:
    live.begin(3)
    for version in (4, 5):
        may_write, written = threading.Event(), list[str]()

        def write(may_write: threading.Event = may_write, written: list[str] = written) -> None:
            written.append("begun")
            may_write.wait(WAIT_S)
            written.append("written")

        live.defer(write)
        delivering = start(live.deliver, version)
        assert is_waiting(delivering) and written == [] and live.version == version - 1
        serving = start(live.let_write, version)
        assert is_waiting(delivering, serving)
        may_write.set()
        delivering.result(WAIT_S)
        serving.result(WAIT_S)
        assert written == ["begun", "written"] and live.version == version
    live.let_write(5)  # it is there
    assert is_waiting(start(live.deliver, 6)) and told == []
    live.let_write(6)


def test_a_version_may_be_served_when_it_is_there_or_offered(live: LiveWeights) -> None:
    loading = start(live.require, 3)
    assert is_waiting(loading), "the trainer is still loading"
    live.begin(3)
    loading.result(WAIT_S)
    live.require(3)
    for version in (2, 5):
        with pytest.raises(NotOffered, match=f"of version 3, not {version}"):
            live.require(version)
    announced = start(live.require, 4)
    assert is_waiting(announced), "it is announced a moment before it is offered"
    delivering = start(live.deliver, 4)
    announced.result(WAIT_S)
    for version in (3, 4):
        live.require(version)
    with pytest.raises(NotOffered, match="of version 3, not 5"):
        live.require(5)
    live.let_write(4)
    delivering.result(WAIT_S)
    with pytest.raises(NotOffered, match="of version 4, not 3"):
        live.require(3)


def test_who_waits_in_vain_says_for_whom(live: LiveWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "LOOK_S", 0.001)
    monkeypatch.setattr(live_module, "BEGIN_TIMEOUT_S", 0.005)
    with pytest.raises(TimeoutError, match=r"waited 0\.005 s for the trainer to load its model; see logs/trainer\.log"):
        start(live.require, 3).result(WAIT_S)
    live.timeout_s = 0.005
    with pytest.raises(TimeoutError, match=r"waited 0\.005 s for the orchestrator to ask for version 3; see its log"):
        start(live.deliver, 3).result(WAIT_S)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_run_that_ends_tells_the_engine_once_by_itself(
    live: LiveWeights, monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    monkeypatch.setattr(live_module, "LOOK_S", 0.001)
    told: list[tuple[int, bool]] = []
    live.tell_engine = lambda version: told.append((version, threading.current_thread().daemon))
    if is_stopping:
        live.is_stopping = lambda: True
    live.begin(3)
    delivering = start(live.deliver, 4)
    assert is_waiting(delivering)
    assert told == ([(4, True)] if is_stopping else [])
    live.let_write(4)
    delivering.result(WAIT_S)


def test_weights_that_were_written_in_part_are_told_to_both(live: LiveWeights) -> None:
    def fail() -> None:
        raise MemoryError("no room for the moments")

    live.begin(3)
    live.defer(fail)
    delivering = start(live.deliver, 4)
    serving = start(live.let_write, 4)
    with pytest.raises(MemoryError):
        delivering.result(WAIT_S)
    with pytest.raises(RuntimeError, match="could not write version 4: no room for the moments"):
        serving.result(WAIT_S)


def test_models_are_held_where_they_are_and_adapters_by_a_copy(live: LiveWeights) -> None:
    live.begin(3)
    tensors = {name: torch.ones(2) for name in ("b", "a", "c")}

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    held = live.hold(pairs(), 4, None)
    assert list(held.tensors) == ["a", "b", "c"] and all(held.tensors[name] is tensors[name] for name in tensors)
    assert (held.version, held.adapter_config, held.place) == (4, None, None)
    delivering = start(held.deliver)
    live.let_write(4)
    delivering.result(WAIT_S)
    adapter = live.hold(pairs(), 5, {"r": 2})
    assert adapter is live.adapters.find(5) and adapter.tensors["a"] is not tensors["a"]
    adapter.deliver()  # at once
