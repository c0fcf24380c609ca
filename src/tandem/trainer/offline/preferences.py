"""Rows of preference data as batches: pairs stay together, and every token knows its label, margin and reference."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.config.data import Texts
from tandem.data.conversations import Fields, Fit
from tandem.data.packing import divide, pack
from tandem.data.preferences import encode_labeled_row, encode_preference_row
from tandem.data.tokenizer import Tokenizer
from tandem.models.padding import without_padding
from tandem.types.rollout import PackedBatch, TrainingSequence

LABELS, MARGINS, REFERENCE = "labels", "margins", "reference_logprobs"
GOOD, BAD = 1.0, 0.0
LARGEST_MARGIN = float(np.finfo(np.float32).max)  # JSON can spell NaN, infinity and what float32 cannot hold


@dataclass(frozen=True)
class AlignRow:
    """A pair of completions, the better one first; or one completion that is good or bad."""

    samples: tuple[TrainingSequence, ...]
    labels: tuple[float, ...]  # of each sample
    margin: float = 0.0  # of a pair: by how much the chosen one should win
    reference: tuple[NDArray[np.float32], ...] | None = None  # of each sample, the log-probs of its learned tokens


@dataclass(frozen=True)
class AlignBatch:
    """Rows packed into one batch; the samples of a row go into the same micro-batch."""

    packed: PackedBatch
    groups: NDArray[np.int64]  # (sequences,): the row each belongs to
    mean_chosen_length: float  # tokens of a good completion
    num_good: int  # completions with a good label

    @classmethod
    def of(cls, rows: Sequence[AlignRow]) -> "AlignBatch":
        samples = [sample for row in rows for sample in row.samples]
        labels = np.array([label for row in rows for label in row.labels], dtype=np.float32)
        margins = np.array([row.margin for row in rows], dtype=np.float32)
        groups = np.repeat(np.arange(len(rows)), [len(row.samples) for row in rows])
        packed = pack(samples)
        streams = {LABELS: labels[packed.sequences], MARGINS: margins[groups[packed.sequences]]}
        if rows[0].reference is not None:
            streams[REFERENCE] = np.concatenate([part for row in rows for part in row.reference or ()])
        good_lengths = np.bincount(packed.sequences, minlength=len(samples))[labels == GOOD]
        mean_length = float(good_lengths.mean()) if good_lengths.any() else 1.0
        return cls(replace(packed, streams=streams), groups, mean_length, int(np.count_nonzero(good_lengths)))

    @property
    def num_rows(self) -> int:
        return int(self.groups[-1]) + 1

    def divide(self, rank: int, world_size: int, tokens_per_microbatch: int) -> list[PackedBatch]:
        return divide(self.packed, rank, world_size, tokens_per_microbatch, self.groups)


def encode_align_row(
    row: Fields,
    fit: Fit,
    tokenizer: Tokenizer,
    loss: AlignLossConfig,
    texts: Texts = "chat",
    padding: int | None = None,
) -> AlignRow:
    """A row of a dataset as the objective takes it; ValueError says what is wrong with it.

    Objectives of single completions take a pair for a good one and a bad one. `padding`: a reward model's.
    """
    if not loss.is_paired and "chosen" not in row:
        sample, is_good = encode_labeled_row(row, fit, tokenizer, texts)
        return AlignRow((sample,), (GOOD if is_good else BAD,))
    pair = AlignRow(encode_preference_row(row, fit, tokenizer, texts), (GOOD, BAD))
    # Samples of a reward model are one token longer.
    return scored(replace(pair, margin=_margin(row)), padding) if loss.type == "reward" else pair


def _margin(row: Fields) -> float:
    margin = row.get("margin", 0.0)
    if isinstance(margin, str):  # the cells of a CSV file are text
        with suppress(ValueError):
            margin = float(margin)
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not abs(margin) <= LARGEST_MARGIN:
        raise ValueError(f"'margin' must be a number; it is {margin!r}")
    return float(margin)


def mismatches(rows: Sequence[AlignRow], seq_len: int | None = None) -> list[AlignRow]:
    """The prompt of each sample with the completion of one further on that has another prompt, round and round.

    A pair looks at the next pair, the chosen completion for the chosen one. Without another prompt there is none.
    A long prompt with a long completion is cut at seq_len: the model may have no positions beyond it.
    """
    samples = [sample for row in rows for sample in row.samples]
    strides = [len(row.samples) for row in rows for _ in row.samples]
    prompts = [tuple(_prompt(sample)) for sample in samples]
    found = []
    for number, (sample, stride) in enumerate(zip(samples, strides, strict=True)):
        later = (after % len(samples) for after in range(number + stride, number + stride + len(samples)))
        other = next((after for after in later if prompts[after] != prompts[number]), None)
        if other is not None:
            found.append(AlignRow((_swap_completion(sample, samples[other], seq_len),), (GOOD,)))
    return found


def _prompt(sample: TrainingSequence) -> list[int]:
    return sample.token_ids[: sample.num_context_tokens]


def _swap_completion(
    prompt_of: TrainingSequence, completion_of: TrainingSequence, seq_len: int | None
) -> TrainingSequence:
    first = completion_of.num_context_tokens
    prompt = _prompt(prompt_of)
    return TrainingSequence(
        (prompt + completion_of.token_ids[first:])[:seq_len],
        ([0] * len(prompt) + completion_of.loss_mask[first:])[:seq_len],
    )


def scored(row: AlignRow, padding: int | None = None) -> AlignRow:
    """The row as a reward model reads it, up to the last token that is not padding.

    A score is read where the token after the last one would be predicted, so there has to be one; which it is does not
    matter, since nothing before it sees it. All tokens after the prompt are marked: only the prompt is shared then.
    """
    return replace(row, samples=tuple(_scored(sample, padding) for sample in row.samples))


def _scored(sample: TrainingSequence, padding: int | None) -> TrainingSequence:
    token_ids = without_padding(sample.token_ids, padding)
    length = len(token_ids)
    num_context = min(sample.num_context_tokens, length)
    return TrainingSequence([*token_ids, token_ids[-1]], [0] * num_context + [1] * (length + 1 - num_context))
