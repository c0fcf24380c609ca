"""How fast and how large: tokens per second, the share of the hardware's arithmetic that is used, memory."""

import resource
import sys

import torch

from tandem.models.hf_model import Shape
from tandem.models.spec import ModelSpec
from tandem.types.rollout import PackedBatch

# Dense bfloat16 arithmetic of GPUs, in FLOP/s, by a part of their name. Others get no utilization.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
}


class Throughput:
    """Of one kind of model on one kind of device, over all ranks."""

    def __init__(self, spec: ModelSpec | Shape, num_parameters: int, device: torch.device, world_size: int) -> None:
        self.num_parameters = num_parameters
        # A query meets each key twice, for scores and for values, two operations a multiplication and addition.
        self.attention_flops = 4 * spec.num_layers * spec.q_size
        self.device = device
        self.peak_flops = find_peak_flops(device)
        self.world_size = world_size

    def measure(self, batch: PackedBatch, seconds: float) -> dict[str, float]:
        """`batch` is what was computed in so many seconds, by all ranks together."""
        metrics = {
            "num_tokens": batch.num_tokens,
            "tokens_per_s": batch.num_tokens / seconds,
            "memory_gib": memory_bytes(self.device) / 2**30,
        }
        if self.peak_flops is not None:
            metrics["mfu"] = self.flops(batch) / seconds / (self.peak_flops * self.world_size)
        return metrics

    def flops(self, batch: PackedBatch) -> float:
        """Of forward and backward, which is twice as much: six for each parameter and token, and attention's."""
        seen = float((batch.positions + 1).sum())
        return 6.0 * self.num_parameters * batch.num_tokens + 3.0 * self.attention_flops * seen


def find_peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def memory_bytes(device: torch.device) -> int:
    """The most that was in use so far: of the GPU's memory, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
