"""Sequences end to end, nothing twice; cut into micro-batches for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tandem.data.packing import divide, pack, segment_costs, split, take
from tandem.types.rollout import PackedBatch, TrainingSequence


def sample(number: int, num_prompt: int, num_learned: int, prompt: int | None = None) -> TrainingSequence:
    """Learned entries of every stream say which sample and which token they belong to."""
    prompt = number if prompt is None else prompt
    marks = [(number + 1) * 1000 + position for position in range(num_learned)]
    return make(prompt, num_prompt, marks, [1 - position % 2 for position in range(num_learned)], number)


def make(prompt: int, num_prompt: int, completion: list[int], mask: list[int], number: int) -> TrainingSequence:
    marks = [(number + 1) * 1000 + position for position in range(len(completion))]
    return TrainingSequence(
        token_ids=[prompt * 100 + position for position in range(num_prompt)] + completion,
        loss_mask=[0] * num_prompt + mask,
        streams={
            "advantages": [0.0] * num_prompt + [mark + 0.25 for mark in marks],
            "logprobs": [0.0] * num_prompt + [-mark - 0.5 for mark in marks],
        },
        kept=[()] * num_prompt + [kept_at(position, number // 3) for position in range(len(completion))],
    )


def kept_at(position: int, kind: int) -> list[int]:
    """The kept tokens at a token: some for every other token of most sequences."""
    return list(range(position, 2 * position + 1 + kind)) if kind and position % 2 else []


def divide_all(
    batch: PackedBatch, world_size: int, bound: int, groups: NDArray[np.int64] | None = None
) -> list[list[PackedBatch]]:
    return [divide(batch, rank, world_size, bound, groups) for rank in range(world_size)]


Unpacked = tuple[list[int], list[int], dict[str, list[float]], list[list[int]]]


def kept_of(batch: PackedBatch) -> list[list[int]]:
    if batch.kept is None:
        return [[]] * batch.num_tokens
    assert len(batch.kept.counts) == batch.num_tokens and batch.kept.counts.sum() == len(batch.kept.token_ids)
    return [part.tolist() for part in np.split(batch.kept.token_ids, batch.kept.counts.cumsum()[:-1])]


def unpack(batch: PackedBatch) -> list[Unpacked]:
    """Every sequence put together again: its tokens, which of them are learned, and what the streams say of those."""
    ends = batch.segment_lengths.cumsum()
    starts = ends - batch.segment_lengths
    assert (ends[-1] if len(ends) else 0) == batch.num_tokens
    found = []
    for sequence in range(batch.num_sequences):
        mine = batch.sequences == sequence
        targets = batch.targets[mine]
        segment = int(np.searchsorted(ends, targets[0], side="right"))
        parent = int(batch.segment_parents[segment])
        pieces = [segment] if parent == -1 else [parent, segment]
        indices = np.concatenate([np.arange(starts[piece], ends[piece]) for piece in pieces])
        assert batch.positions[indices].tolist() == list(range(len(indices)))
        learned = [indices.tolist().index(target) for target in targets]
        streams = {name: stream[mine].tolist() for name, stream in batch.streams.items()}
        kept = [kept_of(batch)[target] for target in targets]
        found.append((batch.token_ids[indices].tolist(), learned, streams, kept))
    return found


def expected(samples: list[TrainingSequence]) -> list[Unpacked]:
    def learned(found: TrainingSequence) -> list[int]:
        return np.flatnonzero(found.loss_mask).tolist()

    return [
        (
            s.token_ids,
            learned(s),
            {name: [stream[t] for t in learned(s)] for name, stream in s.streams.items()},
            [list(s.kept[t]) for t in learned(s)],
        )
        for s in samples
    ]


def test_two_sequences_by_hand() -> None:
    batch = pack([sample(0, 1, 2), sample(1, 3, 3)])
    assert batch.token_ids.tolist() == [0, 1000, 1001, 100, 101, 102, 2000, 2001, 2002]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert (batch.segment_lengths.tolist(), batch.segment_parents.tolist()) == ([3, 6], [-1, -1])
    assert (batch.targets.tolist(), batch.sequences.tolist()) == ([1, 6, 8], [0, 1, 1])
    assert batch.streams["advantages"].tolist() == [1000.25, 2000.25, 2002.25]
    assert (batch.num_tokens, batch.num_loss_tokens, batch.num_sequences) == (9, 3, 2)


def test_one_prompt_with_two_completions_by_hand() -> None:
    """A prompt of 3 and completions of 2 and 1: six tokens instead of nine."""
    batch = pack([sample(0, 3, 2, prompt=7), sample(1, 3, 1, prompt=7)])
    assert batch.token_ids.tolist() == [700, 701, 702, 1000, 1001, 2000]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert (batch.segment_lengths.tolist(), batch.segment_parents.tolist()) == ([3, 2, 1], [-1, 0, 0])
    assert (batch.targets.tolist(), batch.sequences.tolist()) == ([3, 5], [0, 1])
    assert batch.streams["logprobs"].tolist() == [-1000.5, -2000.5]


def test_the_same_completion_twice_by_hand() -> None:
    """Computed once, learned twice, each with its own advantage."""
    batch = pack([make(7, 2, [8, 9], [1, 1], 0), make(7, 2, [8], [1], 1), make(7, 2, [8, 9], [1, 1], 2)])
    assert batch.token_ids.tolist() == [700, 701, 8, 9, 8]
    assert (batch.targets.tolist(), batch.sequences.tolist()) == ([2, 3, 4, 2, 3], [0, 0, 1, 2, 2])
    assert batch.streams["advantages"].tolist() == [1000.25, 1001.25, 2000.25, 3000.25, 3001.25]


def test_a_sequence_without_a_learned_token_is_counted_and_not_computed() -> None:
    batch = pack([sample(0, 1, 1), TrainingSequence([5, 6], [0, 0], {"advantages": [0, 0], "logprobs": [0, 0]})])
    assert (batch.num_sequences, batch.token_ids.tolist()) == (2, [0, 1000])
    assert [len(part) for part in divide_all(batch, 2, 10)] == [1, 1]


def test_the_types_are_what_the_trainer_reads() -> None:
    for batch in (pack([sample(1, 2, 1)]), *divide(pack([sample(1, 2, 1), sample(2, 2, 1)]), 2, 3, 8)):
        whole = (batch.token_ids, batch.positions, batch.segment_lengths, batch.segment_parents)
        assert {part.dtype for part in (*whole, batch.targets, batch.sequences)} == {np.dtype(np.int64)}
        assert {stream.dtype for stream in batch.streams.values()} == {np.dtype(np.float32)}


# Prompt, its length, the completion's length, and which completion of that prompt it is: some are the same.
shapes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 8), st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=14
)


def samples_of(cases: list[tuple[int, int, int, int]]) -> list[TrainingSequence]:
    return [
        make(
            prompt, num_prompt, [50 + kind * 10 + i for i in range(length)], [1 - i % 2 for i in range(length)], number
        )
        for number, (prompt, num_prompt, length, kind) in enumerate(cases)
    ]


@settings(max_examples=80)
@given(shapes)
def test_every_sample_comes_out_as_it_went_in(cases) -> None:
    samples = samples_of(cases)
    batch = pack(samples)
    assert unpack(batch) == expected(samples)
    assert batch.num_tokens <= sum(len(found.token_ids) for found in samples)


@settings(max_examples=80)
@given(shapes, st.data())
def test_some_sequences_are_taken_whole_and_nothing_else(cases, data) -> None:
    samples = samples_of(cases)
    chosen = data.draw(st.lists(st.sampled_from(range(len(samples))), unique=True))
    part = take(pack(samples), np.array(chosen, dtype=np.int64))
    assert unpack(part) == expected([samples[number] for number in sorted(chosen)])
    assert part.num_tokens <= sum(len(samples[number].token_ids) for number in chosen)


@settings(max_examples=80)
@given(shapes, st.integers(1, 4), st.integers(14, 60))
def test_ranks_get_every_sequence_once_and_as_many_micro_batches(cases, world_size: int, bound: int) -> None:
    samples = samples_of(cases)
    ranks = divide_all(pack(samples), world_size, bound)
    assert len(ranks) == world_size
    assert len({len(micro_batches) for micro_batches in ranks}) == 1
    parts = [part for micro_batches in ranks for part in micro_batches]
    assert all(part.num_tokens <= bound for part in parts)
    found = [entry for part in parts for entry in unpack(part)]
    assert sorted(map(repr, found)) == sorted(map(repr, expected(samples)))


@settings(max_examples=50)
@given(shapes, st.integers(1, 3))
def test_groups_stay_together(cases, world_size: int) -> None:
    samples = samples_of(cases * 2)
    groups = np.arange(len(samples)) // 2
    for micro_batches in divide_all(pack(samples), world_size, 60, groups):
        for part in micro_batches:
            marks = {int(entry[2]["advantages"][0]) // 1000 - 1 for entry in unpack(part)}
            assert all((number ^ 1) in marks for number in marks)


def test_ranks_are_balanced_by_cost() -> None:
    """Sixteen sequences of 5 to 20 tokens, 200 in all, on four ranks: 50 each, give or take the smallest."""
    samples = [sample(number, 2, 3 + number) for number in range(16)]
    ranks = divide_all(pack(samples), 4, 1000)
    costs = [sum(float(segment_costs(part).sum()) for part in micro_batches) for micro_batches in ranks]
    assert sum(sum(part.num_tokens for part in micro_batches) for micro_batches in ranks) == 200
    assert max(costs) - min(costs) <= 5


def test_a_long_sequence_costs_more_than_its_tokens() -> None:
    long, short = pack([sample(0, 8192, 1)]), pack([sample(number, 1024, 1) for number in range(8)])
    assert long.num_tokens < short.num_tokens
    assert segment_costs(long).sum() > segment_costs(short).sum()


def test_a_rank_without_data_takes_part() -> None:
    ranks = divide_all(pack([sample(0, 2, 2)]), 3, 10)
    assert [part.num_loss_tokens for micro_batches in ranks for part in micro_batches] == [1, 0, 0]
    assert all(part.num_tokens == 1 for part in ranks[1] + ranks[2])


def test_one_group_is_cut_for_several_ranks() -> None:
    """Four completions of one prompt on two ranks: two each, the prompt on both."""
    ranks = divide_all(pack([sample(number, 3, 4, prompt=7) for number in range(4)]), 2, 100)
    assert [[part.segment_lengths.tolist() for part in micro_batches] for micro_batches in ranks] == [[[3, 4, 4]]] * 2


def test_a_completion_that_came_twice_is_computed_on_one_rank() -> None:
    """However long it is beside what each of two ranks should compute."""
    twins = [make(7, 10, [8, 9, 8, 9], [1] * 4, number) for number in range(2)]
    ranks = divide_all(pack([*twins, make(7, 10, [50, 51, 52, 53], [1] * 4, 2)]), 2, 100)
    assert [[part.num_tokens for part in micro_batches] for micro_batches in ranks] == [[14], [14]]
    assert sorted(part.num_sequences for micro_batches in ranks for part in micro_batches) == [1, 2]


def test_micro_batches_are_filled_to_the_bound() -> None:
    """Sequences of 7, 7, 3 and 3 tokens in micro-batches of 10: two, with no room left."""
    lengths = [(2, 5), (1, 2), (2, 5), (1, 2)]
    samples = [sample(number, *shape, prompt=10 * number) for number, shape in enumerate(lengths)]
    assert [part.num_tokens for part in divide(pack(samples), 0, 1, 10)] == [10, 10]


@settings(max_examples=40)
@given(shapes, st.integers(1, 3), st.integers(0, 5))
def test_a_split_holds_every_sequence_once(cases, num_parts: int, seed: int) -> None:
    samples = samples_of(cases)
    parts = split(pack(samples), num_parts, seed)
    found = [entry for part in parts for entry in unpack(part)]
    assert sorted(map(repr, found)) == sorted(map(repr, expected(samples)))
    assert len(parts) <= num_parts


def test_a_split_is_drawn_by_its_seed() -> None:
    """The same again by the same seed, others by others, but for chance."""
    batch = pack([sample(number, 2, 3, prompt=10 * number) for number in range(8)])

    def drawn(seed: int) -> list[list[int]]:
        return [part.token_ids.tolist() for part in split(batch, 2, seed)]

    assert all(drawn(seed) == drawn(seed) for seed in range(8))
    assert len({str(drawn(seed)) for seed in range(8)}) > 5


def test_a_sequence_above_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 8 tokens does not fit tokens_per_microbatch = 7"):
        divide(pack([sample(0, 1, 1), sample(1, 5, 3)]), 0, 1, 7)
