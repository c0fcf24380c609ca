"""Sequences end to end in micro-batches of bounded size; beginnings that are alike are there once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.packing import bundle_samples, concatenate, pack
from tandem.types.rollout import MicroBatch, Sample

EVERY_STREAM = ("token_ids", "positions", "loss_mask", "advantages", "logprobs")


def sample(number: int, num_prompt: int, num_learned: int, prompt: int | None = None) -> Sample:
    """Learned entries of every stream say which sample and which token they belong to."""
    prompt = number if prompt is None else prompt
    marks = [(number + 1) * 1000 + position for position in range(num_learned)]
    return Sample(
        token_ids=[prompt * 100 + position for position in range(num_prompt)] + marks,
        loss_mask=[0] * num_prompt + [1 - position % 2 for position in range(num_learned)],
        advantages=[0.0] * num_prompt + [mark + 0.25 for mark in marks],
        logprobs=[0.0] * num_prompt + [-mark - 0.5 for mark in marks],
    )


def unpack(micro_batch: MicroBatch) -> list[Sample]:
    """Every sequence of a micro-batch, put together again from its segments."""
    ends = micro_batch.segment_lengths.cumsum()
    starts = ends - micro_batch.segment_lengths
    assert ends[-1] == len(micro_batch.token_ids)
    parents = micro_batch.segment_parents.tolist()
    samples = []
    for segment, parent in enumerate(parents):
        if segment in parents:
            assert parent == -1 and not micro_batch.loss_mask[starts[segment] : ends[segment]].any()
            continue
        pieces = [segment] if parent == -1 else [parent, segment]
        indices = np.concatenate([np.arange(starts[piece], ends[piece]) for piece in pieces])
        streams = {name: getattr(micro_batch, name)[indices].tolist() for name in EVERY_STREAM}
        assert streams.pop("positions") == list(range(len(indices)))
        streams["loss_mask"] = [int(learned) for learned in streams["loss_mask"]]
        samples.append(Sample(**streams))
    return samples


def test_by_hand() -> None:
    """Lengths 3, 5, 2, 4 into 7: longest first gives [5, 2] and [4, 3]."""
    packed = pack([sample(0, 1, 2), sample(1, 3, 2), sample(2, 1, 1), sample(3, 2, 2)], 7)
    assert [batch.segment_lengths.tolist() for batch in packed] == [[5, 2], [4, 3]]
    assert [batch.segment_parents.tolist() for batch in packed] == [[-1, -1], [-1, -1]]
    assert packed[0].token_ids.tolist() == [100, 101, 102, 2000, 2001, 200, 3000]
    assert packed[0].positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert packed[0].loss_mask.tolist() == [False, False, False, True, False, False, True]
    assert packed[1].advantages.tolist() == [0.0, 0.0, 4000.25, 4001.25, 0.0, 1000.25, 1001.25]
    assert packed[0].num_loss_tokens == 2


def test_one_prompt_with_two_completions_by_hand() -> None:
    """A prompt of 3 and completions of 2 and 1: six tokens instead of nine."""
    (batch,) = pack([sample(0, 3, 2, prompt=7), sample(1, 3, 1, prompt=7)], 10)
    assert batch.token_ids.tolist() == [700, 701, 702, 1000, 1001, 2000]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert batch.segment_lengths.tolist() == [3, 2, 1]
    assert batch.segment_parents.tolist() == [-1, 0, 0]
    assert batch.loss_mask.tolist() == [False, False, False, True, False, True]
    assert batch.logprobs.tolist() == [0.0, 0.0, 0.0, -1000.5, -1001.5, -2000.5]


def test_a_group_above_the_bound_is_cut_and_its_prompt_repeated() -> None:
    alike = [sample(number, 3, 2, prompt=7) for number in range(3)]
    assert [len(bundle.samples) for bundle in bundle_samples(alike, 7)] == [2, 1]
    assert [batch.segment_lengths.tolist() for batch in pack(alike, 7)] == [[3, 2, 2], [5]]


def test_the_types_are_what_the_trainer_reads() -> None:
    batch = concatenate(bundle_samples([sample(1, 2, 1)], 8))
    whole = (batch.token_ids, batch.positions, batch.segment_lengths, batch.segment_parents)
    assert {stream.dtype for stream in whole} == {np.dtype(np.int64)}
    assert batch.loss_mask.dtype == np.bool_
    assert batch.advantages.dtype == batch.logprobs.dtype == np.float32


shapes = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10), st.integers(0, 2)), max_size=15)


@settings(max_examples=60)
@given(shapes, st.integers(20, 45))
def test_every_sample_is_packed_once_whole_and_within_bounds(cases: list[tuple[int, int, int]], bound: int) -> None:
    samples = [sample(number, *case) for number, case in enumerate(cases)]
    packed = pack(samples, bound)
    assert all(len(batch.token_ids) <= bound for batch in packed)
    unpacked = [found for batch in packed for found in unpack(batch)]
    own_token = {found.token_ids[found.loss_mask.index(1)]: found for found in unpacked}
    assert len(own_token) == len(unpacked) == len(samples)
    for expected in samples:
        assert own_token[expected.token_ids[expected.loss_mask.index(1)]] == expected


@settings(max_examples=60)
@given(shapes, st.integers(20, 45))
def test_sharing_never_costs_tokens(cases: list[tuple[int, int, int]], bound: int) -> None:
    samples = [sample(number, *case) for number, case in enumerate(cases)]
    packed = sum(len(batch.token_ids) for batch in pack(samples, bound))
    assert packed <= sum(len(found.token_ids) for found in samples)


@settings(max_examples=60)
@given(shapes, st.integers(20, 45))
def test_no_two_micro_batches_could_be_one(cases: list[tuple[int, int, int]], bound: int) -> None:
    packed = pack([sample(number, *case) for number, case in enumerate(cases)], bound)
    sizes = sorted(len(batch.token_ids) for batch in packed)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > bound


def test_a_sequence_above_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 8 tokens does not fit tokens_per_microbatch = 7"):
        pack([sample(0, 1, 1), sample(1, 5, 3)], 7)


def test_nothing_packs_to_nothing() -> None:
    assert pack([], 7) == []
