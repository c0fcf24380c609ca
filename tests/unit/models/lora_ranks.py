"""One rank of test_lora_ranks.py, started by torchrun: a few steps of training an adapter, then its weights."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.config.lora import LoRAConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import divide, pack
from tandem.trainer.build import load_trained
from tandem.trainer.offline.sft import sft_loss
from tandem.trainer.parallel.ranks import Ranks, joined
from tandem.types.rollout import TrainingSequence
from tandem.utils.processes import run_process

LORA = LoRAConfig(rank=3, alpha=12.0)


def make_samples() -> list[TrainingSequence]:
    prompt = [5, 9, 33, 12]
    rests = [[60, 7, 8], [21, 40, 11, 3], [90, 14], [17, 18, 19, 4, 2]]
    return [TrainingSequence(prompt + rest, [0] * len(prompt) + [1] * len(rest)) for rest in rests]


def train(model: Path, impl: str, strategy: str, ranks: Ranks) -> dict[str, Tensor]:
    """Plain SGD: Adam divides by the gradient's own size, which blows rounding up where it is next to nothing."""
    parallel = ParallelConfig.model_validate({"strategy": strategy, "gradient_checkpointing": 1})
    config = ModelConfig.model_validate({"name": model, "impl": impl})
    trained = load_trained(config, OptimizerConfig(), parallel, ranks, lora=LORA, seed=4)
    learned = [parameter for parameter in trained.model.parameters() if parameter.requires_grad]
    trained.stepper.optimizer = torch.optim.SGD(learned, lr=1.0)
    batch = pack(make_samples())
    for _ in range(3):
        micro_batches = divide(batch, ranks.rank, ranks.size, 24)
        trained.stepper.step(micro_batches, sft_loss, batch.num_loss_tokens)
    found: dict[str, Tensor] = {}
    trained.publish(lambda tensors, version: found.update(tensors), version=1)
    trained.publish_adapter(lambda tensors, version: found.update(tensors), version=1)
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def main() -> None:
    model, strategy, folder, *impls = sys.argv[1:]
    with joined("cpu", timeout_s=300) as ranks:
        for impl in impls:
            tensors = train(Path(model), impl, strategy, ranks)
            if ranks.is_first:
                save_file(tensors, Path(folder) / f"{impl}.safetensors")


if __name__ == "__main__":
    run_process(main)
