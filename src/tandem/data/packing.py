"""Packs training sequences end to end into micro-batches of bounded size. No padding, no torch."""

from collections.abc import Sequence

import numpy as np

from tandem.types.rollout import MicroBatch, Sample


def pack(samples: Sequence[Sample], tokens_per_microbatch: int) -> list[MicroBatch]:
    """Fewest micro-batches we can find cheaply: longest first, each into the first that has room."""
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    if longest > tokens_per_microbatch:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit tokens_per_microbatch = {tokens_per_microbatch}"
        )
    bins: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.token_ids)):
        length = len(sample.token_ids)
        index = next((i for i, free in enumerate(room) if free >= length), None)
        if index is None:
            bins.append([])
            room.append(tokens_per_microbatch)
            index = len(bins) - 1
        bins[index].append(sample)
        room[index] -= length
    return [concatenate(packed) for packed in bins]


def concatenate(samples: Sequence[Sample]) -> MicroBatch:
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    return MicroBatch(
        token_ids=_join([sample.token_ids for sample in samples], np.int64),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        sequence_lengths=lengths,
        loss_mask=_join([sample.loss_mask for sample in samples], np.bool_),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        logprobs=_join([sample.logprobs for sample in samples], np.float32),
    )


def _join(streams: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(stream, dtype=dtype) for stream in streams])
