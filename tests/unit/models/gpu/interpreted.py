"""Compares every Triton kernel with float32 PyTorch. On a CPU by Triton's interpreter, which has to be chosen before
Triton is imported (TRITON_INTERPRET=1): `test_kernels.py` runs this file in a process of its own, `tests/gpu` uses it.

Every comparison is ‖found − expected‖ / ‖expected‖, over values and gradients.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.data.packing import pack
from tandem.models import ops
from tandem.models.gpu import autograd, logprobs
from tandem.models.hf import new_decoder
from tandem.models.kept import CUT_OFF, KeptSets
from tandem.models.spec import ModelSpec
from tandem.trainer.model import logprobs as trainer_logprobs
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import TrainingSequence

EPS = 1e-6
Case = tuple[str, Callable[[], float]]


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        errors.append(float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-20)))
    return max(errors)


def with_gradients(function: Callable[..., Sequence[Tensor]], *inputs: Tensor | None) -> list[Tensor]:
    """What the function gives, then the gradients of its inputs under pulls that depend on shapes alone."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = [out for out in function(*leaves) if out.requires_grad]
    pulls = [torch.linspace(-1, 1, out.numel()).cos().to(out).view_as(out) for out in outputs]
    gradients = torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], pulls)
    return [out.detach() for out in outputs] + list(gradients)


def compare(
    kernel: Callable[..., Sequence[Tensor]], twin: Callable[..., Sequence[Tensor]], *inputs: Tensor | None
) -> float:
    """The twin gets the same numbers in float32."""
    exact = [None if x is None else x.float() for x in inputs]
    return relative_error(with_gradients(kernel, *inputs), with_gradients(twin, *exact))


def cases(device: str, dtype: torch.dtype, scale: int) -> Iterator[Case]:
    """Odd sizes; `scale` makes them larger where that costs nothing."""
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    for rows, size in ((5, 40), (7 * scale, 128), (600 if scale > 1 else 3, 1000)):
        x, delta, weight = randn(rows, size), randn(rows, size), randn(size)
        yield (
            f"add_norm {rows}x{size}",
            lambda x=x, delta=delta, weight=weight: compare(
                lambda x, d, w: autograd.AddNorm.apply(x, d, w, EPS),
                lambda x, d, w: (x + d, F.rms_norm(x + d, w.shape, w, EPS)),
                *(x, delta, weight),
            ),
        )
        yield (
            f"norm {rows}x{size}",
            lambda x=x, weight=weight: compare(
                lambda x, w: autograd.AddNorm.apply(x, None, w, EPS),
                lambda x, w: (x * 1, F.rms_norm(x, w.shape, w, EPS)),
                *(x, weight),
            ),
        )
    for shape, tokens, has_norm in (((4, 2, 32), 5, True), ((3, 1, 24), 7 * scale, True), ((6, 2, 16), 3, False)):
        yield f"heads {shape} {tokens} {has_norm}", heads_case(randn, shape, tokens, has_norm)
    for rows, size in ((3, 20), (5 * scale, 1030)):
        gate_up = randn(rows, 2 * size)
        yield (
            f"silu_mul {rows}x{size}",
            lambda gate_up=gate_up: compare(
                lambda x: (autograd.SiluMul.apply(x),),
                lambda x: (F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],),
                gate_up,
            ),
        )
    small, large = (7, 16, 37), (130, 32, 1500 * scale)
    for shape, temperature, has_entropy in ((small, 1.0, False), (small, 0.7, True), (large, 0.7, True)):
        yield f"logprobs {shape} {temperature} {has_entropy}", logprobs_case(randn, shape, temperature, has_entropy)
    yield f"logprobs {large} truncated", logprobs_case(randn, large, 0.7, True, truncated=True)


