"""Every compiled kernel against PyTorch's own operations, in both precisions, for sizes that fill no vector evenly."""

import platform
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.nn import functional as F

from tandem.models import exact, ops
from tandem.models.attention import MAX_SHORT_CONTEXT, ExactAttention, PackedAttention
from tandem.models.cpu import compiler, kernels, library
from tandem.models.cpu.kernels import Contexts, Kernels
from tandem.models.ops import rotate

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def forget_kernels() -> None:
    library.load.cache_clear()
    kernels._kernels.cache_clear()


# The kernels of this machine; those of one with the narrowest vectors, which are as wide as NEON's on any processor;
# and those in between.
PROCESSORS = {"native": compiler.FOR_THIS_PROCESSOR, "plain": [[]]}
if platform.machine() == "x86_64":
    PROCESSORS["without AVX-512"] = [["-march=native", "-mno-avx512f"]]


@pytest.fixture(params=PROCESSORS, autouse=True)
def compiled(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> Iterator[None]:
    forget_kernels()
    monkeypatch.setattr(compiler, "FOR_THIS_PROCESSOR", PROCESSORS[request.param])
    yield
    forget_kernels()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> int:
    monkeypatch.setattr(kernels, "threads", lambda num_elements: request.param)
    return request.param


def kernels_for(dtype: torch.dtype) -> Kernels:
    found = kernels.find(torch.empty(0, dtype=dtype))
    assert found is not None, "the kernels could not be compiled"
    return found


def close(ours: Tensor, exact: Tensor) -> None:
    """`exact` is computed in float32: bfloat16 differs by the rounding of the result alone."""
    if ours.dtype == torch.bfloat16:
        torch.testing.assert_close(ours.float(), exact, rtol=2**-7, atol=1e-5)
    else:
        torch.testing.assert_close(ours, exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 5, 32)], ids=str)
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], num_threads: int) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = F.rms_norm(x.float(), (shape[-1],), weight.float(), 1e-6)
    close(kernels_for(dtype).rms_norm(x, weight, 1e-6), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 2), (5, 3, 32), (4, 2, 80)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_norm_rotate(
    dtype: torch.dtype, tokens: int, heads: int, head_dim: int, with_norm: bool, num_threads: int
) -> None:
    """x is a part of a wider row, as the projection gives it."""
    wide = torch.randn(tokens, heads * head_dim + 10).to(dtype)
    x = wide[:, 6 : 6 + heads * head_dim].unflatten(-1, (heads, head_dim))
    weight = torch.randn(head_dim).to(dtype)
    cos, sin = torch.randn(2, tokens, 1, head_dim).to(dtype)
    ours = kernels_for(dtype).norm_rotate(x, weight if with_norm else None, 1e-6, cos, sin)
    normed = F.rms_norm(x.float(), (head_dim,), weight.float(), 1e-6) if with_norm else x.float()
    # The two products of a turn may cancel: rounding is measured against them, not against their sum.
    size = rotate(normed.abs(), cos.float().abs(), sin.float().abs())
    difference = (ours.float() - rotate(normed, cos.float(), sin.float())).abs()
    assert (difference <= size * (2**-8 if dtype == torch.bfloat16 else 2e-6) + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype, num_threads: int) -> None:
    gate_up = (torch.randn(6, 2 * 37) * 8).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    gate, up = gate_up.float().chunk(2, dim=-1)
    close(kernels_for(dtype).silu_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 64), (2, 2, 128), (6, 2, 48)])
