"""Training batches through the run directory: rollouts/step_000012/batch.safetensors, orchestrator.json, done.json.

The orchestrator writes, the trainer reads. The directory is filled under a temporary name, the marker last, and
renamed: a reader that sees the marker sees everything, and finds sizes and checksums in it.

orchestrator.json is the orchestrator's position after this batch. The trainer does not read it: it goes into the
checkpoint of the step, so that one can be saved after any step.
"""

from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file

from tandem.types.rollout import PackedBatch, PackedKept, TrainBatch
from tandem.utils.errors import disk_errors
from tandem.utils.files import publish_directory, staging_directory, staging_path
from tandem.utils.manifest import DamagedFiles, verify_manifest, write_manifest
from tandem.utils.run_dir import remove_old_steps, step_name
from tandem.utils.waiting import Deadline, wait_for

MARKER = "done.json"
ORCHESTRATOR = "orchestrator.json"
BATCH_FILE = "batch.safetensors"
PACKED_FIELDS = ("token_ids", "positions", "segment_lengths", "segment_parents", "targets", "sequences")
STREAM, KEPT = "streams.", "kept."
POLL_S = 0.001


class DamagedBatch(RuntimeError):
    """A batch that must not be trained on, with the reason."""


class RolloutWriter:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def write(self, batch: TrainBatch) -> None:
        self.stage(batch)
        self.publish(batch.step)

    def stage(self, batch: TrainBatch) -> None:
        """Write all of a batch, where no reader looks yet."""
        staging = staging_directory(self.folder / step_name(batch.step))
        packed = batch.packed
        tensors = {name: getattr(packed, name) for name in PACKED_FIELDS}
        tensors |= {STREAM + name: stream for name, stream in packed.streams.items()}
        tensors |= {KEPT + name: values for name, values in vars(packed.kept).items()} if packed.kept else {}
        metadata = {
            "step": str(batch.step),
            "temperature": repr(batch.temperature),
            "num_sequences": str(packed.num_sequences),
        }
        with disk_errors(staging):
            save_file(tensors, staging / BATCH_FILE, metadata=metadata)
        (staging / ORCHESTRATOR).write_bytes(batch.orchestrator_state)
        write_manifest(staging, batch.step, MARKER)

    def publish(self, step: int) -> None:
        """Hand a staged batch to the readers."""
        final = self.folder / step_name(step)
        publish_directory(staging_path(final), final)

    def remove_trained(self, version: int) -> None:
        """Delete batches that version `version` has been trained on, but for the newest few."""
        remove_old_steps(self.folder, keep_from=version - self.keep + 1)


class RolloutReader:
    def __init__(self, folder: Path, timeout_s: float) -> None:
        self.folder = folder
        self.timeout_s = timeout_s

    def wait(self, step: int, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Until the batch of `step` is there; False where `give_up` says so first."""
        marker = self.folder / step_name(step) / MARKER
        deadline = Deadline(
            what=f"the orchestrator's batch {marker.parent}",
            timeout_s=self.timeout_s,
            hint="is the orchestrator running? see logs/orchestrator.log",
        )
        return wait_for(lambda: marker.exists() or (False if give_up() else None), deadline, POLL_S)

    def read(self, step: int) -> TrainBatch:
        """Wait for the batch of `step`, check it and load it.

        Every rank checks what it reads: they do so side by side, and SHA-256 takes a millisecond or two a megabyte.
        """
        self.wait(step)
        folder = self.folder / step_name(step)
        try:
            verify_manifest(folder, step, MARKER)
        except DamagedFiles as error:
            raise DamagedBatch(
                f"the batch of step {step} is damaged and not trained on: {error}; go on from the newest checkpoint "
                "with --resume, which makes it again"
            ) from error
        return _load(folder)


def _load(folder: Path) -> TrainBatch:
    with safe_open(folder / BATCH_FILE, framework="numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    streams = {name.removeprefix(STREAM): stream for name, stream in tensors.items() if name.startswith(STREAM)}
    layout = {name: tensors[name] for name in PACKED_FIELDS}
    kept = {name.removeprefix(KEPT): values for name, values in tensors.items() if name.startswith(KEPT)}
    num_sequences = int(metadata["num_sequences"])
    packed = PackedBatch(
        **layout, num_sequences=num_sequences, streams=streams, kept=PackedKept(**kept) if kept else None
    )
    orchestrator_state = (folder / ORCHESTRATOR).read_bytes()
    return TrainBatch(int(metadata["step"]), float(metadata["temperature"]), packed, orchestrator_state)
