"""Training batches through the run directory: rollouts/step_000012/batch.safetensors, then done.json.

The orchestrator writes, the trainer reads. The directory is filled under a temporary name and renamed,
and the marker goes in last: a reader that sees the marker sees everything.
"""

from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file

from tandem.types.rollout import PackedBatch, TrainBatch
from tandem.utils.files import publish_directory, read_json, staging_directory, write_json
from tandem.utils.run_dir import remove_old_steps, step_name
from tandem.utils.waiting import Deadline, wait_for

MARKER = "done.json"
BATCH_FILE = "batch.safetensors"
LAYOUT = ("token_ids", "positions", "segment_lengths", "segment_parents", "targets", "sequences")
STREAM = "streams."


class RolloutWriter:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def write(self, batch: TrainBatch) -> None:
        final = self.folder / step_name(batch.step)
        staging = staging_directory(final)
        packed = batch.packed
        tensors = {name: getattr(packed, name) for name in LAYOUT}
        tensors |= {STREAM + name: stream for name, stream in packed.streams.items()}
        metadata = {
            "step": str(batch.step),
            "temperature": repr(batch.temperature),
            "num_sequences": str(packed.num_sequences),
        }
        save_file(tensors, staging / BATCH_FILE, metadata=metadata)
        publish_directory(staging, final)
        size_bytes = (final / BATCH_FILE).stat().st_size
        write_json(final / MARKER, {"step": batch.step, "files": {BATCH_FILE: size_bytes}})

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
        actual = (path / BATCH_FILE).stat().st_size
        if actual != sizes[BATCH_FILE]:
            raise ValueError(f"{path / BATCH_FILE} is damaged: {actual} bytes, {sizes[BATCH_FILE]} were written")
        return _load(path / BATCH_FILE)


def _load(path: Path) -> TrainBatch:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    streams = {name.removeprefix(STREAM): stream for name, stream in tensors.items() if name.startswith(STREAM)}
    layout = {name: tensors[name] for name in LAYOUT}
    packed = PackedBatch(**layout, num_sequences=int(metadata["num_sequences"]), streams=streams)
    return TrainBatch(int(metadata["step"]), float(metadata["temperature"]), packed)
