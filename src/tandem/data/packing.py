"""Packs training sequences end to end, without padding and without computing anything twice. No torch.

Sequences that begin alike (the completions of one prompt) share that beginning, and sequences that are the same
to the end share everything. `pack` makes one batch of a whole step; `divide` cuts out of it what a rank computes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.data.balance import balance, fill
from tandem.types.rollout import PackedBatch, PackedKept, TrainingSequence

TokenIds = tuple[int, ...]
# Attention over so many tokens costs about as much as everything else does for one.
ATTENTION_TOKENS = 4096


@dataclass
class Ending:
    """What follows a context in one sequence, or in several that are the same to the end."""

    token_ids: TokenIds
    kept: Sequence[Sequence[int]]  # what each of them was drawn from; no entries where nothing was cut off
    numbers: list[int] = field(default_factory=list)  # of the sequences


def pack(samples: Sequence[TrainingSequence]) -> PackedBatch:
    """Sequence i of the batch is samples[i]."""
    contexts: dict[TokenIds, list[Ending]] = {}
    known: dict[tuple[TokenIds, int], list[Ending]] = {}
    for number, sample in enumerate(samples):
        num_context, token_ids = sample.num_context_tokens, tuple(sample.token_ids)
        if num_context < len(token_ids):
            alike = known.setdefault((token_ids, num_context), [])
            kept = sample.kept[num_context:]
            ending = next((ending for ending in alike if ending.kept == kept), None)
            if ending is None:
                ending = Ending(token_ids[num_context:], kept)
                alike.append(ending)
                contexts.setdefault(token_ids[:num_context], []).append(ending)
            ending.numbers.append(number)
    segments: list[TokenIds] = []
    kept_tokens: dict[int, Sequence[int]] = {}  # by the place of the token that was drawn from them
    offsets: list[int] = []  # of each segment in its sequence
    parents: list[int] = []
    num_tokens = 0
    first_tokens = [0] * len(samples)  # where the first token of each sequence lies, or would lie if it did not share
    for context, endings in contexts.items():
        shared = len(endings) > 1
        parent = len(segments) if shared else -1
        if shared:
            segments.append(context)
            offsets.append(0)
            parents.append(-1)
            num_tokens += len(context)
        for ending in endings:
            segments.append(ending.token_ids if shared else context + ending.token_ids)
            offsets.append(len(context) if shared else 0)
            parents.append(parent)
            for number in ending.numbers:
                first_tokens[number] = num_tokens - offsets[-1]
            num_tokens += len(segments[-1])
            first = num_tokens - len(ending.kept)
            kept_tokens |= {first + i: ids for i, ids in enumerate(ending.kept) if ids}
    learned = [np.flatnonzero(sample.loss_mask) for sample in samples]
    lengths = np.array([len(segment) for segment in segments], dtype=np.int64)
    return PackedBatch(
        token_ids=_join(segments, np.int64),
        positions=_ranges(np.array(offsets, dtype=np.int64), lengths),
        segment_lengths=lengths,
        segment_parents=np.array(parents, dtype=np.int64),
        targets=_join([tokens + first for tokens, first in zip(learned, first_tokens, strict=True)], np.int64),
        sequences=np.repeat(np.arange(len(samples)), [len(tokens) for tokens in learned]),
        num_sequences=len(samples),
        streams={
            name: _join(
                [np.take(s.streams[name], tokens) for s, tokens in zip(samples, learned, strict=True)], np.float32
            )
            for name in (samples[0].streams if samples else ())
        },
        kept=_pack_kept(kept_tokens, num_tokens) if kept_tokens else None,
    )


def _pack_kept(kept_tokens: Mapping[int, Sequence[int]], num_tokens: int) -> PackedKept:
    """`kept_tokens` in the order of the places."""
    counts = np.zeros(num_tokens, dtype=np.int64)
    counts[list(kept_tokens)] = [len(ids) for ids in kept_tokens.values()]
    ids = itertools.chain.from_iterable(kept_tokens.values())
    return PackedKept(counts, np.fromiter(ids, np.int64, count=counts.sum()))


def take_kept(kept: PackedKept, tokens: NDArray[np.int64]) -> PackedKept:
    """Of some of the tokens."""
    counts = kept.counts[tokens]
    return PackedKept(counts, kept.token_ids[_ranges(_starts(kept.counts)[tokens], counts)])


def take(batch: PackedBatch, sequences: NDArray[np.int64]) -> PackedBatch:
    """The batch of some of its sequences, numbered anew in ascending order."""
    starts = _starts(batch.segment_lengths)
    number = np.full(batch.num_sequences, -1, dtype=np.int64)
    sequences = np.sort(sequences)
    number[sequences] = np.arange(len(sequences))
    is_taken = number[batch.sequences] >= 0
    segments_of_targets = _segments_of(batch)[is_taken]
    segments = _needed_segments(batch, segments_of_targets)
    needed = np.isin(np.arange(len(starts)), segments)
    new_segment = np.cumsum(needed) - 1
    lengths = batch.segment_lengths[segments]
    moved = np.zeros(len(starts), dtype=np.int64)  # by how much the tokens of each segment that is taken move
    moved[segments] = _starts(lengths) - starts[segments]
    tokens = _ranges(starts[segments], lengths)
    parents = batch.segment_parents[segments]
    return PackedBatch(
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        segment_lengths=lengths,
        segment_parents=np.where(parents >= 0, new_segment[parents], -1),
        targets=batch.targets[is_taken] + moved[segments_of_targets],
        sequences=number[batch.sequences[is_taken]],
        num_sequences=len(sequences),
        streams={name: stream[is_taken] for name, stream in batch.streams.items()},
        kept=None if batch.kept is None else take_kept(batch.kept, tokens),
    )


def split(batch: PackedBatch, num_parts: int, seed: int) -> list[PackedBatch]:
    """The batch in parts of about as many sequences, those that share a beginning together, drawn by lot."""
    if num_parts == 1:
        return [batch]
    units = _units(batch, most_tokens=batch.num_tokens)
    order = np.random.default_rng(seed).permutation(len(units))
    parts = [[units[unit] for unit in order[first::num_parts]] for first in range(num_parts)]
    return [take(batch, np.concatenate(members)) for members in parts if members]


def divide(
    batch: PackedBatch, rank: int, world_size: int, tokens_per_microbatch: int, groups: NDArray[np.int64] | None = None
) -> list[PackedBatch]:
    """The micro-batches of one rank: the same number on every rank, at about the same cost; dummy ones fill up.

    Sequences with the same number in `groups` (one entry per sequence) stay in one micro-batch; without it, those
    that share a beginning do, as far as they fit.
    """
    if world_size == 1 and batch.num_tokens <= tokens_per_microbatch:
        return [batch]
    most_tokens = min(tokens_per_microbatch, -(-batch.num_tokens // world_size))
    units = _units(batch, most_tokens) if groups is None else [np.flatnonzero(groups == g) for g in np.unique(groups)]
    leaf, costs = leaves(batch), segment_costs(batch)
    needed = [_needed_segments(batch, leaf[unit]) for unit in units]
    sizes = [int(batch.segment_lengths[segments].sum()) for segments in needed]
    largest = max(sizes, default=0)
    if largest > tokens_per_microbatch:
        raise ValueError(f"a sequence of {largest} tokens does not fit tokens_per_microbatch = {tokens_per_microbatch}")
    per_rank = balance([float(costs[segments].sum()) for segments in needed], world_size)
    bins = [fill(members, sizes, tokens_per_microbatch) for members in per_rank]
    most = max(len(rank_bins) for rank_bins in bins)
    own = [take(batch, np.concatenate([units[unit] for unit in members])) for members in bins[rank]]
    return own + [dummy_micro_batch(batch)] * (most - len(own))


def segment_costs(batch: PackedBatch) -> NDArray[np.float64]:
    """What each segment costs, in tokens: attention grows with the context that each of them sees."""
    return np.add.reduceat(1 + batch.positions / ATTENTION_TOKENS, _starts(batch.segment_lengths))


def dummy_micro_batch(batch: PackedBatch) -> PackedBatch:
    """A dummy micro-batch: one token, no loss. Ranks with fewer micro-batches run it, so collectives match."""
    nothing = np.zeros(0, dtype=np.int64)
    return PackedBatch(
        token_ids=batch.token_ids[:1],
        positions=np.zeros(1, dtype=np.int64),
        segment_lengths=np.ones(1, dtype=np.int64),
        segment_parents=np.full(1, -1, dtype=np.int64),
        targets=nothing,
        sequences=nothing,
        num_sequences=0,
        streams={name: np.zeros(0, dtype=np.float32) for name in batch.streams},
    )


def leaves(batch: PackedBatch) -> NDArray[np.int64]:
    """(sequences,): the segment that each sequence ends in; -1 for one without learned tokens."""
    segments = np.full(batch.num_sequences, -1, dtype=np.int64)
    segments[batch.sequences] = _segments_of(batch)
    return segments


def _needed_segments(batch: PackedBatch, leaf: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those that the sequences with these leaves consist of, each once."""
    own = np.unique(leaf[leaf >= 0])
    parents = batch.segment_parents[own]
    return np.union1d(own, parents[parents >= 0])


