"""The default of tokens_per_microbatch: on a GPU, as many as its memory holds, as long as more is faster."""

from typing import Any

import torch

from tandem.models.decoder import Decoder
from tandem.models.gpu.logprobs_memory import CHUNK_SHARE, KEPT_SHARE
from tandem.models.memory import DEFAULT, activation_bytes, fitting_tokens
from tandem.trainer.model.optimizer import local
from tandem.trainer.model.step import Stepper


def tokens_per_microbatch(stepper: Stepper[Any], asked: int, *, least: int, deterministic: bool) -> int:
    """What was `asked` for, unless that is 0; else at least `least`, and the same on all ranks.

    To be asked before the first step, when whoever shares the GPU has taken its part.
    """
    if asked:
        return asked
    decoder = next((module for module in stepper.model.modules() if isinstance(module, Decoder)), None)
    device = stepper.ranks.device
    if device.type != "cuda" or deterministic or decoder is None:
        return max(least, DEFAULT)
    smallest = -stepper.ranks.all_max(torch.tensor([-_fitting(stepper, decoder)], device=device))
    return max(least, int(smallest))


def _fitting(stepper: Stepper[Any], decoder: Decoder) -> int:
    device, parallel, spec = stepper.ranks.device, stepper.parallel, decoder.spec
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    dtype = decoder.compute_dtype or torch.float32
    trained = sum(local(p).numel() for p in decoder.parameters() if p.requires_grad)
    # Rounded weights are kept for the backward pass.
    rounded = sum(local(p).numel() for p in decoder.parameters()) if dtype != torch.float32 else 0
    state = 4 if parallel.optimizer_offload else 12  # bytes: gradient, and Adam's two moments
    head = 8 * spec.vocab_size * spec.hidden_size  # its gradient, and that of a chunk
    taken = trained * state + rounded * dtype.itemsize + head + int(total * (CHUNK_SHARE + KEPT_SHARE))
    return fitting_tokens(free, taken, activation_bytes(spec, dtype.itemsize, parallel.gradient_checkpointing))
