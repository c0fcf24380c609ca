"""Compiles every Triton kernel for a GPU of the compute capability that is given (such as 90), which needs no GPU, and
prints how much shared memory each takes at most. `test_cuda_kernels.py` runs this file in a process of its own."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# Triton is changed under its feet.

import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tandem.engine.cuda import attention, draw, gemm, kept, layers, prefill
from tandem.engine.kv_cache import KVCache
from tandem.models.gpu import autograd, exact, kernels, logprobs
from tandem.models.gpu.tiles import Tiles

HOPPER = 90
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
NARROW, USUAL, WIDE = (9, 3, 64), (16, 8, 128), (8, 4, 256)  # query heads, KV heads, head_dim
WIDE_CASES = [(WIDE, BFLOAT16), (USUAL, FLOAT32)]  # which cards with little shared memory must hold as well


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def compile_heads(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    cache = KVCache(1, 8, 16, kv_heads, dim, dtype, torch.device("cpu"), heads_first=True)
    keys, values = cache.keys[0], cache.values[0]
    q, zeros = torch.zeros(64, heads, dim, dtype=dtype), int32(*[0] * 64)
    for shared in (None, attention.SharedRows(zeros, zeros[:32], zeros[:32])):
        attention.DecodeRows(zeros, int32(1), zeros, zeros.expand(5, 64), zeros, shared).attend(q, keys, values, None)
    for window in (None, 100) if dtype == BFLOAT16 else (None,):
        prefill.PrefillTiles(zeros, int32(1), *4 * [zeros[:1]]).attend(q, keys, values, window)
    exact.attend(q, keys, values, Tiles(zeros, *4 * [zeros[:1]]), None)
    layers.write(keys[0], values[0], zeros, keys, values)
    qkv = torch.zeros(64, (heads + 2 * kv_heads) * dim, dtype=dtype, requires_grad=True)
    weight, turn = torch.ones(dim, dtype=dtype), torch.zeros(64, dim // 2, dtype=dtype)
    wide = torch.zeros(64, 1, dim, dtype=dtype)
    for norms in (None, (weight, weight, 1e-6)):
        to = layers.Heads(heads, norms, (turn, turn), zeros, zeros, keys, values)
        layers.norm_rotate_write(qkv.detach(), to)
        weights = (None, None) if norms is None else norms[:2]
        outputs = autograd.Heads.apply(qkv, *weights, wide, wide, (heads, kv_heads, dim), 1e-6)
        torch.autograd.backward(outputs, [torch.zeros_like(out) for out in outputs])


def compile_rows(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(64, size, dtype=dtype, requires_grad=True), torch.zeros(size, dtype=dtype)
    given = x.detach()
    for delta in (None, given.clone(), torch.zeros(4, *x.shape)):
        layers.add_norm(given, delta, weight, 1e-6)
    layers.silu_mul(given)
    layers.embed(int32(0), int32(0), int32(0), given)
    for rows, outputs in ((64, 128), (256, 4096), (4096, 4096)):
        to = torch.zeros(outputs, size, dtype=dtype)
        exact.linear(torch.zeros(rows, size, dtype=dtype), to, None)
    for delta in (None, given.clone()):
        total, y = autograd.AddNorm.apply(x, delta, weight, 1e-6)
        torch.autograd.backward([total, y], [given, given])
    autograd.SiluMul.apply(x).backward(given[:, : size // 2])


def compile_logits(vocab: int, dtype: torch.dtype) -> None:
    logits, zeros, ones = torch.zeros(4, vocab, dtype=dtype), int32(0, 0, 0, 0), torch.ones(4)
    drawn = draw.draw(logits, zeros, draw.DrawRows(zeros, ones, ones, ones, ones, zeros, zeros, zeros), zeros)
    asked = kept.KeptRows(zeros, zeros, ones, ones)
    for batch_invariant in (False, True):
        kept.keep(logits, logits, asked, drawn, torch.clone, batch_invariant=batch_invariant)
    exact.token_logprobs(logits, zeros.long(), ones)
    hidden, weight = torch.zeros(4, 16, dtype=dtype, requires_grad=True), torch.zeros(vocab, 16, dtype=dtype)
    logprob, entropy = logprobs.token_logprobs(hidden, weight, zeros.long(), 0.7, True)
    torch.autograd.backward([logprob, entropy], [ones, ones])


def compile_products(heads: int, kv_heads: int, dim: int) -> None:
    """Which are for Hopper alone, in bfloat16."""
    cache = KVCache(1, 8, 16, kv_heads, dim, BFLOAT16, torch.device("cpu"), heads_first=True)
    zeros, turn, norm = int32(*[0] * 128), torch.zeros(64, dim // 2, dtype=BFLOAT16), torch.ones(dim, dtype=BFLOAT16)
    weight = torch.zeros((heads + 2 * kv_heads) * dim, 576, dtype=BFLOAT16)
    for rows in (16, 128):
        x = torch.zeros(rows, 576, dtype=BFLOAT16)
        gemm.split(x, weight, 3)
        gemm.gate_up(x, weight)
        for norms in (None, (norm, norm, 1e-6)):
            to = layers.Heads(heads, norms, (turn, turn), zeros, zeros, cache.keys[0], cache.values[0])
            gemm.qkv(x, weight, to)


def main(capability: int) -> None:
    target = GPUTarget("cuda", capability, 32)
    card = {"get_current_target": lambda: target, "get_current_device": lambda: 0, "get_current_stream": lambda _: 0}
    driver.set_active(SimpleNamespace(**card))
    most: dict[str, int] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        found = run(kernel, *args, **{**options, "warmup": True})
        most[kernel.__name__] = max(found.metadata.shared, most.get(kernel.__name__, 0))

    JITFunction.run = compile_only
    logprobs.memory_of = lambda device: 10**9
    modules = [attention, prefill, draw, kept, layers, kernels, exact]
    heads, rows = [(USUAL, BFLOAT16), (NARROW, BFLOAT16)], [(BFLOAT16, 576, 64), (FLOAT32, 4096, 151_936)]
    if capability == HOPPER:
        modules.append(gemm)
        for module in (attention, prefill, draw, layers, gemm):
            module.early = lambda device: {"EARLY": True, "launch_pdl": True}
        for shape in (NARROW, USUAL):
            compile_products(*shape)
    else:  # what takes most shared memory
        heads, rows = WIDE_CASES, [(FLOAT32, 4096, 151_936)]
    for shape, dtype in heads:
        compile_heads(*shape, dtype)
    for dtype, size, vocab in rows:
        compile_rows(size, dtype)
        compile_logits(vocab, dtype)
    print(json.dumps({"shared_bytes": most, "forgotten": sorted(launched(modules) - most.keys())}))


def launched(modules: Sequence[Any]) -> set[str]:
    """All kernels, without the functions that they call."""
    functions = {
        name: found for module in modules for name, found in vars(module).items() if isinstance(found, JITFunction)
    }
    bodies = [found.src.partition("):")[2] for found in functions.values()]
    return {name for name in functions if not any(f"{name}(" in body for body in bodies)}


if __name__ == "__main__":
    main(int(sys.argv[1]))