def heads_case(
    randn: Callable[..., Tensor], shape: tuple[int, int, int], tokens: int, has_norm: bool
) -> Callable[[], float]:
    num_q, num_k, head_dim = shape
    qkv = randn(tokens, (num_q + 2 * num_k) * head_dim)
    weights = (randn(head_dim), randn(head_dim)) if has_norm else (None, None)
    angles = torch.arange(tokens)[:, None, None] * torch.rand(head_dim // 2)
    cos = torch.cat((angles.cos(),) * 2, -1).to(qkv)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(qkv)

    def twin(qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[Tensor, ...]:
        sizes = [num_q * head_dim, num_k * head_dim, num_k * head_dim]
        q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, dim=-1))
        q, k = (
            ops.rotate(x if w is None else F.rms_norm(x, w.shape, w, EPS), cos.float(), sin.float())
            for x, w in ((q, q_weight), (k, k_weight))
        )
        return q, k, v * 1

    return lambda: compare(
        lambda qkv, q_weight, k_weight: autograd.Heads.apply(qkv, q_weight, k_weight, cos, sin, shape, EPS),
        twin,
        *(qkv, *weights),
    )


def logprobs_case(
    randn: Callable[..., Tensor],
    shape: tuple[int, int, int],
    temperature: float,
    has_entropy: bool,
    *,
    truncated: bool = False,
) -> Callable[[], float]:
    tokens, size, vocab = shape
    hidden, weight = randn(tokens, size), randn(vocab, size)
    labels = torch.arange(tokens, device=hidden.device) * 31 % vocab
    is_kept = torch.rand(tokens, vocab) < 0.3
    is_kept.scatter_(1, labels.cpu()[:, None], True)
    is_kept[::3] = True  # nothing was cut off there
    counts = is_kept.sum(1).where(~is_kept.all(1), 0)
    kept = KeptSets.of(counts.numpy(), is_kept[counts > 0].nonzero()[:, 1].numpy(), hidden.device)

    def twin(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, weight)
        if truncated:
            logits = logits.masked_fill(~is_kept.to(hidden.device), CUT_OFF)
        distribution = (logits / temperature).log_softmax(-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, labels[:, None])[:, 0], entropy if has_entropy else entropy.detach()

    def kernel(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        sets = kept if truncated else None
        return logprobs.token_logprobs(hidden, weight, labels, temperature, has_entropy, kept=sets)

    return lambda: compare(kernel, twin, hidden, weight)


def model_case() -> float:
    """A whole model with all kernels at once, in the precision it is kept in, against the same without them."""
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 61, "hidden_size": 40, "intermediate_size": 72}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = LanguageModel(new_decoder(ModelSpec.from_config(config | {"tie_word_embeddings": True}), seed=0))
    # Two completions of one prompt, and a sequence by itself.
    rows = [([5, 6, 7, 8], [9, 10, 11]), ([5, 6, 7, 8], [12, 13]), ([3], [20, 21, 22, 23])]
    batch = pack([TrainingSequence(prompt + rest, [0] * len(prompt) + [1] * len(rest)) for prompt, rest in rows])

    def learned() -> list[Tensor]:
        model.zero_grad()
        predicted, entropy = model(Inputs.of(batch, torch.device("cpu")), 0.7, True)
        (predicted.sum() + 0.1 * entropy.sum()).backward()
        return [predicted.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = learned()
    with ExitStack() as stack:
        for module in (ops, trainer_logprobs):
            stack.enter_context(patch.object(module, "has_kernels", lambda x: True))
        return relative_error(learned(), expected)


def main() -> None:
    torch.manual_seed(0)
    errors: dict[str, float] = {}
    whole, chunked = 10**9, 10_000_000  # with little memory log-probs come in several chunks, some of them kept
    for memory_bytes in (whole, chunked):
        logprobs.memory_of = lambda device, memory_bytes=memory_bytes: memory_bytes
        for dtype in (torch.float32, torch.bfloat16):
            for name, case in cases("cpu", dtype, scale=1):
                if memory_bytes == whole or name.startswith("logprobs"):
                    errors[f"{name} {dtype} {memory_bytes}"] = case()
        errors[f"model {memory_bytes}"] = model_case()
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
