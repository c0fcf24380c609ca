"""Reference log-probs of the data: computed once before training, or by a frozen copy at every step."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from tandem.config.shared import ModelConfig
from tandem.models.shards import weight_files
from tandem.trainer.model.memory import MicroBatchSize
from tandem.trainer.model.step import Predictions, Stepper
from tandem.trainer.offline.preferences import REFERENCE, AlignBatch, AlignRow
from tandem.types.rollout import PackedBatch, TrainingSequence
from tandem.utils.files import write_atomic

logger = logging.getLogger(__name__)
PLACE = "place"

# The reference log-probs of a micro-batch, (loss tokens,); None: there is no reference.
ReferenceOf = Callable[[PackedBatch], Tensor | None]


def stream_reference(device: torch.device) -> ReferenceOf:
    """Precomputed log-probs travel with the batch."""
    return lambda batch: torch.from_numpy(batch.streams[REFERENCE]).to(device)


def no_reference(batch: PackedBatch) -> None:
    return None


@dataclass(frozen=True)
class References:
    """Log-probs of the learned tokens of samples, found by what the samples say."""

    logprobs: Mapping[bytes, NDArray[np.float32]]

    def attach(self, rows: Iterable[AlignRow]) -> list[AlignRow]:
        return [
            replace(row, reference=tuple(self.logprobs[sample_key(sample)] for sample in row.samples)) for row in rows
        ]


def sample_key(sample: TrainingSequence) -> bytes:
    """The same for the same tokens with the same mask."""
    content = np.array([sample.token_ids, sample.loss_mask], dtype=np.int64)
    return hashlib.sha256(content.tobytes()).digest()


def precompute(
    stepper: Stepper[Predictions],
    batches: Iterable[Sequence[AlignRow]],
    model: ModelConfig,
    size: MicroBatchSize,
    cache: Path,
) -> References:
    """What the model says as it is now of all that is in the batches; or said at an earlier start: see `cache`.

    Batches are those of the steps, and divided as there: in other company, matrix products may round otherwise, and
    the policy would not be its reference before the first step. All begin anew where `size` has to be lowered.
    """
    samples: dict[bytes, TrainingSequence] = {}
    unseen: list[Sequence[AlignRow]] = []
    for rows in batches:
        num_before = len(samples)
        for sample in (sample for row in rows for sample in row.samples):
            samples.setdefault(sample_key(sample), sample)
        if len(samples) > num_before:
            unseen.append(rows)
    key = fingerprint(model, samples)
    # Every rank looks before any has computed, so that all of them decide alike.
    logprobs = _read(cache, key)
    if logprobs is None:
        logger.info("computing the reference log-probs of %d sequences", len(samples))
        said = size.fit(partial(_compute_all, stepper, unseen))
        logprobs = np.concatenate([said[name] for name in samples])
        if stepper.ranks.is_first:
            write_atomic(cache, save({"logprobs": logprobs}, metadata={"fingerprint": key}))
    else:
        logger.info("the reference log-probs of %d sequences are those of %s", len(samples), cache)
    ends = np.cumsum([sum(sample.loss_mask) for sample in samples.values()])
    return References(dict(zip(samples, np.split(logprobs, ends[:-1]), strict=True)))


def _compute_all(
    stepper: Stepper[Predictions], batches: Sequence[Sequence[AlignRow]], tokens_per_microbatch: int
) -> dict[bytes, NDArray[np.float32]]:
    said: dict[bytes, NDArray[np.float32]] = {}
    for rows in batches:
        for name, found in compute_logprobs(stepper, rows, tokens_per_microbatch).items():
            said.setdefault(name, found)
    return said


@torch.no_grad()
def compute_logprobs(
    stepper: Stepper[Predictions], rows: Sequence[AlignRow], tokens_per_microbatch: int
) -> dict[bytes, NDArray[np.float32]]:
    """Log-probs of the learned tokens of each sample. The ranks share the work."""
    ranks, batch = stepper.ranks, AlignBatch.of(rows)
    num_tokens = batch.packed.num_loss_tokens
    batch = replace(batch, packed=replace(batch.packed, streams={PLACE: place_stream(num_tokens)}))
    logprobs = torch.zeros(num_tokens, device=ranks.device)
    for micro_batch in batch.divide(ranks.rank, ranks.size, tokens_per_microbatch):
        own = torch.from_numpy(places_in(micro_batch.streams[PLACE])).long().to(ranks.device)
        logprobs[own] = stepper.infer(micro_batch).logprobs
    found = ranks.all_sum(logprobs).cpu().numpy()
    samples = [sample for row in rows for sample in row.samples]
    ends = np.cumsum([sum(sample.loss_mask) for sample in samples])
    return dict(zip(map(sample_key, samples), np.split(found, ends[:-1]), strict=True))


def place_stream(num_tokens: int) -> NDArray[np.float32]:
    """The number of each token, in the bits of a stream: as a value, float32 counts to 2**24 only."""
    return np.arange(num_tokens, dtype=np.int32).view(np.float32)


def places_in(stream: NDArray[np.float32]) -> NDArray[np.int32]:
    return stream.view(np.int32)


def fingerprint(model: ModelConfig, keys: Iterable[bytes]) -> str:
    """Changes with the model's files, its precision, and the samples."""
    digest = hashlib.sha256(f"{model.name.resolve()} {model.dtype}".encode())
    for file in weight_files(model.name):
        status = file.stat()
        # ctime too: a copy that preserves timestamps gives other content the same size and mtime.
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode())
    for key in keys:
        digest.update(key)
    return digest.hexdigest()


def _read(path: Path, key: str) -> NDArray[np.float32] | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            return file.get_tensor("logprobs") if file.metadata()["fingerprint"] == key else None
    except SafetensorError as error:
        logger.warning("%s is damaged and computed anew: %s", path, error)
        return None
