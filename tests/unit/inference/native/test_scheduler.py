"""Admission, chunking, forking and preemption, without a model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.inference.engine import GenerationRequest, Sampling
from tandem.inference.native.blocks import BlockManager
from tandem.inference.native.scheduler import Scheduler
from tandem.inference.native.state import Request, Sample, SlotState

SEQ_LEN = 24


def make_scheduler(
    num_blocks: int = 32, slots: int = 8, tokens_per_step: int = 64, *, isolate: bool = False
) -> Scheduler:
    return Scheduler(SlotState(slots, SEQ_LEN, 4), BlockManager(num_blocks, 4), tokens_per_step, isolate=isolate)


def make_request(request_id: int, prompt_length: int, max_tokens: int, n: int = 1) -> Request:
    prompt = np.arange(prompt_length) + 100 * request_id
    return Request(request_id, GenerationRequest(prompt.tolist(), Sampling(max_tokens), n), 0, lambda outcome: None)


def add(scheduler: Scheduler, request: Request) -> None:
    scheduler.add(request, [Sample(request, index) for index in range(request.asked.n)])


def step(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """One step without a model: every draw gives token 7. Returns (request, tokens computed) by batch."""
    state, computed = scheduler.state, []
    scheduler.prepare_step()
    for rows, chunk in scheduler.batches():
        computed.append([(owner(scheduler, slot), int(c)) for slot, c in zip(rows, chunk, strict=True)])
        state.computed[rows] += chunk
        drawing = scheduler.fork(rows[state.computed[rows] == state.target[rows]]).drawing
        state.append(drawing, np.full(len(drawing), 7), np.zeros(len(drawing), np.float32), 0)
        for slot in drawing[state.length[drawing] >= state.max_length[drawing]].tolist():
            sample = scheduler.finish(slot)
            assert sample.request.results[sample.index] is None, "a sample finished twice"
            sample.request.results[sample.index] = sample  # type: ignore[call-overload]
    scheduler.check_invariants()
    return computed


def owner(scheduler: Scheduler, slot: int) -> int:
    sample = scheduler.state.samples[slot]
    assert sample is not None
    return sample.request.id


def test_prompts_are_computed_in_chunks_and_decoding_goes_on_beside_them() -> None:
    scheduler = make_scheduler(tokens_per_step=5)
    add(scheduler, make_request(0, prompt_length=3, max_tokens=4))
    assert step(scheduler) == [[(0, 3)]]
    add(scheduler, make_request(1, prompt_length=12, max_tokens=2))
    assert step(scheduler) == [[(0, 1), (1, 5)]]
    assert step(scheduler) == [[(0, 1), (1, 5)]]
    assert step(scheduler) == [[(0, 1), (1, 2)]]
    assert step(scheduler) == [[(1, 1)]]
    assert not scheduler.has_work


def test_isolated_requests_are_never_batched_together() -> None:
    scheduler = make_scheduler(isolate=True)
    add(scheduler, make_request(0, 3, 2, n=2))
    add(scheduler, make_request(1, 5, 2))
    assert step(scheduler) == [[(0, 3)], [(1, 5)]]
    assert step(scheduler) == [[(0, 1), (0, 1)], [(1, 1)]]


@pytest.mark.parametrize("num_blocks", [12, 64], ids=["few blocks", "few rows"])
def test_waves_of_an_isolated_request_do_not_depend_on_the_load(num_blocks: int) -> None:
    def prompt_batches(*, busy: bool) -> list[list[tuple[int, int]]]:
        scheduler = make_scheduler(num_blocks, slots=4, isolate=True)
        if busy:
            add(scheduler, make_request(0, 6, 10))
        add(scheduler, make_request(1, 6, 4, n=7))
        batches = []
        while scheduler.has_work:
            batches += [batch for batch in step(scheduler) if batch[0][0] == 1]
        return batches

    assert prompt_batches(busy=True) == prompt_batches(busy=False)


def test_the_sequence_admitted_last_gives_way_and_returns_first() -> None:
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, make_request(0, 8, 12))
    add(scheduler, make_request(1, 8, 12))
    add(scheduler, make_request(2, 8, 2))
    step(scheduler)
    assert [group.request.id for group in scheduler.queue] == [2]
    while len(scheduler.queue) == 1:
        step(scheduler)
    assert [group.request.id for group in scheduler.queue] == [1, 2]
    preempted = scheduler.queue[0].samples[0]
    assert len(preempted.tokens) > 0 and set(preempted.tokens.tolist()) == {7}


def test_a_requeued_group_shares_its_prompt_again() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 10, 6, n=3)
    add(scheduler, request)
    for _ in range(3):
        step(scheduler)
    scheduler.requeue_all()
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    assert len(scheduler.queue) == 1
    scheduler.blocks.forget()
    # The prompt once, then the three generated tokens of each sample.
    assert step(scheduler) == [[(0, 10)]]
    assert step(scheduler) == [[(0, 3)] * 3]


def test_prompts_are_computed_in_the_order_they_came() -> None:
    """Of 5 tokens a step, the first prompt takes its 4; the second one gets what is left."""
    scheduler = make_scheduler(tokens_per_step=5)
    add(scheduler, make_request(0, prompt_length=4, max_tokens=1))
    add(scheduler, make_request(1, prompt_length=7, max_tokens=1))
    assert step(scheduler) == [[(0, 4), (1, 1)]]
    assert step(scheduler) == [[(1, 5)]]


def test_sequences_that_begin_alike_lie_side_by_side() -> None:
    """Attention reads their common beginning once for those that are neighbours."""
    scheduler = make_scheduler()
    for request_id in (0, 1, 2, 3):
        add(scheduler, replace(make_request(request_id % 2, prompt_length=9, max_tokens=8), id=request_id))
        step(scheduler)
    [decoded] = step(scheduler)
    prompts = [request_id % 2 for request_id, _ in decoded]
    assert prompts in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_samples_that_lose_their_rows_wait_in_order_before_those_that_have_not_begun() -> None:
    scheduler = make_scheduler(slots=3)
    add(scheduler, make_request(0, prompt_length=6, max_tokens=5, n=5))
    step(scheduler)
    scheduler.requeue_all()
    [group] = scheduler.queue
    assert [(sample.index, sample.has_begun) for sample in group.samples] == [
        (0, True),
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]


@pytest.mark.parametrize("isolate", [False, True])
def test_while_closed_only_what_has_begun_goes_on(isolate: bool) -> None:
    """New weights wait for the running sequences; whatever began meanwhile would be of the old ones."""
    scheduler = make_scheduler(slots=4, isolate=isolate)
    begun, late = make_request(0, prompt_length=6, max_tokens=4, n=2), make_request(1, prompt_length=3, max_tokens=2)
    add(scheduler, begun)
    step(scheduler)
    scheduler.requeue_all()
    scheduler.closed = True
    add(scheduler, late)
    while scheduler.has_begun:
        step(scheduler)
    assert None not in begun.results
    step(scheduler)
    assert [group.request for group in scheduler.queue] == [late] and late.results == [None]
    scheduler.closed = False
    step(scheduler)
    assert not scheduler.queue


@settings(max_examples=80)
@given(
    requests=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(1, 9)), min_size=1, max_size=8),
    num_blocks=st.integers(6, 20),
    slots=st.integers(1, 6),
    tokens_per_step=st.integers(1, 20),
    isolate=st.booleans(),
    removed=st.integers(0, 7),
)
def test_every_request_finishes_whatever_the_room(
    requests: list[tuple[int, int, int]],
    num_blocks: int,
    slots: int,
    tokens_per_step: int,
    isolate: bool,
    removed: int,
) -> None:
    scheduler = make_scheduler(num_blocks, slots, tokens_per_step, isolate=isolate)
    added = [make_request(i, *request) for i, request in enumerate(requests)]
    for request in added:
        add(scheduler, request)
    for number in range(5000):
        if not scheduler.has_work:
            break
        if number == 3 and removed < len(added):
            scheduler.remove(added[removed])
        if number == 5:
            scheduler.requeue_all()
        step(scheduler)
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == num_blocks
    for request in added:
        if request.id == removed:
            continue
        for result in request.results:
            assert result is not None
            assert result.tokens.tolist() == [7] * request.sampling.max_tokens  # type: ignore[attr-defined]
