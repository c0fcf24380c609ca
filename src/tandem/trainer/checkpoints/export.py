"""From a checkpoint to a directory that transformers and vLLM load: whole tensors under Hugging Face names."""

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.models.files import check_model
from tandem.models.reward_model import new_scorer, scorer_config
from tandem.models.trainable import load_trainable, merged_tensors, whole_tensors
from tandem.trainer.checkpoints.checkpointer import MODEL
from tandem.trainer.checkpoints.history import TRAINER
from tandem.trainer.checkpoints.shards import read_whole
from tandem.utils.errors import UserError
from tandem.utils.files import publish_directory, read_json, read_table, staging_directory
from tandem.utils.manifest import write_manifest
from tandem.utils.run_dir import RunDir, step_name
from tandem.utils.run_lock import refuse_unwritable
from tandem.weights.files import copy_side_files, write_model

# The processes that train, by the names of their configurations.
TRAINERS = ("trainer", "sft", "align")
DECODER, SCORER = "decoder.", "scorer."
CPU = torch.device("cpu")


def export_checkpoint(run_dir: RunDir, step: int, output: Path, dtype: str | None) -> None:
    """Write the model of a checkpoint that was verified, in `dtype` or the precision of the run."""
    model, lora, is_reward_model = read_run(run_dir)
    check_model(model)
    folder = run_dir.checkpoints / step_name(step) / TRAINER
    if is_reward_model:
        tensors, hf_config = scorer_tensors(model, folder), scorer_config(model.name)
    else:
        tensors, hf_config = decoder_tensors(model, lora, folder), read_json(model.name / "config.json")
    with refuse_unwritable(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_directory(output)
    write_model(staging, tensors, hf_config | {"dtype": dtype or model.dtype})
    copy_side_files(model.name, staging, model.read_chat_template())
    write_manifest(staging, step)
    publish_directory(staging, output)


def decoder_tensors(model: ModelConfig, lora: LoRAConfig | None, folder: Path) -> dict[str, Tensor]:
    decoder = load_trainable(model, CPU, lora)
    take_weights(decoder, read_whole(folder, MODEL + DECODER), folder)
    return merged_tensors(decoder) if lora else whole_tensors(decoder)


def scorer_tensors(model: ModelConfig, folder: Path) -> dict[str, Tensor]:
    """Of a reward model."""
    scorer = new_scorer(model.name, torch.float32, CPU, seed=0)
    take_weights(scorer, read_whole(folder, MODEL + SCORER), folder)
    return scorer.named_tensors()


def read_run(run_dir: RunDir) -> tuple[ModelConfig, LoRAConfig | None, bool]:
    """What was trained, by the configuration of the process that trained it; and whether it is a reward model."""
    for name in TRAINERS:
        path = run_dir.config / f"{name}.json"
        if not path.exists():
            continue
        config = read_table(path)
        loss, lora = config.get("loss"), config.get("lora")
        try:
            model = ModelConfig.model_validate(config.get("model"))
            adapter = LoRAConfig.model_validate(lora) if lora else None
        except ValidationError as error:
            raise UserError(f"{path} is damaged: {error.errors()[0]['msg']}; export with the file as it was") from error
        return model, adapter, isinstance(loss, dict) and loss.get("type") == "reward"
    raise UserError(
        f"run_dir = {str(run_dir.root)!r} is not the directory of a run: there is no trainer.json, sft.json or "
        f"align.json in {run_dir.config}"
    )


def take_weights(model: nn.Module, saved: Mapping[str, Tensor], folder: Path) -> None:
    """Overwrite what was trained, which must be all of what the model could train, and no more."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in sorted(trained.keys() ^ saved.keys()):
        raise UserError(f"run_dir: {folder} does not fit the model in the run's configuration: {name!r} differs")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved[name])
