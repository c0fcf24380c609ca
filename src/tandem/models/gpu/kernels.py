"""What lies between the decoder's matrix products, as Triton kernels, one for each operation and one for its gradient.

Everything is computed in float32 and rounded once. Weights are rounded to the precision of `x` first, whatever they are
kept in. The plain PyTorch twins are in `ops.py`; `autograd.py` launches these. Import this module only where Triton is.
"""

# pyright: reportPossiblyUnboundVariable=false
# What a flag leaves out at compile time is not used there either.

import triton
import triton.language as tl


@triton.jit
def add_norm_forward(x, delta, weight, total, y, size: tl.constexpr, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """total = x + delta; y = total / rms(total) · weight. A row each."""
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    inside = i < size
    dtype = x.dtype.element_ty
    value = tl.load(x + row + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row + i, value.to(dtype), mask=inside)
        value = value.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(dtype).to(tl.float32)
    tl.store(y + row + i, (value * scale * w).to(dtype), mask=inside)


@triton.jit
def add_norm_backward(
    total, weight, grad_y, grad_total, grad_x, grad_weight, rows, size: tl.constexpr, eps,
    HAS_GRAD_TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of x, which is that of delta, and a part of the weight's for each program: every n-th row's."""
    i = tl.arange(0, BLOCK)
    inside = i < size
    dtype = total.dtype.element_ty
    w = tl.load(weight + i, mask=inside, other=0.0).to(dtype).to(tl.float32)
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = (tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)) * size
        value = tl.load(total + row + i, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + row + i, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / size + eps)
        normed = value * scale
        of_weight += grad * normed
        grad = grad * w
        out = scale * (grad - normed * (tl.sum(grad * normed) / size))
        if HAS_GRAD_TOTAL:
            out += tl.load(grad_total + row + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + row + i, out.to(dtype), mask=inside)
    tl.store(grad_weight + tl.program_id(0) * size + i, of_weight, mask=inside)


@triton.jit
def heads_forward(
    qkv, q_weight, k_weight, cos, sin, q, k, num_q: tl.constexpr, num_k: tl.constexpr, half: tl.constexpr, stride, eps,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The query and key heads of a token, RMS-normalized, RoPE applied. `sin` carries the sign of the rotation."""
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < num_q + num_k) & (i < half)
    dtype = qkv.dtype.element_ty
    at = qkv + token * stride + head * (2 * half) + i
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
        is_q = inside & (head < num_q)
        is_k = inside & (head >= num_q)
        w1 = tl.load(q_weight + i, mask=is_q, other=0.0) + tl.load(k_weight + i, mask=is_k, other=0.0)
        w2 = tl.load(q_weight + half + i, mask=is_q, other=0.0) + tl.load(k_weight + half + i, mask=is_k, other=0.0)
        first = first * scale * w1.to(dtype).to(tl.float32)
        second = second * scale * w2.to(dtype).to(tl.float32)
    angle = token * (2 * half) + i
    c1 = tl.load(cos + angle, mask=i < half, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angle + half, mask=i < half, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angle, mask=i < half, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angle + half, mask=i < half, other=0.0).to(tl.float32)
    y1 = (first * c1 + second * s1).to(dtype)
    y2 = (second * c2 + first * s2).to(dtype)
    to_q = q + (token * num_q + head) * (2 * half) + i
    tl.store(to_q, y1, mask=inside & (head < num_q))
    tl.store(to_q + half, y2, mask=inside & (head < num_q))
    to_k = k + (token * num_k + head - num_q) * (2 * half) + i
    tl.store(to_k, y1, mask=inside & (head >= num_q))
    tl.store(to_k + half, y2, mask=inside & (head >= num_q))


@triton.jit
def heads_backward(
    qkv, q_weight, k_weight, cos, sin, grad_q, grad_k, grad_v, grad_qkv, grad_weight,
    tokens, num_q: tl.constexpr, num_k: tl.constexpr, half: tl.constexpr, stride,
    q_token, q_head, k_token, k_head, v_token, v_head, eps,
    HAS_NORM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The gradient of query, key and value, side by side as they came, and a part of both weights' for each program."""
    head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < num_q + num_k) & (i < half)
    is_q = inside & (head < num_q)
    is_k = inside & (head >= num_q)
    dtype = qkv.dtype.element_ty
    width = (num_q + 2 * num_k) * 2 * half
    if HAS_NORM:
        w1 = tl.load(q_weight + i, mask=is_q, other=0.0) + tl.load(k_weight + i, mask=is_k, other=0.0)
        w2 = tl.load(q_weight + half + i, mask=is_q, other=0.0) + tl.load(k_weight + half + i, mask=is_k, other=0.0)
        w1 = w1.to(dtype).to(tl.float32)
        w2 = w2.to(dtype).to(tl.float32)
    of_w1 = tl.zeros([HEADS, HALF], dtype=tl.float32)
    of_w2 = tl.zeros([HEADS, HALF], dtype=tl.float32)
    for turn in range(tl.cdiv(tokens - tl.program_id(0), tl.num_programs(0))):
        token = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0)
        angle = token * (2 * half) + i
        c1 = tl.load(cos + angle, mask=i < half, other=0.0).to(tl.float32)
        c2 = tl.load(cos + angle + half, mask=i < half, other=0.0).to(tl.float32)
        s1 = tl.load(sin + angle, mask=i < half, other=0.0).to(tl.float32)
        s2 = tl.load(sin + angle + half, mask=i < half, other=0.0).to(tl.float32)
        from_q = grad_q + token * q_token + head * q_head + i
        from_k = grad_k + token * k_token + (head - num_q) * k_head + i
        g1 = tl.load(from_q, mask=is_q, other=0.0).to(tl.float32) + tl.load(from_k, mask=is_k, other=0.0).to(tl.float32)
        g2 = tl.load(from_q + half, mask=is_q, other=0.0).to(tl.float32)
        g2 += tl.load(from_k + half, mask=is_k, other=0.0).to(tl.float32)
        d1 = g1 * c1 + g2 * s2
        d2 = g2 * c2 + g1 * s1
        if HAS_NORM:
            at = qkv + token * stride + head * (2 * half) + i
            n1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            n2 = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
            squares = tl.sum(n1 * n1, axis=1) + tl.sum(n2 * n2, axis=1)
            scale = tl.rsqrt(squares / (2 * half) + eps)[:, None]
            n1 = n1 * scale
            n2 = n2 * scale
            of_w1 += d1 * n1
            of_w2 += d2 * n2
            d1 = d1 * w1
            d2 = d2 * w2
            mean = ((tl.sum(d1 * n1, axis=1) + tl.sum(d2 * n2, axis=1)) / (2 * half))[:, None]
            d1 = scale * (d1 - n1 * mean)
            d2 = scale * (d2 - n2 * mean)
        to = grad_qkv + token * width + head * (2 * half) + i
        tl.store(to, d1.to(dtype), mask=inside)
        tl.store(to + half, d2.to(dtype), mask=inside)
        value, j = tl.arange(0, KV_HEADS)[:, None], tl.arange(0, 2 * HALF)[None, :]
        is_value = (value < num_k) & (j < 2 * half)
        v = tl.load(grad_v + token * v_token + value * v_head + j, mask=is_value, other=0.0)
        tl.store(grad_qkv + token * width + (num_q + num_k + value) * (2 * half) + j, v, mask=is_value)
    if HAS_NORM:
        column = tl.arange(0, HALF)
        part = grad_weight + tl.program_id(0) * 4 * half + column
        tl.store(part, tl.sum(tl.where(is_q, of_w1, 0.0), axis=0), mask=column < half)
        tl.store(part + half, tl.sum(tl.where(is_q, of_w2, 0.0), axis=0), mask=column < half)
        tl.store(part + 2 * half, tl.sum(tl.where(is_k, of_w1, 0.0), axis=0), mask=column < half)
        tl.store(part + 3 * half, tl.sum(tl.where(is_k, of_w2, 0.0), axis=0), mask=column < half)