def _units(batch: PackedBatch, most_tokens: int) -> list[NDArray[np.int64]]:
    """Sequences that share something, in pieces of about `most_tokens`; those without learned tokens are left out."""
    leaf = leaves(batch)
    with_loss = np.flatnonzero(leaf >= 0)
    parents = batch.segment_parents[leaf[with_loss]]
    root = np.where(parents >= 0, parents, leaf[with_loss])
    units: list[NDArray[np.int64]] = []
    for tree in np.unique(root):
        members = with_loss[root == tree]
        members = members[np.argsort(leaf[members], kind="stable")]
        piece: list[int] = []
        size, last_leaf = 0, -1
        for sequence in members.tolist():
            added = int(batch.segment_lengths[leaf[sequence]]) if leaf[sequence] != last_leaf else 0
            shared = int(batch.segment_lengths[tree]) if leaf[sequence] != tree else 0
            if piece and added and size + added > most_tokens:
                units.append(np.array(piece))
                piece, size = [], 0
            size += added + (0 if piece else shared)
            piece.append(sequence)
            last_leaf = leaf[sequence]
        units.append(np.array(piece))
    return units


def _segments_of(batch: PackedBatch) -> NDArray[np.int64]:
    """(loss tokens,): the segment each target lies in."""
    return np.searchsorted(batch.segment_lengths.cumsum(), batch.targets, side="right")


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return lengths.cumsum() - lengths


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, … for lengths[0] numbers, then the same for the next."""
    return np.arange(lengths.sum()) + np.repeat(starts - _starts(lengths), lengths)


def _join(parts: Sequence[Sequence[float] | NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts]) if parts else np.zeros(0, dtype=dtype)
