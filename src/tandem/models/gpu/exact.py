"""The sums of exact mode (`models/exact.py`) on a GPU: Triton kernels whose tiles and order of summation never change
with the batch. Engine and trainer launch the same ones."""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# It knows no Triton: of kernels and their launches it understands nothing.

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.models.cpu.kernels import Contexts

ROWS, OUTPUTS, INPUTS = 64, 128, 64  # of one tile of a product
KEYS = 64  # that a query looks at together
LOGITS = 4096  # that are added up together
LEAST_QUERIES = 16  # a matrix unit takes no fewer rows


@triton.jit
def _linear(
    x, weight, bias, out, rows, inputs, outputs, x_stride, weight_stride,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        k = start + tl.arange(0, INPUTS)
        a_mask = (row < rows)[:, None] & (k < inputs)[None, :]
        b_mask = (column < outputs)[None, :] & (k < inputs)[:, None]
        a = tl.load(x + row[:, None] * x_stride + k[None, :], mask=a_mask, other=0.0)
        b = tl.load(weight + column[None, :] * weight_stride + k[:, None], mask=b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q, keys, values, contexts, starts, counts, out, logsums, scale, window, heads,
    q_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    FOLDED: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, i, at = tl.arange(0, QUERIES), tl.arange(0, PADDED), tl.arange(0, KEYS)
    head = kv_head * FOLDED + n
    mask = (n < FOLDED)[:, None] & (i < SIZE)[None, :]
    query = tl.load(q + row * q_stride + head[:, None] * SIZE + i[None, :], mask=mask, other=0.0)
    start, count = tl.load(starts + row), tl.load(counts + row)
    first = tl.where(window > 0, tl.maximum(count - window, 0), 0)
    largest = tl.full((QUERIES,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, PADDED), dtype=tl.float32)
    for begin in range(first // KEYS * KEYS, count, KEYS):
        place = begin + at
        seen = (place >= first) & (place < count)
        token = tl.load(contexts + start + place, mask=seen, other=0)
        here = seen[:, None] & (i < SIZE)[None, :]
        key = tl.load(keys + token[:, None] * key_stride + kv_head * key_head_stride + i[None, :], mask=here, other=0.0)
        value = tl.load(
            values + token[:, None] * value_stride + kv_head * value_head_stride + i[None, :], mask=here, other=0.0
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fading = tl.exp(largest - higher)
        total = total * fading + tl.sum(weights, axis=1)
        mixed = mixed * fading[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = higher
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * heads + head[:, None]) * SIZE + i[None, :], result, mask=mask)
    tl.store(logsums + row * heads + head, largest + tl.log(total), mask=n < FOLDED)


@triton.jit
def _token_logprobs(logits, labels, temperatures, logprobs, size, stride, LOGITS: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, LOGITS)
    temperature = tl.load(temperatures + row)
    inverse = tl.where(temperature == 0, 1.0, 1.0 / temperature)
    largest = tl.full((LOGITS,), -float("inf"), dtype=tl.float32)
    for start in range(0, size, LOGITS):
        value = tl.load(logits + row * stride + start + i, mask=start + i < size, other=-float("inf"))
        largest = tl.maximum(largest, value.to(tl.float32))
    most = tl.max(largest, axis=0)
    sums = tl.zeros((LOGITS,), dtype=tl.float32)
    for start in range(0, size, LOGITS):
        value = tl.load(logits + row * stride + start + i, mask=start + i < size, other=-float("inf"))
        sums += tl.exp((value.to(tl.float32) - most) * inverse)
    own = tl.load(logits + row * stride + tl.load(labels + row)).to(tl.float32)
    tl.store(logprobs + row, (own - most) * inverse - tl.log(tl.sum(sums, axis=0)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(rows, outputs)
    if rows:
        _linear[(triton.cdiv(rows, ROWS), triton.cdiv(outputs, OUTPUTS))](
            x, weight, weight if bias is None else bias, out, rows, inputs, outputs, x.stride(0), weight.stride(0),
            HAS_BIAS=bias is not None, ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS, num_warps=8,
        )  # fmt: skip
    return out


def attend(q: Tensor, keys: Tensor, values: Tensor, contexts: Contexts, window: int | None) -> tuple[Tensor, Tensor]:
    rows, heads, head_dim = q.shape
    q, kv_heads = q.contiguous(), keys.shape[1]
    out, logsums = torch.empty_like(q), torch.empty(rows, heads, device=q.device)
    folded = heads // kv_heads
    if rows:
        _attend[(rows, kv_heads)](
            q, keys, values, contexts.rows, contexts.starts, contexts.seen, out, logsums,
            1 / math.sqrt(head_dim), window or 0, heads, q.stride(0), *keys.stride()[:2], *values.stride()[:2],
            FOLDED=folded, QUERIES=max(LEAST_QUERIES, triton.next_power_of_2(folded)), SIZE=head_dim,
            PADDED=max(16, triton.next_power_of_2(head_dim)), KEYS=KEYS, num_warps=4,
        )  # fmt: skip
    return out, logsums


def token_logprobs(logits: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    rows, size = logits.shape
    logits = logits.contiguous()
    logprobs = torch.empty(rows, device=logits.device)
    if rows:
        _token_logprobs[(rows,)](
            logits, labels.contiguous(), temperature, logprobs, size, logits.stride(0), LOGITS=LOGITS, num_warps=8
        )
    return logprobs