@pytest.mark.parametrize("window", [None, 5])
def test_decode_attention(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None, num_threads: int
) -> None:
    block_size, lengths = 4, [1, 4, 5, 18, 11]
    keys, values = torch.randn(2, 30, block_size, kv_heads, head_dim).to(dtype)
    tables = torch.randperm(30)[:25].view(5, 5)
    positions = torch.tensor(lengths) - 1
    q = torch.randn(5, heads, head_dim).to(dtype)
    projected = torch.randn(5, 3 * kv_heads * head_dim).to(dtype)  # k and v are parts of wider rows
    k, v = (part.unflatten(-1, (kv_heads, head_dim)) for part in projected.chunk(3, dim=-1)[1:])
    out = torch.empty_like(q)
    before = keys.clone()
    kernels_for(dtype).decode_attention(q, k, v, keys, values, tables, positions, out, window)
    for row, length in enumerate(lengths):
        own_keys, own_values = (cache[tables[row]].flatten(0, 1)[:length].float() for cache in (keys, values))
        assert torch.equal(own_keys[-1], k[row].float()) and torch.equal(own_values[-1], v[row].float())
        first = 0 if window is None else max(0, length - window)
        seen_keys, seen_values = (x[first:].transpose(0, 1) for x in (own_keys, own_values))
        exact = F.scaled_dot_product_attention(q[row, :, None].float(), seen_keys, seen_values, enable_gqa=True)
        torch.testing.assert_close(out[row].float(), exact[:, 0], rtol=1e-2, atol=2e-2 if dtype != torch.float32 else 0)
    changed = (keys != before).flatten(2).any(-1).sum()
    assert changed == len(lengths), "something else in the cache was written to"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 80)])
def test_rows_that_begin_alike_attend_as_if_alone(
    dtype: torch.dtype, block_size: int, heads: int, kv_heads: int, head_dim: int, num_threads: int
) -> None:
    """Runs of rows with common blocks, of several lengths, the longest longer than a kernel takes at once."""
    num_blocks, kernel = 20, kernels_for(dtype)
    keys, values = torch.randn(2, 2000, block_size, kv_heads, head_dim).to(dtype)
    tables = torch.randperm(2000)[: 90 * num_blocks].view(90, num_blocks)
    for first, last, shared in ((0, 70, 9), (70, 73, 2), (74, 88, 5), (80, 88, 11)):
        tables[first:last, :shared] = tables[first, :shared]
    positions = torch.randint(11 * block_size, num_blocks * block_size, (90,))
    positions[75] = 3 * block_size + 1  # ends within what its neighbours share
    q = torch.randn(90, heads, head_dim).to(dtype)
    k, v = torch.randn(2, 90, kv_heads, head_dim).to(dtype)
    together, alone = torch.empty_like(q), torch.empty_like(q)
    kernel.decode_attention(q, k, v, keys, values, tables, positions, together, None)
    for row in range(90):
        one = slice(row, row + 1)
        kernel.decode_attention(q[one], k[one], v[one], keys, values, tables[one], positions[one], alone[one], None)
    torch.testing.assert_close(together, alone, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 512, 513, 3000])
def test_draws_invert_the_cumulative_distribution(dtype: torch.dtype, size: int, num_threads: int) -> None:
    rows = 400
    logits = (torch.randn(rows, size) * 3).to(dtype)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0] * (rows // 4))
    uniform = torch.rand(rows)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])
    tokens, logprobs = kernels_for(dtype).draw(logits, temperature, uniform)
    exact = (logits.double() / temperature.where(temperature > 0, torch.ones(()))[:, None]).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=2e-6)
    cumulative = exact.exp().cumsum(-1)
    upper = cumulative.gather(1, tokens[:, None])[:, 0]
    lower = upper - exact.exp().gather(1, tokens[:, None])[:, 0]
    sampled = temperature > 0
    slack = 1e-5
    assert ((lower - slack <= uniform) & (uniform <= upper + slack))[sampled].all()
    assert torch.equal(tokens[~sampled], logits[~sampled].float().argmax(-1))


def test_a_row_that_is_no_numbers_has_no_logprob_and_no_bad_token() -> None:
    logits = torch.zeros(4, 10)
    logits[0, 3], logits[1], logits[2, 3] = torch.nan, -torch.inf, torch.inf
    tokens, logprobs = kernels_for(torch.float32).draw(logits, torch.ones(4), torch.full((4,), 0.99))
    assert logprobs[:3].isnan().all() and logprobs[3].isfinite()
    assert ((tokens >= 0) & (tokens < 10)).all()


