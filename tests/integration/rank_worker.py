"""One rank of `test_ranks.py`: takes two steps in every way asked for and saves the weights of each.

A way with `failure` lets the last rank die or hang before the second step. One with `passes` takes no step: it saves
what the model says in the passes of the trainer.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tandem.algorithms.objective.policy import LossConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import divide, pack
from tandem.models.runtime import setup_torch
from tandem.trainer.build import load_trained
from tandem.trainer.losses import make_policy_loss
from tandem.trainer.model.frozen import FrozenModel
from tandem.trainer.parallel.ranks import Ranks, joined
from tandem.trainer.rl.learner import micro_batch_loss
from tandem.types.rollout import TrainingSequence
from tandem.utils.processes import run_process


def make_samples(seed: int) -> list[TrainingSequence]:
    """Three groups of unequal size and length, so that no two ranks have the same to do."""
    draw = random.Random(seed)
    samples = []
    for group_size in (4, 2, 1):
        prompt = [draw.randrange(6, 100) for _ in range(draw.randint(3, 9))]
        for _ in range(group_size):
            completion = [draw.randrange(6, 100) for _ in range(draw.randint(1, 9))]
            advantage = draw.uniform(-1, 1)
            streams = {
                "advantages": [advantage] * (len(prompt) + len(completion)),
                "logprobs": [draw.uniform(-5.0, -4.0) for _ in prompt + completion],
            }
            mask = [0] * len(prompt) + [1] * len(completion)
            samples.append(TrainingSequence(prompt + completion, mask, streams))
    return samples


def take_steps(model: Path, way: dict, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Plain SGD, or AdamW where the way has its options: it divides by the gradient's own size, which blows rounding up
    where it is next to nothing and eps is not larger."""
    parallel = ParallelConfig.model_validate(way["parallel"])
    adamw = OptimizerConfig.model_validate(way.get("adamw", {}))
    trained = load_trained(ModelConfig(name=model), adamw, parallel, ranks)
    if "adamw" not in way:
        trained.stepper.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)
    loss = micro_batch_loss(LossConfig(), make_policy_loss(LossConfig()))
    stats = {}
    for seed in (0, 1):
        ranks.report(seed + 1, "training")
        if seed == 1 and ranks.rank == ranks.size - 1 and "failure" in way:
            os.kill(os.getpid(), signal.SIGKILL) if way["failure"] == "dies" else time.sleep(3600)
        batch = pack(make_samples(seed))
        micro_batches = divide(batch, ranks.rank, ranks.size, way["bound"])
        stats = trained.stepper.step(micro_batches, loss, batch.num_loss_tokens)
    found: dict[str, torch.Tensor] = {}
    trained.publish(lambda tensors, version: found.update(tensors), version=2)
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in stats.items()}
    return {name: tensor.clone().contiguous() for name, tensor in (found | numbers).items()}


def ask_in_passes(model: Path, way: dict, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The same batch on every rank."""
    parallel = ParallelConfig.model_validate(way["parallel"])
    config = ModelConfig.model_validate({"name": model, "dtype": way["passes"]})
    stepper = load_trained(config, OptimizerConfig(), parallel, ranks).stepper
    batch = pack(make_samples(0))
    learning = stepper.predict(batch, 0.7).logprobs
    learning.sum().backward()
    reference = FrozenModel(config, parallel, ranks).logprobs(batch, 0.7)
    return {
        "learning": learning.detach(),
        "recomputed": stepper.infer(batch, 0.7).logprobs,
        "reference": reference,
    }


def wait_for_everybody(folder: Path) -> None:
    """Until all ranks have come as far as this; for as long as whoever started them is patient."""
    (folder / f"here_{os.environ.get('RANK', '0')}").touch()
    while len(list(folder.glob("here_*"))) < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(0.05)


def main() -> None:
    model, folder, ways = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    setup_torch(threads=1, seed=0, deterministic=False)
    # Where one is going to hang the others should not wait for long; only for slow imports, which are over by then.
    hangs = any(way.get("failure") == "hangs" for way in ways)
    wait_for_everybody(folder)
    with joined("cpu", timeout_s=15 if hangs else 600) as ranks:
        for number, way in enumerate(ways):
            tensors = (ask_in_passes if "passes" in way else take_steps)(model, way, ranks)
            if ranks.is_first:
                save_file(tensors, folder / f"{number}.safetensors")


if __name__ == "__main__":
    run_process(main)
