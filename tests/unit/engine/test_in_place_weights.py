"""Weights that a trainer and an engine in one process have in common: written while the engine holds still."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.patience import PATIENCE

from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import EngineError, GeneratedSample, GenerationRequest, Sampling
from tandem.utils.run_dir import step_name
from tandem.weights.files import FileSource
from tandem.weights.in_place import InPlace
from tandem.weights.in_process import InProcess
from tandem.weights.versions import WeightUpdateRefused

MakeEngine = Callable[..., NativeEngine]
Start = Callable[[NativeEngine, GenerationRequest], "Future[list[GeneratedSample]]"]
WAIT_S = 20 * PATIENCE


@pytest.fixture
def connect(make_model: Callable[..., Path], tmp_path: Path) -> Callable[[NativeEngine], InPlace]:
    def connect(engine: NativeEngine) -> InPlace:
        tensors = {name: parameter.detach() for name, parameter in engine.core.decoder.named_parameters()}
        tell = lambda version: engine.update_weights(tmp_path / step_name(version), version)  # noqa: E731
        in_place = InPlace(
            tensors, InProcess(torch.float32, tmp_path, FileSource()), make_model("qwen3"), tell, timeout_s=WAIT_S
        )
        engine.source = in_place
        return in_place

    return connect


def generate(engine: NativeEngine, start: Start) -> list[GeneratedSample]:
    return start(engine, GenerationRequest([5, 6, 7], Sampling(max_tokens=3, temperature=0.0))).result(WAIT_S)


@pytest.mark.parametrize("deterministic", [False, True])  # weights as they are, and laid out anew for exact mode
def test_a_version_is_written_when_the_engine_is_told_to_serve_it(
    deterministic: bool, make_engine: MakeEngine, start: Start, connect: Callable[..., InPlace], tmp_path: Path
) -> None:
    engine = make_engine("qwen3", deterministic=deterministic)
    in_place = connect(engine)
    in_place.begin(0)
    before = generate(engine, start)
    # A token whose output weight is far longer than all others is the one that follows.
    embedding, order = in_place.tensors["embed_tokens.weight"], []

    def write() -> None:
        order.append("written")
        embedding[9] = 50 * embedding[before[0].token_ids[0]]

    with ThreadPoolExecutor() as pool:
        in_place.write = write
        dein_placering = pool.submit(in_place.write_when_paused, 1)
        assert generate(engine, start)[0].token_ids == before[0].token_ids, "nobody has asked for the version"
        assert not order and not dein_placering.done()
        engine.update_weights(tmp_path / step_name(1), 1)
        dein_placering.result(WAIT_S)
    assert order == ["written"] and engine.version == in_place.version == 1
    after = generate(engine, start)
    assert after[0].token_ids[0] == 9 and after[0].versions == [1, 1, 1]
    engine.update_weights(tmp_path / step_name(1), 1)  # it is there: told again, it is served
    assert order == ["written"]


def test_requests_that_run_meanwhile_are_computed_again_under_the_new_version(
    make_engine: MakeEngine, start: Start, hold_after: Any, connect: Callable[..., InPlace], tmp_path: Path
) -> None:
    engine = make_engine("qwen3")
    in_place = connect(engine)
    in_place.begin(0)
    held = hold_after(engine, 4)
    running = start(engine, GenerationRequest([5, 6], Sampling(max_tokens=20, temperature=1.0, ignore_eos=True)))
    assert held.wait(WAIT_S)
    with ThreadPoolExecutor() as pool:
        dein_placering = pool.submit(in_place.write_when_paused, 1)
        engine.update_weights(tmp_path / step_name(1), 1)
        dein_placering.result(WAIT_S)
    engine.resume()
    (sample,) = running.result(WAIT_S)
    assert sample.versions == [0] * 4 + [1] * 16


def test_other_weights_are_refused(
    make_engine: MakeEngine, connect: Callable[..., InPlace], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    engine = make_engine("qwen3")
    in_place = connect(engine)
    in_place.begin(3)
    for version in (2, 7):
        with pytest.raises(WeightUpdateRefused, match=f"of version 3, not {version}"):
            engine.update_weights(tmp_path / step_name(version), version)
    with pytest.raises(WeightUpdateRefused, match="of the trainer in its process alone"):
        engine.update_weights(make_model("qwen3", seed=1), 3)
    engine.update_weights(tmp_path / step_name(3), 3)
    assert engine.version == 3


def test_a_version_is_waited_for_while_the_trainer_loads(
    make_engine: MakeEngine, connect: Callable[..., InPlace], make_model: Callable[..., Path]
) -> None:
    engine = make_engine("qwen3")
    in_place = connect(engine)
    with ThreadPoolExecutor() as pool:
        told = pool.submit(engine.update_weights, make_model("qwen3"), 0)
        in_place.begin(0)
        told.result(WAIT_S)
    assert engine.version == 0


def test_a_run_that_ends_finishes_its_step(make_engine: MakeEngine, connect: Callable[..., InPlace]) -> None:
    engine = make_engine("qwen3")
    in_place = connect(engine)
    in_place.begin(0)
    in_place.is_stopping = lambda: True
    in_place.write_when_paused(1)  # no orchestrator is left to tell the engine
    engine.inspect(lambda: None)
    assert engine.version == in_place.version == 1


def test_weights_that_were_written_in_part_are_not_served(
    make_engine: MakeEngine, connect: Callable[..., InPlace], tmp_path: Path
) -> None:
    engine = make_engine("qwen3")
    in_place = connect(engine)
    in_place.begin(0)

    def fail() -> None:
        raise MemoryError("no room for the moments")

    in_place.write = fail
    with ThreadPoolExecutor() as pool:
        dein_placering = pool.submit(in_place.write_when_paused, 1)
        with pytest.raises((RuntimeError, EngineError), match="no room for the moments"):
            engine.update_weights(tmp_path / step_name(1), 1)
        with pytest.raises(MemoryError):
            dein_placering.result(WAIT_S)
    engine._thread.join(WAIT_S)
    assert engine.failure is not None
