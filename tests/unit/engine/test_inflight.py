"""Steps that are launched before the last one is read, against steps one after the other: the same answers.

The device here is the CPU: it keeps the tokens it drew to itself until they are read, as a GPU does.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.core import EngineCore
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GeneratedSample, GenerationRequest, Sampling
from tandem.engine.runner import Runner
from tandem.engine.sampler import Drawn, sample, sampling_rows
from tandem.engine.state import Rows
from tandem.models.hf import copy_weights, named_tensors

Generate = Callable[[NativeEngine, list[GenerationRequest]], list[list[GeneratedSample]]]


@dataclass
class SlowDevice:
    """A launcher that computes at once and tells late."""

    runner: Runner
    num_ahead: int = 0  # steps launched while another one was not read
    num_unread: int = 0

    def __post_init__(self) -> None:
        self.last = np.zeros(self.runner.state.num_slots, np.int64)

    def launch(self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64]) -> Tensor:
        state = self.runner.state
        unknown = rows[state.in_flight[rows] > 0]
        state.tokens[unknown, state.computed[unknown]] = self.last[unknown]
        self.num_ahead += self.num_unread > 0
        logits = self.runner.forward(rows, chunk, wanted)
        state.tokens[unknown, state.computed[unknown]] = -1
        return logits

    def draw(self, rows: Rows, launched: Tensor, index: NDArray[np.int64] | None) -> Callable[[], Drawn]:
        logits = launched if index is None else launched[torch.from_numpy(index)]
        drawn = sample(logits, sampling_rows(self.runner.state, rows))
        self.last[rows] = drawn.tokens
        self.num_unread += 1

        def read() -> Drawn:
            self.num_unread -= 1
            return drawn

        return read

    def forward(self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64]) -> Tensor:
        assert not self.runner.state.in_flight[rows].any(), "logits that depend on tokens nobody has read"
        return self.runner.forward(rows, chunk, wanted)

    def sample(self, rows: Rows, logits: Tensor, adjusted: Tensor | None) -> Drawn:
        return self.runner.sample(rows, logits, adjusted)


@pytest.fixture
def launch_ahead() -> Iterator[Callable[[NativeEngine], SlowDevice]]:
    """Have an engine launch its steps."""

    def install(engine: NativeEngine) -> SlowDevice:
        runner = engine.core.runner
        assert isinstance(runner, Runner)
        device = SlowDevice(runner)
        engine.core.runner = engine.core._launcher = device
        return device

    yield install


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(2, 64, length).tolist()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"stop": ("C",)},
    {"repetition_penalty": 1.3},
    {"min_tokens": 3},
    {"stop_token_ids": (5, 6, 7, 8, 9)},
]
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(1, 20),  # max_tokens
        st.integers(1, 5),  # n
        st.sampled_from(range(len(OPTIONS))),
        st.sampled_from([0, 3]),  # top log-probs
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=REQUESTS,
    tokens_per_step=st.sampled_from([1, 3, 16, 4096]),
    max_sequences=st.sampled_from([2, 7, 64]),
    kv_cache_tokens=st.sampled_from([68, 100, 4096]),
)
@example(  # a draw at the edge
    requests=[(1, 1, 1, 0, 0), (1, 1, 1, 0, 0), (1, 16, 1, 0, 0), (12, 10, 5, 2, 0)],
    tokens_per_step=1,
    max_sequences=2,
    kv_cache_tokens=68,
)
def test_answers_do_not_depend_on_when_tokens_are_read(
    requests: list[tuple[int, int, int, int, int]],
    tokens_per_step: int,
    max_sequences: int,
    kv_cache_tokens: int,
    make_engine: Callable[..., NativeEngine],
    generate: Generate,
    launch_ahead: Callable[[NativeEngine], SlowDevice],
) -> None:
    asked = [
        GenerationRequest(
            prompt_of(length, i % 3), Sampling(max_tokens, seed=i, **OPTIONS[option]), n, top_logprobs=top
        )
        for i, (length, max_tokens, n, option, top) in enumerate(requests)
    ]
    size = {"tokens_per_step": tokens_per_step, "max_sequences": max_sequences, "kv_cache_tokens": kv_cache_tokens}
    # Batches differ between the two; rounded otherwise, a draw at the edge of two tokens would take the other one.
    batch_invariant = size | {"deterministic": True}
    expected = generate(make_engine(**batch_invariant), asked)
    engine = make_engine(**batch_invariant)
    launch_ahead(engine)
    found = generate(engine, asked)
    engine.inspect(engine.core.scheduler.check_invariants)
    for here, there in zip(found, expected, strict=True):
        assert [replace(s, logprobs=[], top_logprobs=None) for s in here] == [
            replace(s, logprobs=[], top_logprobs=None) for s in there
        ]
        for mine, theirs in zip(here, there, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            assert len(mine.top_logprobs or []) == len(theirs.top_logprobs or [])


def test_a_step_is_launched_before_the_last_one_is_read_and_an_ended_row_wastes_one(
    make_engine: Callable[..., NativeEngine], generate: Generate, launch_ahead: Callable[[NativeEngine], SlowDevice]
) -> None:
    engine = make_engine()
    device = launch_ahead(engine)
    launched: list[int] = []
    launch = device.launch
    device.launch = lambda rows, chunk, wanted: (launched.append(len(rows)), launch(rows, chunk, wanted))[1]
    [[answer]] = generate(engine, [GenerationRequest(prompt_of(5), Sampling(20, seed=1, ignore_eos=True))])
    assert len(answer.token_ids) == 20 and launched == [1] * 20, "the greatest length is known beforehand"
    assert device.num_ahead == 19
    stop = answer.token_ids[7]
    launched.clear()
    sampling = Sampling(20, seed=1, ignore_eos=True, stop_token_ids=(stop,))
    [[stopped]] = generate(engine, [GenerationRequest(prompt_of(5), sampling)])
    engine.inspect(lambda: None)
    assert stopped.token_ids == answer.token_ids[: answer.token_ids.index(stop) + 1]
    assert len(launched) == len(stopped.token_ids) + 1
    assert stopped.logprobs == pytest.approx(answer.logprobs[: len(stopped.logprobs)], abs=1e-5)


def test_streams_get_every_token_once_and_in_order(
    make_engine: Callable[..., NativeEngine], launch_ahead: Callable[[NativeEngine], SlowDevice]
) -> None:
    engine = make_engine()
    launch_ahead(engine)
    parts: list[GeneratedSample] = []
    done: Future[Any] = Future()
    engine.submit(
        GenerationRequest(prompt_of(7), Sampling(15, seed=3, ignore_eos=True)),
        done.set_result,
        lambda _, part: parts.append(part),
    )
    [whole] = done.result(timeout=60).samples
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [part.finish_reason for part in parts] == [None] * 14 + ["length"]


def test_cancelled_and_updated_requests_leave_no_wrong_prefix_behind(
    make_engine: Callable[..., NativeEngine],
    generate: Generate,
    launch_ahead: Callable[[NativeEngine], SlowDevice],
    make_model: Callable[..., Path],
) -> None:
    """A cancelled row has a token in step whose value nobody knows: no block may be cached under it."""
    engine = make_engine(max_sequences=4)
    device = launch_ahead(engine)
    request = GenerationRequest(prompt_of(6), Sampling(40, seed=5, ignore_eos=True))
    [[expected]] = generate(engine, [request])
    launch = device.launch
    for steps in range(3, 9):
        engine.reset_prefix_cache()
        core: EngineCore = engine.core
        number = engine.submit(request, lambda outcome: None)
        left = [steps]

        def cancel_after(rows: Rows, chunk: Any, wanted: Any, number: int = number, left: list[int] = left) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                engine.cancel(number)
            return launch(rows, chunk, wanted)

        device.launch = cancel_after
        while left[0] > 0 or core._requests:
            engine.inspect(lambda: None)
        device.launch = launch
        longer = replace(request, prompt_ids=request.prompt_ids + expected.token_ids[:12])
        [[found]] = generate(engine, [replace(longer, sampling=replace(request.sampling, max_tokens=10))])
        assert found.token_ids == expected.token_ids[12:22]


def test_new_weights_in_the_middle_mark_the_tokens_they_made(
    make_engine: Callable[..., NativeEngine], launch_ahead: Callable[[NativeEngine], SlowDevice]
) -> None:
    engine = make_engine()
    launch_ahead(engine)
    tensors = {name: tensor.clone() for name, tensor in named_tensors(engine.core.decoder).items()}
    done: Future[Any] = Future()
    swapped = [False]

    def on_part(index: int, part: GeneratedSample) -> None:
        if not swapped[0]:
            swapped[0] = True
            engine._send(lambda: engine.core.swap_weights(lambda: copy_weights(engine.core.decoder, tensors), 1), print)

    engine.submit(GenerationRequest(prompt_of(7), Sampling(30, seed=3, ignore_eos=True)), done.set_result, on_part)
    [found] = done.result(timeout=60).samples
    assert sorted(found.versions) == found.versions and set(found.versions) == {0, 1}
    engine.submit(
        GenerationRequest(prompt_of(7), Sampling(30, seed=3, ignore_eos=True)), (again := Future()).set_result
    )
    assert again.result(timeout=60).samples[0].token_ids == found.token_ids  # the same weights under another version
