"""Log-prob and entropy of given tokens from hidden states, without keeping more logits than there is room for.

Logits are made in chunks that fill a GPU, in the precision of the hidden states; one kernel reads each of them once.
In the backward pass their gradient is written over them. Chunks that there is no room to keep are made again.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tandem.models.gpu import exact
from tandem.models.gpu import kernels as triton_kernels
from tandem.models.gpu.logprobs_memory import plan_chunks
from tandem.models.kept import KeptSets
from tandem.models.precision import rounded

kernels: Any = triton_kernels  # launched as Triton's wrappers, whose types are not those of the functions


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float,
    entropy_gradient: bool,
    batch_invariant: bool = False,
    keep_logits: bool = True,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """`batch_invariant`: log-probs as exact mode has them (`models/exact.py`). `kept`: of truncated distributions."""
    keep = keep_logits and torch.is_grad_enabled()
    return LogProbs.apply(hidden, weight, labels, temperature, entropy_gradient, batch_invariant, keep, kept)


class LogProbs(Function):
    """hidden (tokens, size), weight (vocab, size), labels (tokens,) -> log-prob and entropy (tokens,), float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        entropy_gradient: bool,
        batch_invariant: bool,
        keep: bool,
        sets: KeptSets | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, lse = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        copy = rounded(weight, hidden)
        temperatures = torch.full_like(logprobs, temperature) if batch_invariant else logprobs
        rows, num_kept = plan_chunks(len(hidden), len(weight) * hidden.element_size(), memory_of(hidden.device))
        kept: list[Tensor | None] = []
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            logits = exact.linear(hidden[part], copy, None) if batch_invariant else F.linear(hidden[part], copy)
            logits = logits if sets is None else sets.cut(logits, first)
            kernels.logprobs_forward[len(logits),](
                *(logits, labels[part], logprobs[part], entropy[part], lse[part], len(weight), 1 / temperature),
                **_options(len(weight)),
            )
            if batch_invariant:
                exact.token_logprobs(logits, labels[part], temperatures[part], out=logprobs[part])
            kept.append(logits if keep and len(kept) < num_kept else None)
        ctx.save_for_backward(hidden, weight, labels, entropy, lse)
        ctx.rows, ctx.kept, ctx.sets = rows, kept, sets
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, labels, entropy, lse = ctx.saved_tensors
        grad_logprobs, grad_entropy = grad_logprobs.contiguous(), grad_entropy.contiguous()
        copy = rounded(weight, hidden)
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        for number, first in enumerate(range(0, len(hidden), ctx.rows)):
            part = slice(first, first + ctx.rows)
            logits, ctx.kept[number] = ctx.kept[number], None
            if logits is None:
                logits = F.linear(hidden[part], copy)
                logits = logits if ctx.sets is None else ctx.sets.cut(logits, first)
            kernels.logprobs_backward[len(logits),](
                *(logits, labels[part], entropy[part], lse[part], grad_logprobs[part], grad_entropy[part]),
                *(len(weight), 1 / ctx.temperature),
                HAS_ENTROPY=ctx.entropy_gradient,
                **_options(len(weight)),
            )
            torch.mm(logits, copy, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                product = _exact_product(logits.T, hidden[part])
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None


def memory_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a·b, added up and given back in float32."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return (a @ b).float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _options(vocab: int) -> dict[str, int]:
    block = min(8192, triton.next_power_of_2(vocab))
    return {"BLOCK": block, "num_warps": 16 if block == 8192 else 4}
