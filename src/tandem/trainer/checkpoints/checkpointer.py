"""Saves and loads checkpoints; saving runs in the background of training.

    loop     copies of weights, optimizer and random state ──┐      the next steps
    thread   (checkpoints/snapshot.py)                      └─► shards ─► all ranks done ─► rename ─► manifest

A save that fails is reported at once and repeated after the next step; if that fails too, the run ends.

trainer/shard_00000.safetensors   what is trained and the optimizer's state of it, as the ranks hold it
trainer/random_00000.json         the random number generators of each rank
trainer/state.json                the world size, and the state of the loop

The learning rate is a function of the step, and frozen weights are those of model.name: neither is saved.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from tandem.config.shared import CheckpointConfig
from tandem.trainer.checkpoints.history import TRAINER
from tandem.trainer.checkpoints.random_state import capture_random_state, restore_random_state, seed_random_state
from tandem.trainer.checkpoints.shards import ShardIndex, read_shard_index, read_shards
from tandem.trainer.checkpoints.snapshot import Snapshot, SnapshotWriter
from tandem.trainer.parallel.parts import is_divided, local_part, reshard
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.errors import UserError
from tandem.utils.files import json_text, read_json
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir, step_name

logger = logging.getLogger(__name__)

STATE = "state.json"
MODEL, OPTIMIZER = "model/", "optimizer/"  # optimizer/exp_avg/<name of the parameter>
SAVE_TIMEOUT_S = 3600.0
WORTH_A_WARNING_S = 1.0


class Checkpointer:
    """Every rank makes one and calls its methods at the same steps; `close` at the end, which waits for the last.

    What is saved of a step besides the model: `extra_state` (JSON), which `load` gives back, and `extra_files`, files
    that others want to find in the checkpoint.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: CheckpointConfig,
        ranks: Ranks,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        run_log: RunLog,
        *,
        max_steps: int,
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.max_steps = max_steps
        self.ranks = ranks
        self.parameters = trained_parameters(model)
        self.optimizer = optimizer
        # Messages of a save must not meet those of the steps that go on meanwhile.
        self._group = new_group() if ranks.size > 1 else None
        self._writer = SnapshotWriter(run_dir, config, ranks, self._group, run_log)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._newest = 0  # the step that was saved or loaded last
        self._num_failed = 0  # saves, in a row

    def maybe_save(
        self, step: int, extra_state: Mapping[str, Any] | None = None, extra_files: Mapping[str, bytes] | None = None
    ) -> None:
        """Save if it is due, or if the save before has failed."""
        if self.config.is_due(step, self.max_steps) or self._has_failed():
            self.save(step, extra_state, extra_files)

    def save_now(
        self, step: int, extra_state: Mapping[str, Any] | None = None, extra_files: Mapping[str, bytes] | None = None
    ) -> None:
        """Return once `step` is saved; it may be under way, and fail once."""
        if not self._settle() or step != self._newest:
            self.save(step, extra_state, extra_files)
            self.wait()

    def finish(
        self, step: int, extra_state: Mapping[str, Any] | None = None, extra_files: Mapping[str, bytes] | None = None
    ) -> None:
        """After the last step: wait for the save under way, and make up for one that fails."""
        if not self._settle():
            self.save(step, extra_state, extra_files)
            self.wait()

    def save(
        self, step: int, extra_state: Mapping[str, Any] | None = None, extra_files: Mapping[str, bytes] | None = None
    ) -> None:
        """Copy the state and have it written."""
        asked = time.monotonic()
        self._settle()
        if (waited_s := time.monotonic() - asked) > WORTH_A_WARNING_S:
            logger.warning("step %d waited %.1f s for the previous checkpoint; raise checkpoint.every", step, waited_s)
        self._newest = step
        self._saving = self._thread.submit(
            self._writer.write, self._snapshot(step, extra_state or {}, extra_files or {})
        )

    def wait(self) -> None:
        """Until the save under way is complete; raises what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result(SAVE_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"waited {SAVE_TIMEOUT_S:.0f} s for a checkpoint to be written to {self.run_dir.checkpoints}; "
                "does the file system respond?"
            ) from error
        self._num_failed = 0

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _has_failed(self) -> bool:
        """Whether a rank knows that the save under way has failed. Ranks ask together: their threads differ in time."""
        if self._saving is None:
            return False
        failed = self._saving.done() and self._saving.exception() is not None
        return bool(self.ranks.all_max(torch.tensor(int(failed), device=self.ranks.device)))

    def _settle(self) -> bool:
        """Until the save under way is complete; False if it failed, raises if it was the second to fail."""
        try:
            self.wait()
        except Exception:  # whatever ended the save; its thread has logged it
            self._num_failed += 1
            if self._num_failed > 1:
                raise
            return False
        return True

    def load(self, step: int) -> dict[str, Any]:
        """Go on from a checkpoint that was verified; returns its extra state."""
        folder = self.run_dir.checkpoints / step_name(step) / TRAINER
        layout = read_shard_index(folder)
        refuse_other_parameters(folder, layout, self.parameters)
        weights = {MODEL + name: parameter for name, parameter in self.parameters.items()}
        moments = {key: _place_for(key, layout, self.parameters) for key in layout if key.startswith(OPTIMIZER)}
        read_shards(weights | moments, folder, self._group)
        load_optimizer(self.optimizer, moments, self.parameters)
        self._restore_random_state(folder, step)
        self._newest = step
        return read_json(folder / STATE)["extra_state"]

    def _snapshot(self, step: int, extra_state: Mapping[str, Any], extra_files: Mapping[str, bytes]) -> Snapshot:
        weights = {MODEL + name: copy_to_cpu(parameter, parameter) for name, parameter in self.parameters.items()}
        moments = dict(optimizer_copies(self.optimizer, self.parameters))
        files = {random_file(self.ranks.rank): json_text(capture_random_state(self.ranks.device))}
        if self.ranks.is_first:
            files[STATE] = json_text({"num_ranks": self.ranks.size, "extra_state": extra_state})
        return Snapshot(step, weights | moments, files, extra_files)

    def _restore_random_state(self, folder: Path, step: int) -> None:
        file = folder / random_file(self.ranks.rank)
        if file.exists():
            restore_random_state(read_json(file), self.ranks.device)
            return
        seed = (torch.initial_seed() + 1_000_003 * step + self.ranks.rank) % 2**32
        seed_random_state(seed)
        logger.info(
            "rank %d has no random state in %s, which was saved by %d ranks; it is seeded with %d",
            self.ranks.rank,
            folder,
            read_json(folder / STATE)["num_ranks"],
            seed,
        )


def new_group() -> dist.ProcessGroup:
    """All ranks, over the network rather than GPUs, for what is said in the background of training."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def random_file(rank: int) -> str:
    return f"random_{rank:05d}.json"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """As the optimizer knows them: after a forward pass FSDP may show gathered ones in their place."""
    reshard(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_copies(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield f"{OPTIMIZER}{kind}/{name}", copy_to_cpu(value, parameter)


@torch.no_grad()
def copy_to_cpu(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of what this rank holds of a parameter, or of the optimizer's state of it."""
    if is_divided(parameter) and not is_divided(value) and value.ndim > 0:
        # An optimizer in CPU memory keeps its parts as plain tensors: here they are parts of a whole again.
        part = parameter.to("cpu", value.dtype, copy=True)
        local_part(part).copy_(value)
        return part
    return value.to("cpu", copy=True)


def refuse_other_parameters(folder: Path, layout: ShardIndex, parameters: Mapping[str, Tensor]) -> None:
    """A checkpoint of other parameters than the run trains would be loaded in part, or not at all."""
    saved = {key.removeprefix(MODEL): entry for key, entry in layout.items() if key.startswith(MODEL)}
    hint = "resume with the model and the lora options that the run was started with"
    for name in sorted(saved.keys() ^ parameters.keys()):
        which = "holds {!r}, which this run does not train" if name in saved else "lacks {!r}, which this run trains"
        raise UserError(f"resume: the checkpoint {folder} {which.format(name)}; {hint}")
    for name, parameter in parameters.items():
        if saved[name].size != parameter.shape:
            raise UserError(
                f"resume: the checkpoint {folder} holds {name!r} with shape {tuple(saved[name].size)}, but this run "
                f"needs {tuple(parameter.shape)}; {hint}"
            )


def load_optimizer(
    optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> None:
    """Through the optimizer's own door: it knows where its state has to lie. Its options stay those of this run."""
    groups = optimizer.state_dict()["param_groups"]
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(in_groups)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        kind, name = _split_key(key)
        state.setdefault(numbers[parameters[name]], {})[kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _place_for(key: str, layout: ShardIndex, parameters: Mapping[str, Tensor]) -> Tensor:
    """Where a tensor of the optimizer is read to: divided like its parameter if it has its shape."""
    _, name = _split_key(key)
    entry, parameter = layout[key], parameters[name]
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _split_key(key: str) -> tuple[str, str]:
    kind, _, name = key.removeprefix(OPTIMIZER).partition("/")
    return kind, name
