"""Packs training sequences end to end into micro-batches of bounded size. No padding, no torch.

Sequences that begin alike (the completions of one prompt) share that beginning: it is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.types.rollout import MicroBatch, Sample


@dataclass(frozen=True)
class Bundle:
    """Samples whose first `num_shared` tokens are the same and carry no loss; a single sample shares none."""

    samples: list[Sample]
    num_shared: int

    @property
    def num_tokens(self) -> int:
        return self.num_shared + sum(len(sample.token_ids) - self.num_shared for sample in self.samples)


def pack(samples: Sequence[Sample], tokens_per_microbatch: int) -> list[MicroBatch]:
    """Few micro-batches, found cheaply: largest bundle first, each into the first micro-batch that has room."""
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    if longest > tokens_per_microbatch:
        raise ValueError(f"a sequence of {longest} tokens does not fit tokens_per_microbatch = {tokens_per_microbatch}")
    bins: list[list[Bundle]] = []
    room: list[int] = []
    for bundle in sorted(bundle_samples(samples, tokens_per_microbatch), key=lambda bundle: -bundle.num_tokens):
        index = next((i for i, free in enumerate(room) if free >= bundle.num_tokens), None)
        if index is None:
            bins.append([])
            room.append(tokens_per_microbatch)
            index = len(bins) - 1
        bins[index].append(bundle)
        room[index] -= bundle.num_tokens
    return [concatenate(bundles) for bundles in bins]


def bundle_samples(samples: Sequence[Sample], max_tokens: int) -> list[Bundle]:
    """Samples with the same context before their first learned token go together, as many as fit."""
    by_context: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        by_context.setdefault(tuple(sample.token_ids[: num_context_tokens(sample)]), []).append(sample)
    bundles = []
    for context, alike in by_context.items():
        taken: list[Sample] = []
        size = len(context)
        for sample in alike:
            rest = len(sample.token_ids) - len(context)
            if taken and size + rest > max_tokens:
                bundles.append(_bundle(taken, len(context)))
                taken, size = [], len(context)
            taken.append(sample)
            size += rest
        bundles.append(_bundle(taken, len(context)))
    return bundles


def _bundle(samples: list[Sample], num_context: int) -> Bundle:
    return Bundle(samples, num_context if len(samples) > 1 else 0)


def num_context_tokens(sample: Sample) -> int:
    """Tokens before the first one that is learned."""
    return sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.loss_mask)


def concatenate(bundles: Sequence[Bundle]) -> MicroBatch:
    slices: list[tuple[Sample, int, int]] = []
    parents: list[int] = []
    for bundle in bundles:
        parent = -1
        if bundle.num_shared:
            parent = len(slices)
            slices.append((bundle.samples[0], 0, bundle.num_shared))
            parents.append(-1)
        for sample in bundle.samples:
            slices.append((sample, bundle.num_shared, len(sample.token_ids)))
            parents.append(parent)
    return MicroBatch(
        token_ids=_join([sample.token_ids[a:b] for sample, a, b in slices], np.int64),
        positions=np.concatenate([np.arange(a, b, dtype=np.int64) for _, a, b in slices]),
        segment_lengths=np.array([b - a for _, a, b in slices], dtype=np.int64),
        segment_parents=np.array(parents, dtype=np.int64),
        loss_mask=_join([sample.loss_mask[a:b] for sample, a, b in slices], np.bool_),
        advantages=_join([sample.advantages[a:b] for sample, a, b in slices], np.float32),
        logprobs=_join([sample.logprobs[a:b] for sample, a, b in slices], np.float32),
    )


def _join(streams: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(stream, dtype=dtype) for stream in streams])
