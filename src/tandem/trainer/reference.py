"""What the model that training starts from says of the data: computed once, or by a frozen copy at every step."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from tandem.config.shared import ModelConfig
from tandem.data.packing import divide, pack
from tandem.models.files import weight_files
from tandem.trainer.preferences import REFERENCE, AlignRow
from tandem.trainer.step import Stepper
from tandem.types.rollout import PackedBatch, Sample
from tandem.utils.files import write_atomic

logger = logging.getLogger(__name__)
# Sequences packed at a time: enough to fill micro-batches on many ranks, few enough to count their tokens in float32.
CHUNK = 512
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


def sample_key(sample: Sample) -> bytes:
    """The same for the same tokens with the same mask."""
    content = np.array([sample.token_ids, sample.loss_mask], dtype=np.int64)
    return hashlib.sha256(content.tobytes()).digest()


def precompute(
    stepper: Stepper, rows: Iterable[AlignRow], model: ModelConfig, tokens_per_microbatch: int, cache: Path
) -> References:
    """What the model says as it is now of all that is in `rows`; or said at an earlier start, which left its cache."""
    samples = {sample_key(sample): sample for row in rows for sample in row.samples}
    key = fingerprint(model, samples)
    # Every rank looks before any has computed, so that all of them decide alike.
    logprobs = _read(cache, key)
    if logprobs is None:
        logger.info("computing the reference log-probs of %d sequences", len(samples))
        logprobs = compute_logprobs(stepper, list(samples.values()), tokens_per_microbatch)
        if stepper.ranks.is_first:
            write_atomic(cache, save({"logprobs": logprobs}, metadata={"fingerprint": key}))
    else:
        logger.info("the reference log-probs of %d sequences are those of %s", len(samples), cache)
    ends = np.cumsum([sum(sample.loss_mask) for sample in samples.values()])
    return References(dict(zip(samples, np.split(logprobs, ends[:-1]), strict=True)))


def compute_logprobs(stepper: Stepper, samples: Sequence[Sample], tokens_per_microbatch: int) -> NDArray[np.float32]:
    """Log-probs of the learned tokens of all samples, end to end. The ranks share the work."""
    chunks = (samples[first : first + CHUNK] for first in range(0, len(samples), CHUNK))
    stepper.model.eval()  # a reference knows no dropout
    found = [_chunk_logprobs(stepper, chunk, tokens_per_microbatch) for chunk in chunks]
    stepper.model.train()
    return np.concatenate(found)


@torch.no_grad()
def _chunk_logprobs(stepper: Stepper, samples: Sequence[Sample], tokens_per_microbatch: int) -> NDArray[np.float32]:
    ranks = stepper.ranks
    packed = pack(samples)
    batch = replace(packed, streams={PLACE: np.arange(packed.num_loss_tokens, dtype=np.float32)})
    logprobs = torch.zeros(batch.num_loss_tokens, device=ranks.device)
    for micro_batch in divide(batch, ranks.rank, ranks.size, tokens_per_microbatch):
        places = torch.from_numpy(micro_batch.streams[PLACE]).long().to(ranks.device)
        logprobs[places] = stepper.judge(micro_batch).logprobs
    return ranks.all_sum(logprobs).cpu().numpy()


def fingerprint(model: ModelConfig, keys: Iterable[bytes]) -> str:
    """Changes with the model's files, its precision, and the samples."""
    digest = hashlib.sha256(f"{model.name.resolve()} {model.dtype}".encode())
    for file in weight_files(model.name):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
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