@triton.jit
def silu_mul_forward(gate_up, out, size, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    at = gate_up + row * 2 * size + i
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_backward(gate_up, grad, grad_gate_up, size, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    at = row * 2 * size + i
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + size, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * size + i, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    dtype = grad_gate_up.dtype.element_ty
    tl.store(grad_gate_up + at, of_gate.to(dtype), mask=inside)
    tl.store(grad_gate_up + at + size, (g * gate * sigmoid).to(dtype), mask=inside)


@triton.jit
def logprobs_forward(logits, labels, logprobs, entropy, lse, vocab, inverse_temperature, BLOCK: tl.constexpr):
    """Log-prob of the label, entropy and log-sum-exp of a row of logits over the temperature, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocab
    largest, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < vocab
        x = tl.load(base + i, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        new = tl.maximum(largest, tl.max(tl.where(inside, x, -float("inf"))))
        shrink = tl.exp(largest - new)
        e = tl.where(inside, tl.exp(x - new), 0.0)
        total = total * shrink + tl.sum(e)
        weighted = weighted * shrink + tl.sum(e * x)
        largest = new
    log_sum = largest + tl.log(total)
    chosen = tl.load(base + tl.load(labels + row)).to(tl.float32) * inverse_temperature
    tl.store(lse + row, log_sum)
    tl.store(logprobs + row, chosen - log_sum)
    tl.store(entropy + row, log_sum - weighted / total)


@triton.jit
def logprobs_backward(
    logits, labels, entropy, lse, grad_logprobs, grad_entropy, vocab, inverse_temperature,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a row of logits over the logits."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocab
    log_sum = tl.load(lse + row)
    label = tl.load(labels + row)
    grad = tl.load(grad_logprobs + row) * inverse_temperature
    if HAS_ENTROPY:
        of_entropy = tl.load(grad_entropy + row) * inverse_temperature
        mean = tl.load(entropy + row)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < vocab
        logprob = tl.load(base + i, mask=inside, other=0.0).to(tl.float32) * inverse_temperature - log_sum
        p = tl.exp(logprob)
        out = tl.where(i == label, grad, 0.0) - grad * p
        if HAS_ENTROPY:
            out -= of_entropy * p * (logprob + mean)
        tl.store(base + i, out.to(logits.dtype.element_ty), mask=inside)