def test_kernels_are_for_the_cpu_with_gradients_and_without() -> None:
    assert kernels.find(torch.empty(1, dtype=torch.float64)) is None
    assert kernels.find(torch.empty(1, device="meta")) is None
    with torch.enable_grad():
        assert kernels.find(torch.empty(1)) is not None
        assert kernels.find(torch.empty(1, dtype=torch.bfloat16)) is not None


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The function's value, and the gradients of a weighted sum of it."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]


def same_with_and_without(function: Callable[..., Tensor], inputs: list[Tensor], monkeypatch: MonkeyPatch) -> None:
    """Values and gradients by the kernels, against PyTorch's operations in float64; without gradients the same bits."""
    dtype = inputs[0].dtype
    with torch.enable_grad():
        plain = [x.detach().clone() for x in inputs]
        value, grads = gradients(function, plain)
        with torch.no_grad():
            assert torch.equal(function(*plain), value)
        monkeypatch.setattr(kernels, "find", lambda x: None)
        exact, exact_grads = gradients(function, [x.double() if x.is_floating_point() else x for x in plain])
    assert len(grads) == len(exact_grads) == sum(x.is_floating_point() for x in inputs)
    for ours, theirs in zip([value, *grads], [exact, *exact_grads], strict=True):
        assert ours.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_rms_norm(dtype: torch.dtype, num_threads: int, monkeypatch: MonkeyPatch) -> None:
    inputs = drawn(dtype, (21, 33), (33,))
    same_with_and_without(lambda x, weight: ops.rms_norm(x, weight, 1e-6), inputs, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [True, False])
def test_gradients_of_norm_and_rotate(
    dtype: torch.dtype, with_norm: bool, num_threads: int, monkeypatch: MonkeyPatch
) -> None:
    cos, sin = drawn(dtype, (13, 1, 24), (13, 1, 24))

    def turn(wide: Tensor, weight: Tensor | None = None) -> Tensor:
        x = wide[:, 6 : 6 + 72].unflatten(-1, (3, 24))
        return ops.norm_and_rotate(x, weight, 1e-6, cos.to(wide.dtype), sin.to(wide.dtype))

    inputs = drawn(dtype, (13, 90), (24,)) if with_norm else drawn(dtype, (13, 90))
    same_with_and_without(turn, inputs, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_silu_mul(dtype: torch.dtype, num_threads: int, monkeypatch: MonkeyPatch) -> None:
    same_with_and_without(ops.silu_mul, [5 * x for x in drawn(dtype, (6, 74))], monkeypatch)


SEGMENTS = [
    ([5], [-1]),
    ([3, 7, 1], [-1, -1, -1]),
    ([9, 4, 2, 6, 17, 3], [-1, 0, 0, 0, -1, 4]),
    ([40, 1, 30, 16], [-1, 0, 0, -1]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "parents"), SEGMENTS)
@pytest.mark.parametrize("window", [None, 6, 20])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 16), (2, 2, 64)])
def test_packed_attention_and_its_gradients(
    dtype: torch.dtype,
    lengths: list[int],
    parents: list[int],
    window: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_threads: int,
    monkeypatch: MonkeyPatch,
) -> None:
    """Shared beginnings included; v is a part of wider rows, as the projection gives it."""
    attention = PackedAttention(torch.tensor(lengths), torch.tensor(parents))
    assert attention.layout is not None

    def attend(q: Tensor, k: Tensor, wide: Tensor) -> Tensor:
        return cast(Any, attention).attend(0, q, k, wide[:, 5:-3].unflatten(-1, (kv_heads, head_dim)), window)

    tokens = sum(lengths)
    shapes = (tokens, heads, head_dim), (tokens, kv_heads, head_dim), (tokens, kv_heads * head_dim + 8)
    same_with_and_without(attend, drawn(dtype, *shapes), monkeypatch)


