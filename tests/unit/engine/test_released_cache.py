"""The KV cache's memory given away and taken back: nothing that an engine says depends on it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from tests.patience import PATIENCE

from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GeneratedSample, GenerationRequest, Sampling

Start = Callable[[NativeEngine, GenerationRequest], "Future[list[GeneratedSample]]"]
WAIT_S = 20 * PATIENCE
REQUEST = GenerationRequest([5, 6, 7, 8, 9], Sampling(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True), n=3)


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_runs_is_computed_again_to_the_same_tokens(
    deterministic: bool, make_engine: Callable[..., NativeEngine], start: Start, hold_after: Any
) -> None:
    engine = make_engine("qwen3", deterministic=deterministic)
    cache = engine.core.cache
    expected = [sample.token_ids for sample in start(engine, REQUEST).result(WAIT_S)]
    held = hold_after(engine, 6)
    running = start(engine, REQUEST)
    assert held.wait(WAIT_S)
    engine.release_cache()
    engine.resume()
    assert cache.keys.untyped_storage().nbytes() == cache.values.untyped_storage().nbytes() == 0
    waiting = start(engine, REQUEST)
    engine.reset_prefix_cache()  # what needs no memory is done meanwhile
    assert not running.done() and not waiting.done()
    engine.reacquire_cache()
    assert cache.keys.untyped_storage().nbytes() + cache.values.untyped_storage().nbytes() == cache.num_bytes
    for future in (running, waiting):
        assert [sample.token_ids for sample in future.result(WAIT_S)] == expected
