"""Builds what a trainer needs from its configuration: ranks, the start step, model, optimizer, stepper."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.algorithms.losses.ppo import PpoConfig
from tandem.commands.offline import OfflineConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.lora import LoRAConfig
from tandem.config.parallel import ParallelConfig, keeps_logits
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.models.cpu import library
from tandem.models.runtime import setup_torch
from tandem.models.trainable import (
    Trainable,
    adapter_config,
    adapter_tensors,
    load_trainable,
    make_batch_invariant,
    stream_merged,
    stream_tensors,
)
from tandem.trainer.checkpoints.history import start_step
from tandem.trainer.model.language_model import LanguageModel
from tandem.trainer.model.optimizer import make_optimizer
from tandem.trainer.model.step import P, Predictions, Stepper
from tandem.trainer.model.throughput import Throughput
from tandem.trainer.parallel.ranks import Ranks, joined
from tandem.trainer.parallel.sharding import home_of, needs_group, prepare
from tandem.utils.errors import UserError
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_dir import RunDir
from tandem.weights.files import WeightsPublisher

TrainingConfig = TrainerConfig | OfflineConfig


@contextmanager
def joined_ranks(config: TrainingConfig) -> Iterator[Ranks]:
    setup_torch(threads=config.threads, seed=config.seed, deterministic=config.deterministic)
    with joined(config.device, config.parallel.timeout_s, group_for_one=needs_group(config.parallel)) as ranks:
        library.load_for(ranks.device)
        yield ranks


def agree_on_start(config: TrainingConfig, ranks: Ranks, process: str) -> int:
    """The step to continue after, 0 for a new run. The first rank reads and checks the checkpoint for all."""
    start = 0
    if ranks.is_first:
        run_dir = RunDir(config.output_dir)
        start = start_step(run_dir, process, resume=config.resume, own_folder="weights", marker=MANIFEST)
        if start > config.max_steps:
            raise UserError(
                f"max_steps = {config.max_steps}, but the run in output_dir = {str(config.output_dir)!r} has a "
                f"checkpoint of step {start}; the smallest valid value is {start}"
            )
    return int(ranks.all_max(torch.tensor(start, device=ranks.device)))


# Takes the weights under their Hugging Face names, or an adapter under PEFT's, one after the other, and their version.
Publish = Callable[[Iterable[tuple[str, Tensor]], int], object]


@dataclass(frozen=True)
class TrainState:
    """A model in training, with the module that holds its weights."""

    config: ModelConfig
    lora: LoRAConfig | None
    decoder: Trainable
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    stepper: Stepper[Predictions]

    def publish(self, publish: Publish, version: int, elsewhere: Publish | None = None) -> None:
        """Every rank takes part in putting the weights together, an adapter merged into them; the first one
        publishes them. `elsewhere`: what the others do with them, if anything."""
        stream = stream_tensors if self.lora is None else stream_merged
        self._publish(stream(self.decoder), publish, version, elsewhere)

    def publish_adapter(self, publish: Publish, version: int, elsewhere: Publish | None = None) -> None:
        """The same for the adapter alone."""
        self._publish(adapter_tensors(self.decoder).items(), publish, version, elsewhere)

    def _publish(
        self, tensors: Iterable[tuple[str, Tensor]], publish: Publish, version: int, elsewhere: Publish | None
    ) -> None:
        if self.stepper.ranks.is_first:
            publish(tensors, version)
        elif elsewhere is not None:
            elsewhere(tensors, version)
        else:
            for _ in tensors:  # the others help to gather each of them, and keep none
                pass

    def save_adapter(self, folder: Path, version: int) -> None:
        """The adapter, if one is trained, for those who want it apart from the model."""
        if self.adapter_config is not None:
            publisher = WeightsPublisher(folder, self.config.name, "float32", 1, adapter_config=self.adapter_config)
            self.publish_adapter(publisher.publish, version)

    @property
    def adapter_config(self) -> dict[str, Any] | None:
        """What PEFT has to know of the adapter; None: the whole model is trained."""
        return self.lora and adapter_config(self.decoder, self.lora, self.config.name.resolve())

    def throughput(self) -> Throughput:
        ranks = self.stepper.ranks
        num_parameters = sum(parameter.numel() for parameter in self.decoder.parameters())
        return Throughput(self.decoder.spec, num_parameters, ranks.device, ranks.size)


def load_trained(
    model_config: ModelConfig,
    optimizer_config: OptimizerConfig,
    parallel: ParallelConfig,
    ranks: Ranks,
    *,
    lora: LoRAConfig | None = None,
    seed: int = 0,
    entropy_gradient: bool = False,
    critic: PpoConfig | None = None,
    batch_invariant: bool = False,
) -> TrainState:
    """The model in float32 whatever it computes in, spread as the configuration says; a critic gets a value head."""
    home = home_of(parallel, ranks.device)
    decoder = load_trainable(model_config, home, lora, seed)
    if batch_invariant:
        make_batch_invariant(decoder, ranks.device)
    head = None if critic is None else new_value_head(decoder.spec.hidden_size, home)
    model = LanguageModel(decoder, head, keep_logits=keeps_logits(parallel.gradient_checkpointing))
    stepper = make_stepper(
        model,
        decoder.layers,
        model_config,
        optimizer_config,
        parallel,
        ranks,
        Predictions,
        value_head_lr=critic.critic_lr if critic else None,
        entropy_gradient=entropy_gradient,
    )
    return TrainState(model_config, lora, decoder, model, stepper.optimizer, stepper)


def make_stepper(
    model: nn.Module,
    layers: nn.ModuleList,
    model_config: ModelConfig,
    optimizer_config: OptimizerConfig,
    parallel: ParallelConfig,
    ranks: Ranks,
    predictions: type[P],
    *,
    value_head_lr: float | None = None,
    entropy_gradient: bool = False,
) -> Stepper[P]:
    """Spread a model, whose outputs are `predictions`, over the ranks and give it an optimizer."""
    dtype = getattr(torch, model_config.dtype)
    prepare(model, layers, parallel, ranks, dtype)
    offload = parallel.optimizer_offload and ranks.device.type == "cuda"
    return Stepper(
        model,
        make_optimizer(model, optimizer_config, value_head_lr=value_head_lr, offload=offload),
        ranks,
        parallel,
        predictions,
        max_grad_norm=optimizer_config.max_grad_norm,
        entropy_gradient=entropy_gradient,
    )


def new_value_head(hidden_size: int, device: torch.device) -> nn.Linear:
    """Initialized to zero: it predicts a return of 0 at first."""
    head = nn.Linear(hidden_size, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