def test_gradients_do_not_depend_on_the_number_of_threads(monkeypatch: MonkeyPatch) -> None:
    results = []
    with torch.enable_grad():
        x, weight = torch.randn(50, 33), torch.randn(33)
        for count in (1, 2, 3):
            monkeypatch.setattr(kernels, "threads", lambda num_elements, count=count: count)
            results.append(gradients(lambda x, weight: ops.rms_norm(x, weight, 1e-6), [x, weight])[1])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_long_sequences_go_through_pytorch() -> None:
    assert PackedAttention(torch.tensor([MAX_SHORT_CONTEXT])).layout is not None
    assert PackedAttention(torch.tensor([MAX_SHORT_CONTEXT + 1])).layout is None
    with_prefix = PackedAttention(torch.tensor([MAX_SHORT_CONTEXT, 1]), torch.tensor([-1, 0]))
    assert with_prefix.layout is None


# Exact mode: what comes out for a row depends on that row alone.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (33, 70), (64, 32)])
def test_a_row_of_an_exact_product_is_the_same_in_any_batch(
    dtype: torch.dtype, inputs: int, outputs: int, num_threads: int
) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((600, inputs), (outputs, inputs), (outputs,)))
    fast = kernels_for(dtype)
    packed = fast.pack_panels(weight)
    out = fast.exact_linear(x, packed, bias, outputs)
    expected = F.linear(x.double(), weight.double(), bias.double())
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((out - expected).abs() <= size * (2**-8 if dtype == torch.bfloat16 else 1e-6)).all()
    for rows in (slice(0, 1), slice(5, 12), slice(590, 600)):
        assert torch.equal(fast.exact_linear(x[rows], packed, bias, outputs), out[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("lengths", "parents"), [*SEGMENTS, ([300, 9], [-1, 0])])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (5, 1, 16)])
def test_exact_attention_and_its_gradients(
    dtype: torch.dtype,
    lengths: list[int],
    parents: list[int],
    window: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    num_threads: int,
) -> None:
    """As PyTorch's; and the last token of a segment gets the same bits from a query that comes alone."""
    attention = PackedAttention(torch.tensor(lengths), torch.tensor(parents))
    attention.layout = None  # PyTorch's
    tokens = sum(lengths)
    shapes = (tokens, heads, head_dim), (tokens, kv_heads, head_dim), (tokens, kv_heads, head_dim)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]

    def attend(context: PackedAttention | ExactAttention, *inputs: Tensor) -> Tensor:
        return cast(Any, context).attend(0, *inputs, window)

    with torch.enable_grad():
        plain, plain_grads = gradients(lambda *x: attend(attention, *x), [x.float() for x in inputs])
        ours, our_grads = gradients(lambda *x: attend(attention.exact, *x), inputs)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.float(), plain, rtol=tolerance, atol=tolerance)
    for one, other in zip(our_grads, plain_grads, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance * float(1 + other.abs().max()))
    contexts = attention.exact.contexts
    alone = Contexts(contexts.rows, contexts.starts[-1:], contexts.seen[-1:])
    q, k, v = inputs
    assert torch.equal(exact.attend(q[-1:], k, v, alone, window)[0], ours[-1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_an_exact_product(dtype: torch.dtype) -> None:
    inputs = drawn(dtype, (21, 33), (50, 33), (50,))
    with torch.enable_grad():
        plain, plain_grads = gradients(F.linear, inputs)
        ours, our_grads = gradients(lambda *x: exact.linear(*x), inputs)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip([ours, *our_grads], [plain, *plain_grads], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(1 + other.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_given_tokens_have_the_logprobs_they_are_drawn_with(dtype: torch.dtype, num_threads: int) -> None:
    logits = (torch.randn(40, 700) * 4).to(dtype)
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.7]).repeat(10)
    fast = kernels_for(dtype)
    tokens, drawn = fast.draw(logits, temperature, torch.rand(40))
    assert torch.equal(fast.token_logprobs(logits, tokens, temperature), drawn)
    assert torch.equal(fast.token_logprobs(logits[7:8], tokens[7:8], temperature[7:8]), drawn[7:8])
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    expected = (logits.float() / divisor).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn, expected, rtol=1e-5, atol=1e-5)
