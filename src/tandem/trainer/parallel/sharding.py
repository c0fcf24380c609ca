"""How a model and its optimizer are spread over the ranks and over memory.

ddp            every rank holds everything; gradients are summed once per update
zero2          gradients and optimizer state are sharded; parameters are gathered once per forward and backward
zero3          parameters are sharded too: each layer is gathered when it is needed and freed after
zero3_offload  like zero3, with what a rank owns in CPU memory
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from tandem.config.parallel import Checkpointing, ParallelConfig
from tandem.models.attention import leave_uncompiled
from tandem.models.recompute import keeping, recomputing
from tandem.trainer.parallel.ranks import Ranks

# Gradients travel together in pieces of about so many values.
BUCKET_SIZE = 2**24


def needs_group(config: ParallelConfig) -> bool:
    """Whether even one process needs a process group: offloading is FSDP's."""
    return config.strategy == "zero3_offload"


def prepare(model: nn.Module, layers: nn.ModuleList, config: ParallelConfig, ranks: Ranks, dtype: torch.dtype) -> None:
    """Recomputation and compilation of layers, then sharding; once, before the optimizer is made."""
    if config.compile:
        leave_uncompiled()
    for number, layer in enumerate(layers):
        if config.gradient_checkpointing in ("elementwise", "mlp"):
            layer.forward = recomputing(layer.forward)
        recomputed = recomputed_part(layer, number, config.gradient_checkpointing)
        if recomputed is not None:
            # In place of forward, so that neither parameters nor hooks change their names.
            # The state of random numbers takes time to keep, and matters to dropout only.
            recomputed.forward = partial(
                checkpoint,
                keeping(recomputed.forward),
                use_reentrant=False,
                preserve_rng_state=has_dropout(recomputed),
            )
        if config.compile:
            # Layers differ by a number only: what is compiled for one has to serve all, and batches of any size.
            torch._dynamo.config.allow_unspec_int_on_nn_module = True
            layer.compile(dynamic=True)
    if is_sharded(config, ranks):
        shard(model, layers, config, dtype, ranks.device)


def recomputed_part(layer: nn.Module, number: int, checkpointing: Checkpointing) -> nn.Module | None:
    """What of a layer is computed again as a whole. Models of transformers may have no `mlp`."""
    if checkpointing == "mlp":
        return getattr(layer, "mlp", layer)
    if checkpointing == "elementwise":
        return None
    return layer if checkpointing and number % checkpointing == 0 else None


def has_dropout(module: nn.Module) -> bool:
    """Of an adapter; models themselves are trained without."""
    shares = [part.p if isinstance(part, nn.Dropout) else getattr(part, "dropout", 0) for part in module.modules()]
    return any(isinstance(share, float) and share > 0 for share in shares)


def is_sharded(config: ParallelConfig, ranks: Ranks) -> bool:
    return config.strategy != "ddp" and (ranks.size > 1 or is_offloaded(config, ranks.device))


def is_offloaded(config: ParallelConfig, device: torch.device) -> bool:
    """On a CPU everything lies in CPU memory as it is."""
    return config.strategy == "zero3_offload" and device.type == "cuda"


def home_of(config: ParallelConfig, device: torch.device) -> torch.device:
    """Where parameters lie between the passes that compute with them on `device`."""
    return torch.device("cpu") if is_offloaded(config, device) else device


def shard(
    model: nn.Module, layers: Iterable[nn.Module], config: ParallelConfig, dtype: torch.dtype, device: torch.device
) -> None:
    """Parameters become DTensors, each rank owning its part; master weights stay in the precision they have."""
    # Here, since they take a second to import (`parts.py`).
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": config.strategy != "zero2",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
        ),
        "offload_policy": CPUOffloadPolicy() if is_offloaded(config, device) else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def add_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Sum the gradients of all ranks, many of them in one message."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            bucket.append(parameter.grad)
        if sum(gradient.numel() for gradient in bucket) >= BUCKET_SIZE:
            _add_bucket(bucket, ranks)
            bucket = []
    if bucket:
        _add_bucket(bucket, ranks)


def _add_bucket(gradients: list[Tensor], ranks: Ranks) -> None:
    joined = ranks.all_sum(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, part in zip(gradients, joined.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
