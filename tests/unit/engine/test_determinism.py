"""With `deterministic`, a request's tokens and log-probs are the same bits whatever runs beside it."""

from collections.abc import Callable

import numpy as np
import pytest

from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GeneratedSample, GenerationRequest, Sampling

Generate = Callable[[NativeEngine, list[GenerationRequest]], list[list[GeneratedSample]]]


def requests(count: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    return [
        GenerationRequest(rng.integers(2, 64, 3 + 5 * i).tolist(), Sampling(8 + i, seed=i), n=1 + 3 * (i % 3))
        for i in range(count)
    ]


@pytest.mark.parametrize("tight", [False, True])
def test_alone_and_among_others_give_the_same_bits(
    tight: bool, make_engine: Callable[..., NativeEngine], generate: Generate
) -> None:
    room = {"kv_cache_tokens": 100, "max_sequences": 5} if tight else {}
    engine = make_engine(deterministic=True, tokens_per_step=7, **room)
    asked = requests(6)
    together = generate(engine, asked)
    alone = [generate(engine, [request])[0] for request in asked]
    again = generate(engine, list(reversed(asked)))[::-1]
    assert together == alone == again  # floats compared exactly
