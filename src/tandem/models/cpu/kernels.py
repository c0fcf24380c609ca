"""The compiled CPU kernels as functions of tensors. `find` says whether they can be used; callers then check nothing."""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.models.cpu import library

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
MAX_HEAD_DIM = 512
ELEMENTS_PER_THREAD = 16384  # with less to do, waking another thread costs more than it saves
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
ARGUMENTS = {
    "rms_norm": [POINTER, LONG, POINTER, POINTER, LONG, LONG, FLOAT, INT],
    "norm_rotate": [POINTER, LONG, POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, FLOAT, INT],
    "silu_mul": [POINTER, POINTER, LONG, LONG, INT],
    "decode_attention": [
        *[POINTER, LONG] * 3, POINTER, POINTER, POINTER, LONG, POINTER, POINTER, *[LONG] * 6, INT,
    ],
    "draw": [POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER, POINTER, INT],
}  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """For one element type."""

    functions: dict[str, "ctypes._NamedFuncPointer"]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.numel() // x.shape[-1]
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self.functions["rms_norm"](
            x.data_ptr(), size, weight.data_ptr(), out.data_ptr(), rows, size, eps, threads(x.numel())
        )
        return out

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """x (tokens, heads, head_dim), the heads of a token side by side; cos and sin (tokens, 1, head_dim)."""
        tokens, heads, head_dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        self.functions["norm_rotate"](
            x.data_ptr(), x.stride(0), None if weight is None else weight.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(), tokens, heads, head_dim, eps, threads(x.numel()),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(tokens, size, dtype=gate_up.dtype)
        self.functions["silu_mul"](gate_up.data_ptr(), out.data_ptr(), tokens, size, threads(gate_up.numel()))
        return out

    def decode_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        positions: Tensor,
        out: Tensor,
        window: int | None,
    ) -> None:
        """q (rows, heads, head_dim), k and v (rows, kv_heads, head_dim); keys and values (blocks, block_size,
        kv_heads, head_dim) get k and v; tables (rows, blocks) and positions (rows,) in int64."""
        rows, heads, head_dim = q.shape
        block_size, kv_heads = keys.shape[1], keys.shape[2]
        failed = self.functions["decode_attention"](
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            keys.data_ptr(), values.data_ptr(), tables.data_ptr(), tables.stride(0), positions.data_ptr(),
            out.data_ptr(), rows, heads, kv_heads, head_dim, block_size, window or 0, threads(q.numel() * 16),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the scores of an attention step")

    def draw(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """logits (rows, vocab), temperature and uniform (rows,) in float32 -> tokens and log-probs (rows,)."""
        rows, size = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self.functions["draw"](
            logits.data_ptr(), logits.stride(0), rows, size, temperature.data_ptr(), uniform.data_ptr(),
            tokens.data_ptr(), logprobs.data_ptr(), threads(logits.numel()),
        )  # fmt: skip
        return tokens, logprobs


def find(x: Tensor) -> Kernels | None:
    """Kernels for tensors like this one: on a CPU, in inference mode, where they could be compiled."""
    if x.device.type != "cpu" or not torch.is_inference_mode_enabled():
        return None
    return _kernels(x.dtype)


def threads(num_elements: int) -> int:
    return max(1, min(torch.get_num_threads(), num_elements // ELEMENTS_PER_THREAD))


@functools.cache
def _kernels(dtype: torch.dtype) -> Kernels | None:
    compiled = library.load() if dtype in SUFFIX else None
    if compiled is None:
        return None
    functions = {}
    for name, arguments in ARGUMENTS.items():
        function = getattr(compiled, f"{name}_{SUFFIX[dtype]}")
        function.argtypes = arguments
        function.restype = INT if name == "decode_attention" else None
        functions[name] = function
    return Kernels(functions)
