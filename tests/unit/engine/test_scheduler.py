"""Admission, chunking, forking and preemption, without a model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.blocks import BlockManager
from tandem.engine.protocol import GenerationRequest, Sampling
from tandem.engine.scheduler import Scheduler
from tandem.engine.state import Request, Sample, SlotState

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
    add(scheduler, make_request(2, prompt_length=1, max_tokens=1))
    assert step(scheduler) == [[(0, 1), (1, 5)]]
    assert [group.request.id for group in scheduler.queue] == [2], "the prompt before it takes the whole step"
    assert step(scheduler) == [[(0, 1), (2, 1), (1, 2)]]
    assert step(scheduler) == [[(1, 1)]]
    assert not scheduler.has_work


def test_a_prompt_of_two_tokens_takes_its_share_of_a_step_and_decoding_rows_take_none() -> None:
    scheduler = make_scheduler(tokens_per_step=2)
    add(scheduler, make_request(0, prompt_length=4, max_tokens=9))
    assert step(scheduler) == [[(0, 2)]]
    add(scheduler, make_request(1, prompt_length=1, max_tokens=9))
    assert step(scheduler) == [[(0, 2)]]
    assert scheduler.num_waiting == 1
    assert step(scheduler) == [[(0, 1), (1, 1)]]
    add(scheduler, make_request(2, prompt_length=2, max_tokens=9))
    assert step(scheduler) == [[(0, 1), (1, 1), (2, 2)]]
    one_by_one = make_scheduler(tokens_per_step=1)
    add(one_by_one, make_request(0, prompt_length=2, max_tokens=2))
    assert [step(one_by_one) for _ in range(3)] == [[[(0, 1)]]] * 3


def test_isolated_requests_are_never_batched_together() -> None:
    scheduler = make_scheduler(isolate=True)
    add(scheduler, make_request(0, 3, 2, n=2))
    add(scheduler, make_request(1, 5, 2))
    assert step(scheduler) == [[(0, 3)], [(1, 5)]]
    assert step(scheduler) == [[(0, 1), (0, 1)], [(1, 1)]]
    add(scheduler, make_request(1, 5, 2))
    assert step(scheduler) == [[(1, 5)]], "nor do they share what is cached"


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


@pytest.mark.parametrize(("num_blocks", "slots", "max_tokens"), [(5, 3, 4), (5, 8, 4), (8, 8, 8), (99, 3, 4)])
def test_a_wave_of_an_isolated_request_takes_all_that_fits(num_blocks: int, slots: int, max_tokens: int) -> None:
    """Two blocks for the prompt, and one or two for each of three samples."""
    scheduler = make_scheduler(num_blocks, slots, isolate=True)
    add(scheduler, make_request(0, prompt_length=8, max_tokens=max_tokens, n=7))
    assert step(scheduler) == [[(0, 8)]]
    assert step(scheduler) == [[(0, 1)] * 3]


def test_as_many_samples_are_admitted_as_there_are_blocks_for() -> None:
    """Two blocks for the prompt, computed or cached, and one for each sample."""
    scheduler = make_scheduler(num_blocks=4)
    for computed in (9, 1):
        add(scheduler, make_request(0, prompt_length=9, max_tokens=2, n=3))
        assert step(scheduler) == [[(0, computed)]]
        assert scheduler.num_waiting == 1 and scheduler.blocks.num_free == 0
        while scheduler.has_work:
            step(scheduler)


def test_a_block_is_left_for_every_four_running_sequences() -> None:
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, make_request(0, prompt_length=1, max_tokens=3, n=4))
    step(scheduler)
    add(scheduler, make_request(1, prompt_length=1, max_tokens=3, n=2))
    assert step(scheduler) == [[(0, 1)] * 4 + [(1, 1)]]
    assert scheduler.num_waiting == 1


def test_a_sequence_takes_a_block_when_it_has_filled_its_last() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(0, prompt_length=3, max_tokens=9))
    free = []
    for _ in range(7):
        step(scheduler)
        free.append(scheduler.blocks.num_free)
    assert free == [31, 31, 30, 30, 30, 30, 29]


def test_a_group_whose_prompt_is_not_computed_yet_gives_way_as_a_whole() -> None:
    scheduler = make_scheduler(num_blocks=7, tokens_per_step=2)
    add(scheduler, make_request(0, prompt_length=4, max_tokens=12))
    add(scheduler, make_request(1, prompt_length=9, max_tokens=2, n=3))
    assert step(scheduler) == step(scheduler) == [[(0, 2)]]
    for _ in range(4):
        assert step(scheduler) == [[(0, 1), (1, 2)]]
    assert scheduler.blocks.num_free == 0 and scheduler.num_preemptions == 0
    assert step(scheduler) == [[(0, 1)]]
    assert scheduler.num_preemptions == 1
    [group] = scheduler.queue
    assert [sample.index for sample in group.samples] == [0, 1, 2]
    assert step(scheduler) == [[(0, 1), (1, 2)]]
    assert scheduler.num_waiting == 1, "there is room for two of the three"


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


def test_what_was_generated_before_counts_among_the_tokens_of_a_step() -> None:
    scheduler = make_scheduler(tokens_per_step=5)
    add(scheduler, make_request(0, prompt_length=3, max_tokens=6, n=3))
    for _ in range(3):
        step(scheduler)
    scheduler.requeue_all()
    add(scheduler, make_request(1, prompt_length=4, max_tokens=2))
    assert step(scheduler) == [[(0, 3)]]
    assert step(scheduler) == [[(0, 3), (0, 2)]]
    assert scheduler.num_waiting == 1, "two samples are still to be computed again"
    assert step(scheduler) == [[(0, 1), (0, 1), (0, 3), (1, 2)]]


def test_a_group_may_be_requeued_or_removed_while_its_prompt_is_computed() -> None:
    scheduler = make_scheduler(tokens_per_step=3)
    request, other = make_request(0, prompt_length=8, max_tokens=2, n=3), make_request(1, 2, 2)
    add(scheduler, request)
    assert step(scheduler) == [[(0, 3)]]
    scheduler.requeue_all()
    scheduler.check_invariants()
    assert [sample.index for sample in scheduler.queue[0].samples] == [0, 1, 2]
    add(scheduler, other)
    assert step(scheduler) == [[(0, 3)]]
    assert {sample.index for sample in scheduler.remove(request)} == {0, 1, 2}
    scheduler.check_invariants()
    assert [group.request for group in scheduler.queue] == [other]
    assert step(scheduler) == [[(1, 2)]]
    assert scheduler.has_begun


def test_a_removed_request_is_forgotten_wherever_it_stands() -> None:
    scheduler = make_scheduler(slots=2)
    request, other = make_request(0, prompt_length=2, max_tokens=5, n=4), make_request(1, 2, 2)
    add(scheduler, request)
    add(scheduler, other)
    step(scheduler)
    step(scheduler)
    removed = scheduler.remove(request)
    assert [(sample.index, sample.tokens.tolist()) for sample in removed] == [
        (0, [7] * 2),
        (1, [7] * 2),
        (2, []),
        (3, []),
    ]
    scheduler.check_invariants()
    assert [group.request for group in scheduler.queue] == [other] and scheduler.num_waiting == 1
    assert scheduler.remove(request) == []
    assert len(scheduler.remove(other)) == 1 and not scheduler.has_work


def test_a_request_has_begun_while_one_of_its_samples_runs_or_has_run() -> None:
    scheduler = make_scheduler(slots=2)
    request, other = make_request(0, prompt_length=2, max_tokens=5, n=3), make_request(1, 2, 2)
    add(scheduler, request)
    add(scheduler, other)
    assert not scheduler.has_begun and not scheduler.has_begun_one_of(request)
    step(scheduler)
    assert scheduler.has_begun_one_of(request) and not scheduler.has_begun_one_of(other)
    scheduler.requeue_all()
    assert scheduler.has_begun and scheduler.has_begun_one_of(request) and not scheduler.has_begun_one_of(other)


def test_the_samples_of_a_prompt_draw_from_its_last_row_and_copy_its_last_block() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(0, prompt_length=8, max_tokens=3, n=2))
    add(scheduler, make_request(1, prompt_length=6, max_tokens=3, n=3))
    scheduler.prepare_step()
    [(leaders, chunk)] = scheduler.batches()
    assert chunk.tolist() == [8, 6]
    scheduler.state.computed[leaders] += chunk
    fork = scheduler.fork(leaders)
    assert [owner(scheduler, slot) for slot in fork.drawing] == [0, 0, 1, 1, 1]
    assert fork.logits_index is not None and fork.logits_index.tolist() == [0, 0, 1, 1, 1]
    last = scheduler.state.block_table[fork.drawing[2:], 1].tolist()
    assert fork.copy_from.tolist() == last[:1] * 2 and fork.copy_to.tolist() == last[1:]
    again = scheduler.fork(fork.drawing)
    assert again.drawing is fork.drawing and again.logits_index is None
    assert len(again.copy_from) == len(again.copy_to) == 0


def test_a_row_whose_last_token_is_in_flight_waits_for_it() -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(0, prompt_length=3, max_tokens=2))
    step(scheduler)
    [(rows, chunk)] = scheduler.batches()
    scheduler.state.computed[rows] += chunk
    scheduler.state.reserve(rows)
    assert scheduler.batches() == []
    assert scheduler.finish(rows[0]).tokens.tolist() == [7], "what is not known yet is given up"


def test_what_is_cached_is_not_computed_again() -> None:
    """The last token of a prompt always is: a token is drawn from it."""
    scheduler = make_scheduler()
    for length, computed in ((17, 17), (17, 1), (16, 4), (3, 3)):
        add(scheduler, make_request(0, length, max_tokens=2))
        assert step(scheduler) == [[(0, computed)]]
        scheduler.requeue_all()  # it is counted once, and what it had computed is still known
        while scheduler.has_work:
            step(scheduler)
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (17 + 17 + 16 + 3, 16 + 12)


def test_cached_tokens_take_no_room_in_a_step() -> None:
    scheduler = make_scheduler(tokens_per_step=9)
    add(scheduler, make_request(0, prompt_length=9, max_tokens=1))
    step(scheduler)
    add(scheduler, make_request(0, prompt_length=9, max_tokens=1))
    add(scheduler, make_request(1, prompt_length=9, max_tokens=1))
    assert step(scheduler) == [[(0, 1), (1, 9)]]


@pytest.mark.parametrize("prompt_length", [3, 6, 8])
def test_the_next_turn_shares_all_that_was_computed(prompt_length: int) -> None:
    scheduler = make_scheduler()
    add(scheduler, make_request(0, prompt_length, max_tokens=17 - prompt_length))
    while scheduler.has_work:
        step(scheduler)
    turn = [*range(prompt_length), *[7] * (17 - prompt_length), 9]
    add(scheduler, Request(1, GenerationRequest(turn, Sampling(1)), 0, lambda outcome: None))
    assert step(scheduler) == [[(1, 2)]], "16 tokens were computed: the last one drawn never was"


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_forgotten_is_not_remembered_by_those_that_go_on(n: int) -> None:
    """They have computed their prompt before."""
    scheduler = make_scheduler()
    add(scheduler, make_request(0, prompt_length=9, max_tokens=3, n=n))
    step(scheduler)
    scheduler.blocks.forget()
    while scheduler.has_work:
        step(scheduler)
    add(scheduler, make_request(0, prompt_length=9, max_tokens=3))
    assert step(scheduler) == [[(0, 9)]]


def test_a_block_that_nobody_holds_is_noticed() -> None:
    scheduler = make_scheduler()
    scheduler.blocks.allocate(1)
    with pytest.raises(AssertionError, match="holder counts differ"):
        scheduler.check_invariants()


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
        add(scheduler, replace(make_request(request_id % 2, prompt_length=6, max_tokens=8), id=request_id))
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
