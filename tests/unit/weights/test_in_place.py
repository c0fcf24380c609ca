"""Weights that trainer and engine have in common: who waits for whom. Nobody looks by himself here: all are told."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE

from tandem.utils.run_dir import step_name
from tandem.weights import in_place as in_place_module
from tandem.weights.files import FileSource
from tandem.weights.in_place import InPlace, NotOffered
from tandem.weights.in_process import InProcess

RUN = Path("run/weights")
WAIT_S = 5 * PATIENCE
QUIET_S = 0.02


@pytest.fixture(autouse=True)
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place_module, "LOOK_S", 2 * WAIT_S)


@pytest.fixture
def told() -> list[int]:
    """The versions that the engine was told to serve."""
    return []


@pytest.fixture
def in_place(told: list[int]) -> InPlace:
    return InPlace({}, InProcess(torch.float32, RUN, FileSource()), Path("model"), told.append, timeout_s=2 * WAIT_S)


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


def test_the_trainer_waits_for_the_engine_and_the_engine_for_the_trainer(in_place: InPlace, told: list[int]) -> None:
    in_place.begin(3)
    for version in (4, 5):
        may_write, written = threading.Event(), list[str]()

        def write(may_write: threading.Event = may_write, written: list[str] = written) -> None:
            written.append("begun")
            may_write.wait(WAIT_S)
            written.append("written")

        in_place.write = write
        dein_placering = start(in_place.write_when_paused, version)
        assert is_waiting(dein_placering) and written == [] and in_place.version == version - 1
        serving = start(in_place.wait_until_written, version)
        assert is_waiting(dein_placering, serving)
        may_write.set()
        dein_placering.result(WAIT_S)
        serving.result(WAIT_S)
        assert written == ["begun", "written"] and in_place.version == version
    in_place.wait_until_written(5)  # it is there
    assert is_waiting(start(in_place.write_when_paused, 6)) and told == []
    in_place.wait_until_written(6)


def test_a_version_may_be_served_when_it_is_there_or_offered(in_place: InPlace) -> None:
    loading = start(in_place.require, 3)
    assert is_waiting(loading), "the trainer is still loading"
    in_place.begin(3)
    loading.result(WAIT_S)
    in_place.require(3)
    for version in (2, 5):
        with pytest.raises(NotOffered, match=f"of version 3, not {version}"):
            in_place.require(version)
    announced = start(in_place.require, 4)
    assert is_waiting(announced), "it is announced a moment before it is offered"
    dein_placering = start(in_place.write_when_paused, 4)
    announced.result(WAIT_S)
    for version in (3, 4):
        in_place.require(version)
    with pytest.raises(NotOffered, match="of version 3, not 5"):
        in_place.require(5)
    in_place.wait_until_written(4)
    dein_placering.result(WAIT_S)
    with pytest.raises(NotOffered, match="of version 4, not 3"):
        in_place.require(3)


def test_who_waits_in_vain_says_for_whom(in_place: InPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place_module, "LOOK_S", 0.001)
    monkeypatch.setattr(in_place_module, "BEGIN_TIMEOUT_S", 0.005)
    with pytest.raises(TimeoutError, match=r"waited 0\.005 s for the trainer to load its model; see logs/trainer\.log"):
        start(in_place.require, 3).result(WAIT_S)
    in_place.timeout_s = 0.005
    with pytest.raises(TimeoutError, match=r"waited 0\.005 s for the orchestrator to ask for version 3; see its log"):
        start(in_place.write_when_paused, 3).result(WAIT_S)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_run_that_ends_tells_the_engine_once_by_itself(
    in_place: InPlace, monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    monkeypatch.setattr(in_place_module, "LOOK_S", 0.001)
    told: list[tuple[int, bool]] = []
    in_place.tell_engine = lambda version: told.append((version, threading.current_thread().daemon))
    if is_stopping:
        in_place.is_stopping = lambda: True
    in_place.begin(3)
    dein_placering = start(in_place.write_when_paused, 4)
    assert is_waiting(dein_placering)
    assert told == ([(4, True)] if is_stopping else [])
    in_place.wait_until_written(4)
    dein_placering.result(WAIT_S)


def test_weights_that_were_written_in_part_are_told_to_both(in_place: InPlace) -> None:
    def fail() -> None:
        raise MemoryError("no room for the moments")

    in_place.begin(3)
    in_place.write = fail
    dein_placering = start(in_place.write_when_paused, 4)
    serving = start(in_place.wait_until_written, 4)
    with pytest.raises(MemoryError):
        dein_placering.result(WAIT_S)
    with pytest.raises(RuntimeError, match="could not write version 4: no room for the moments"):
        serving.result(WAIT_S)


def test_models_are_held_where_they_are_and_adapters_by_a_copy(in_place: InPlace) -> None:
    in_place.begin(3)
    tensors = {name: torch.ones(2) for name in ("b", "a", "c")}

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors.items()

    held = in_place.hold(pairs(), 4, None)
    assert list(held.tensors) == ["a", "b", "c"] and all(held.tensors[name] is tensors[name] for name in tensors)
    assert (held.version, held.adapter_config, held.place) == (4, None, None)
    dein_placering = start(held.complete)
    in_place.wait_until_written(4)
    dein_placering.result(WAIT_S)
    adapter = in_place.hold(pairs(), 5, {"r": 2})
    assert adapter is in_place.copies.find(RUN / step_name(5), 5) and adapter.tensors["a"] is not tensors["a"]
    adapter.complete()  # at once
