"""The compiled CPU kernels as functions of tensors. `find` says whether they can be used; callers then check nothing.

They know nothing of gradients; `autograd.py` puts forward and backward together.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.models.cpu import library

SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
MAX_HEAD_DIM = 512
LANES = 16  # packed attention works on whole vectors
PANEL = 32  # outputs of a matrix are rounded up to this in exact mode: a multiple of what every machine takes at once
ELEMENTS_PER_THREAD = 16384  # with less to do, waking another thread costs more than it saves
POINTER, LONG, FLOAT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
ARGUMENTS = {
    "rms_norm": [POINTER, LONG, POINTER, POINTER, LONG, LONG, FLOAT, INT],
    "norm_rotate": [POINTER, LONG, POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, FLOAT, INT],
    "silu_mul": [POINTER, POINTER, LONG, LONG, INT],
    "decode_attention": [
        *[POINTER, LONG] * 3, POINTER, POINTER, POINTER, LONG, POINTER, POINTER, *[LONG] * 6, INT,
    ],
    "rms_norm_backward": [*[POINTER] * 5, LONG, LONG, FLOAT, INT],
    "norm_rotate_backward": [
        POINTER, LONG, *[POINTER] * 5, LONG, POINTER, LONG, LONG, LONG, FLOAT, INT,
    ],
    "silu_mul_backward": [*[POINTER] * 3, LONG, LONG, INT],
    "packed_attention": [*[POINTER] * 3, LONG, *[POINTER] * 5, *[LONG] * 5, INT],
    "packed_attention_backward": [*[POINTER] * 3, LONG, *[POINTER] * 9, *[LONG] * 5, INT],
    "pack_panels": [POINTER, LONG, POINTER, LONG, LONG, INT],
    "exact_linear": [POINTER, LONG, *[POINTER] * 3, LONG, LONG, LONG, INT],
    "exact_attention": [*[POINTER] * 8, *[LONG] * 5, INT],
    "token_logprobs": [POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER, INT],
    "draw": [POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER, POINTER, INT],
}  # fmt: skip


CAN_FAIL = {  # for want of memory; they say so
    "decode_attention", "packed_attention", "packed_attention_backward", "rms_norm_backward", "norm_rotate_backward",
    "exact_linear", "exact_attention",
}  # fmt: skip


@dataclass(frozen=True)
class SegmentLayout:
    """Packed sequences, one entry a token: it sees `prefix_lengths` tokens from `prefix_starts` on, then those from
    `starts` to itself. All in int64."""

    starts: Tensor
    prefix_starts: Tensor
    prefix_lengths: Tensor


@dataclass(frozen=True)
class Contexts:
    """What each query looks at, in exact mode: the n-th of the `seen` tokens of a query lies in row
    `rows[start + n]` of keys and values. All in int64."""

    rows: Tensor  # of all sequences, one after the other
    starts: Tensor  # (queries,)
    seen: Tensor  # (queries,)


@dataclass(frozen=True)
class Kernels:
    """For one element type."""

    functions: dict[str, "ctypes._NamedFuncPointer"]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.numel() // x.shape[-1]
        x = x.contiguous()
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._call(
            "rms_norm", x.data_ptr(), size, weight.data_ptr(), out.data_ptr(), rows, size, eps, threads(x.numel())
        )
        return out

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """x (tokens, heads, head_dim), the heads of a token side by side; cos and sin (tokens, 1, head_dim)."""
        tokens, heads, head_dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype)
        self._call("norm_rotate",
            x.data_ptr(), x.stride(0), None if weight is None else weight.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            out.data_ptr(), tokens, heads, head_dim, eps, threads(x.numel()),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(tokens, size, dtype=gate_up.dtype)
        self._call("silu_mul", gate_up.data_ptr(), out.data_ptr(), tokens, size, threads(gate_up.numel()))
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
        self._call("decode_attention",
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
            keys.data_ptr(), values.data_ptr(), tables.data_ptr(), tables.stride(0), positions.data_ptr(),
            out.data_ptr(), rows, heads, kv_heads, head_dim, block_size, window or 0, threads(q.numel() * 16),
        )  # fmt: skip

    def rms_norm_backward(self, x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
        size = x.shape[-1]
        dx, dweight = torch.empty_like(x), torch.empty_like(weight)
        self._call("rms_norm_backward",
            x.data_ptr(), weight.data_ptr(), grad.data_ptr(), dx.data_ptr(), dweight.data_ptr(),
            x.numel() // size, size, eps, threads(x.numel()),
        )  # fmt: skip
        return dx, dweight

    def norm_rotate_backward(
        self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        tokens, heads, head_dim = x.shape
        dx, dweight = torch.empty(x.shape), None if weight is None else torch.empty_like(weight)
        self._call("norm_rotate_backward",
            x.data_ptr(), x.stride(0), None if weight is None else weight.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            grad.data_ptr(), dx.data_ptr(), dx.stride(0), None if dweight is None else dweight.data_ptr(),
            tokens, heads, head_dim, eps, threads(x.numel()),
        )  # fmt: skip
        return dx, dweight

    def silu_mul_backward(self, gate_up: Tensor, grad: Tensor) -> Tensor:
        tokens, size = grad.shape
        out = torch.empty_like(gate_up)
        self._call("silu_mul_backward",
            gate_up.data_ptr(), grad.data_ptr(), out.data_ptr(), tokens, size, threads(gate_up.numel()),
        )  # fmt: skip
        return out

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: SegmentLayout, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """-> what q (tokens, heads, head_dim) sees, like q, and the log of its softmax's sums (tokens, heads)."""
        tokens, heads, head_dim = q.shape
        out, logsums = torch.empty(q.shape), torch.empty(tokens, heads)
        self._call("packed_attention",
            q.data_ptr(), k.data_ptr(), v.data_ptr(), v.stride(0), out.data_ptr(), logsums.data_ptr(),
            layout.starts.data_ptr(), layout.prefix_starts.data_ptr(), layout.prefix_lengths.data_ptr(), window or 0,
            tokens, heads, k.shape[1], head_dim, threads(q.numel() * 16),
        )  # fmt: skip
        return out, logsums

    def packed_attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: SegmentLayout,
        window: int | None,
        out: Tensor,
        logsums: Tensor,
        grad: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, heads, head_dim = q.shape
        dq, dk, dv = torch.empty(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
        self._call("packed_attention_backward",
            q.data_ptr(), k.data_ptr(), v.data_ptr(), v.stride(0), out.data_ptr(), logsums.data_ptr(), grad.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(),
            layout.starts.data_ptr(), layout.prefix_starts.data_ptr(), layout.prefix_lengths.data_ptr(), window or 0,
            tokens, heads, k.shape[1], head_dim, threads(q.numel() * 16),
        )  # fmt: skip
        return dq, dk, dv

    def pack_panels(self, weight: Tensor) -> Tensor:
        """weight (outputs, inputs), laid out for `exact_linear`."""
        outputs, inputs = weight.shape
        weight = weight.contiguous()
        packed = torch.empty(-(-outputs // PANEL) * PANEL * inputs, dtype=weight.dtype)
        self._call(
            "pack_panels", weight.data_ptr(), inputs, packed.data_ptr(), outputs, inputs, threads(weight.numel())
        )
        return packed

    def exact_linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """x (rows, inputs) times a packed weight."""
        rows, inputs = x.shape
        x = x.contiguous()
        out = torch.empty(rows, outputs, dtype=x.dtype)
        self._call("exact_linear",
            x.data_ptr(), inputs, packed.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            rows, inputs, outputs, threads(rows * inputs * outputs // 16),
        )  # fmt: skip
        return out

    def exact_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, contexts: Contexts, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """q (queries, heads, head_dim), keys and values (rows, kv_heads, head_dim) -> what each query sees, like q,
        and the log of its softmax's sums (queries, heads)."""
        rows, heads, head_dim = q.shape
        q, keys, values = q.contiguous(), keys.contiguous(), values.contiguous()
        out, logsums = torch.empty_like(q), torch.empty(rows, heads)
        self._call("exact_attention",
            q.data_ptr(), keys.data_ptr(), values.data_ptr(), contexts.rows.data_ptr(), contexts.starts.data_ptr(),
            contexts.seen.data_ptr(), out.data_ptr(), logsums.data_ptr(),
            rows, heads, keys.shape[1], head_dim, window or 0, threads(q.numel() * 16),
        )  # fmt: skip
        return out, logsums

    def token_logprobs(self, logits: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
        """logits (rows, vocab), labels in int64 and temperature in float32 (rows,) -> log-probs (rows,)."""
        rows, size = logits.shape
        logits, labels = logits.contiguous(), labels.contiguous()
        logprobs = torch.empty(rows)
        self._call("token_logprobs",
            logits.data_ptr(), size, rows, size, temperature.data_ptr(), labels.data_ptr(), logprobs.data_ptr(),
            threads(logits.numel()),
        )  # fmt: skip
        return logprobs

    def draw(self, logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """logits (rows, vocab), temperature and uniform (rows,) in float32 -> tokens and log-probs (rows,)."""
        rows, size = logits.shape
        tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
        self._call("draw",
            logits.data_ptr(), logits.stride(0), rows, size, temperature.data_ptr(), uniform.data_ptr(),
            tokens.data_ptr(), logprobs.data_ptr(), threads(logits.numel()),
        )  # fmt: skip
        return tokens, logprobs

    def _call(self, name: str, *arguments: float | None) -> None:
        if self.functions[name](*arguments):
            raise MemoryError(f"not enough memory for the buffers of {name}")


def find(x: Tensor) -> Kernels | None:
    """Kernels for tensors like this one: on a CPU, where they could be compiled. Whether there are gradients does not
    matter: with and without them, results are the same to the bit."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
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
        function = getattr(compiled, f"{name}_{SUFFIX[dtype]}", None)  # some exist in float32 only
        if function is not None:
            function.argtypes = arguments
            function.restype = INT if name in CAN_FAIL else None
            functions[name] = function
    return Kernels(functions)
