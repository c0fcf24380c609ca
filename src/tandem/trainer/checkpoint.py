"""Saving and loading everything the trainer needs to go on: weights, optimizer, random state."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tandem.config.shared import CheckpointConfig
from tandem.transport.weights.manifest import MANIFEST, write_manifest
from tandem.utils.files import publish_directory, staging_directory
from tandem.utils.run_dir import RunDir, remove_old_steps, step_name, steps_with

FOLDER = "trainer"


class Checkpointer:
    def __init__(
        self, run_dir: RunDir, config: CheckpointConfig, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.run_dir = run_dir
        self.config = config
        self.model = model
        self.optimizer = optimizer

    def maybe_save(self, step: int) -> None:
        if self.config.is_due(step):
            self.save(step)

    def save(self, step: int) -> None:
        """Written aside and renamed; the manifest comes last, and only then are older ones deleted."""
        folder = self.run_dir.checkpoints / step_name(step)
        staging = staging_directory(folder / FOLDER)
        model_state = {name: parameter.detach().cpu() for name, parameter in self.model.named_parameters()}
        save_file(model_state, staging / "model.safetensors")
        save_file(self._optimizer_tensors(), staging / "optimizer.safetensors")
        publish_directory(staging, folder / FOLDER)
        write_manifest(folder, step)
        complete = steps_with(self.run_dir.checkpoints, MANIFEST)
        remove_old_steps(self.run_dir.checkpoints, keep_from=complete[-self.config.keep_last :][0])

    def load(self, step: int) -> None:
        folder = self.run_dir.checkpoints / step_name(step) / FOLDER
        self._load_model(folder)
        self._load_optimizer(folder)

    def _load_model(self, folder: Path) -> None:
        saved = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(saved[name])

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors = {
            f"{key}/{names[parameter]}": value.detach().cpu()
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        return tensors | {"rng": torch.get_rng_state()}

    def _load_optimizer(self, folder: Path) -> None:
        saved = load_file(folder / "optimizer.safetensors")
        torch.set_rng_state(saved.pop("rng"))
        parameters = dict(self.model.named_parameters())
        for key, value in saved.items():
            kind, name = key.split("/", 1)
            parameter = parameters[name]
            # Fused AdamW keeps everything beside the parameter, its step counter too.
            self.optimizer.state[parameter][kind] = value.to(parameter.device)
