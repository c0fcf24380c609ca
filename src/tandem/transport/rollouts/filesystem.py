"""Training batches through the run directory: rollouts/step_000012/rank_0.safetensors, then done.json.

The orchestrator writes, the trainer reads. The directory is filled under a temporary name and renamed,
and the marker goes in last: a reader that sees the marker sees everything.
"""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tandem.types.rollout import MicroBatch, TrainBatch
from tandem.utils.files import publish_directory, read_json, staging_directory, write_json
from tandem.utils.run_dir import remove_old_steps, step_name
from tandem.utils.waiting import Deadline, wait_for

MARKER = "done.json"
RANK_FILE = "rank_0.safetensors"
STREAMS = tuple(field.name for field in fields(MicroBatch))
PER_SEGMENT = ("segment_lengths", "segment_parents")


class RolloutWriter:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def write(self, batch: TrainBatch) -> None:
        final = self.folder / step_name(batch.step)
        staging = staging_directory(final)
        # Streams of all micro-batches are joined; the lengths tell them apart again.
        tensors = {
            name: np.concatenate([getattr(micro_batch, name) for micro_batch in batch.micro_batches])
            for name in STREAMS
        }
        counts = [len(micro_batch.segment_lengths) for micro_batch in batch.micro_batches]
        metadata = {
            "step": str(batch.step),
            "temperature": repr(batch.temperature),
            "num_loss_tokens": str(batch.num_loss_tokens),
            "segments_per_microbatch": json.dumps(counts),
        }
        save_file(tensors, staging / RANK_FILE, metadata=metadata)
        publish_directory(staging, final)
        size_bytes = (final / RANK_FILE).stat().st_size
        write_json(final / MARKER, {"step": batch.step, "files": {RANK_FILE: size_bytes}})

    def remove_trained(self, version: int) -> None:
        """Delete batches that version `version` has been trained on, but for the newest few."""
        remove_old_steps(self.folder, keep_from=version - self.keep + 1)


class RolloutReader:
    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self.timeout_s = timeout_s

    def read(self, step: int) -> TrainBatch:
        """Wait for the batch of `step` and load it."""
        path = self.folder / step_name(step)
        deadline = Deadline(
            what=f"the orchestrator's batch {path}",
            timeout_s=self.timeout_s,
            hint="is the orchestrator running? see logs/orchestrator.log",
        )
        wait_for(lambda: True if (path / MARKER).exists() else None, deadline, poll_s=0.001)
        sizes = read_json(path / MARKER)["files"]
        actual = (path / RANK_FILE).stat().st_size
        if actual != sizes[RANK_FILE]:
            raise ValueError(f"{path / RANK_FILE} is damaged: {actual} bytes, {sizes[RANK_FILE]} were written")
        return _load(path / RANK_FILE)


def _load(path: Path) -> TrainBatch:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        streams = {name: file.get_tensor(name) for name in STREAMS}
    micro_batches = []
    first_token = first_segment = 0
    for num_segments in json.loads(metadata["segments_per_microbatch"]):
        segments = slice(first_segment, first_segment + num_segments)
        num_tokens = int(streams["segment_lengths"][segments].sum())
        tokens = slice(first_token, first_token + num_tokens)
        parts = {name: stream[segments if name in PER_SEGMENT else tokens] for name, stream in streams.items()}
        micro_batches.append(MicroBatch(**parts))
        first_token, first_segment = tokens.stop, segments.stop
    return TrainBatch(
        step=int(metadata["step"]),
        temperature=float(metadata["temperature"]),
        num_loss_tokens=int(metadata["num_loss_tokens"]),
        micro_batches=micro_batches,
    )
