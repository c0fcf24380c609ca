"""Every Triton kernel of the native engine against its plain PyTorch twin, computed in float32, on random inputs and
odd sizes. With TRITON_INTERPRET=1 and without a GPU the same tests run on a CPU, on fewer cases."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tandem.engine.blocks import BlockManager
from tandem.engine.core import EngineCore, EngineParts
from tandem.engine.kv_cache import KVCache
from tandem.engine.protocol import GeneratedSample, GenerationRequest, GenerationResult, Sampling
from tandem.engine.runner import Runner
from tandem.engine.sampler import SamplingRows, sample, uniforms
from tandem.engine.scheduler import Scheduler
from tandem.engine.shared_prompts import ROWS_AT_ONCE, find_shared
from tandem.engine.split_kv import cut_contexts
from tandem.engine.state import Request, SlotState
from tandem.models import ops
from tandem.models.decoder import Projection
from tandem.models.hf import new_decoder
from tandem.models.lora import AdapterBank
from tandem.models.spec import ModelSpec

pytest.importorskip("triton", reason="pip install triton")

from tandem.engine.cuda import attention as cuda_attention
from tandem.engine.cuda import draw as drawing
from tandem.engine.cuda import forward, gemm, layers
from tandem.engine.cuda import kept as keeping
from tandem.engine.cuda import runner as cuda_runner
from tandem.engine.cuda.attention import DecodeRows, SharedRows
from tandem.engine.cuda.graphs import StepGraphs
from tandem.engine.cuda.inputs import prefill_inputs, upload
from tandem.engine.cuda.prefill import QUERY_TILE, PrefillTiles
from tandem.engine.cuda.runner import CudaRunner

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# heads, KV heads, head dim, block size, window
SHAPES = [(16, 8, 128, 16, None), (9, 3, 64, 4, 37), (4, 4, 80, 16, None), (12, 2, 24, 5, 3), (32, 8, 128, 16, 500)]
SHAPES = SHAPES if ON_GPU else SHAPES[1:4]
# Padding divides nothing by nothing, and computes with whatever lies in memory; the interpreter, which is NumPy, warns.
IGNORED = [f"ignore:{what}" for what in ("invalid value", "overflow", "divide by zero")]
pytestmark = [pytest.mark.gpu, *map(pytest.mark.filterwarnings, IGNORED)]


def int32(values: object) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return ((found - expected).norm() / expected.norm()).item()


class Paged:
    """A cache with random contents, and sequences whose blocks lie in it anyhow."""

    def __init__(self, lengths: list[int], shape: tuple[int, int, int, int, int | None], dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.head_dim, self.block_size, self.window = shape
        self.lengths = lengths
        self.columns = -(-max(lengths) // self.block_size) + 1
        num_blocks = len(lengths) * self.columns
        self.cache = KVCache(
            2, num_blocks, self.block_size, self.kv_heads, self.head_dim, dtype, DEVICE, heads_first=True
        )
        for part in (self.cache.keys, self.cache.values):
            part.copy_(torch.randn(part.shape, device=DEVICE))
        self.table = torch.randperm(num_blocks, device=DEVICE).view(len(lengths), self.columns)
        self.keys, self.values = self.cache.keys[1], self.cache.values[1]

    def decode_rows(self, begin: NDArray[np.int64], to_spare: int, shared: SharedRows | None = None) -> DecodeRows:
        """The last token of each row, contexts cut into so many pieces more than there are rows at most."""
        ends, columns = np.array(self.lengths), int32([self.columns])
        pieces = int32(cut_contexts(begin, ends, len(ends) + to_spare))
        arrived = torch.zeros(len(ends) * self.kv_heads, dtype=torch.int32, device=DEVICE)
        return DecodeRows(self.table.int().flatten(), columns, int32(ends - 1), pieces, arrived, shared)

    def attend(self, row: int, position: int, q: Tensor) -> Tensor:
        """One query (heads, head_dim), in float32."""
        start = 0 if self.window is None else max(0, position + 1 - self.window)
        folded = self.heads // self.kv_heads
        k, v = (
            part[self.table[row]].flatten(0, 1)[start : position + 1].float().repeat_interleave(folded, 1)
            for part in (self.keys, self.values)
        )
        weights = (torch.einsum("hd,nhd->hn", q.float(), k) * self.head_dim**-0.5).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("to_spare", "many_programs"), [(0, 1), (3, 1024), (40, 1024)])
def test_decode_attention(
    shape: tuple[int, int, int, int, int | None],
    dtype: torch.dtype,
    to_spare: int,
    many_programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the tiles of many programs, and of few; contexts that are whole, cut, and cut into more than are put
    together at once. Twice, as in two layers."""
    monkeypatch.setattr(cuda_attention, "MANY_PROGRAMS", many_programs)
    lengths = [1, 2, 63, 64, 65, 330] + ([700, 4031] if ON_GPU else [])
    paged = Paged(lengths, shape, dtype)
    q = torch.randn(len(lengths), paged.heads, paged.head_dim, device=DEVICE).to(dtype)
    rows = paged.decode_rows(np.zeros(len(lengths), np.int64), to_spare)
    for _ in range(2):
        out = rows.attend(q, paged.keys, paged.values, paged.window)
        assert not rows.arrived.any()
        for row, length in enumerate(lengths):
            assert relative_error(out[row], paged.attend(row, length - 1, q[row])) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES if ON_GPU else [SHAPES[1]], ids=str)
@pytest.mark.parametrize("to_spare", [0, 9] if ON_GPU else [9])
def test_decode_attention_over_shared_prompts(
    shape: tuple[int, int, int, int, int | None], dtype: torch.dtype, to_spare: int
) -> None:
    """Rows that share much, a little, and nothing; more than are read at once. Padding follows."""
    shared_tokens = [80] * 3 + [0] + [240 if ON_GPU else 80] * (ROWS_AT_ONCE + 1)
    lengths = [tokens + 1 + 20 * row for row, tokens in enumerate(shared_tokens)]
    paged = Paged(lengths, shape, dtype)
    for begin, end in ((0, 3), (4, len(lengths))):
        blocks = shared_tokens[begin] // paged.block_size
        paged.table[begin:end, :blocks] = paged.table[begin, :blocks]
    found = find_shared(paged.table.cpu().numpy())
    assert found is not None and found.count.tolist() == [3, ROWS_AT_ONCE, 1]
    shared = SharedRows(
        int32(found.num_blocks * paged.block_size), int32([*found.first, 0, 0]), int32([*found.count, 0, 0])
    )
    q = torch.randn(len(lengths), paged.heads, paged.head_dim, device=DEVICE).to(dtype)
    rows = paged.decode_rows(found.num_blocks * paged.block_size, to_spare, shared)
    out = rows.attend(q, paged.keys, paged.values, paged.window)
    for row, length in enumerate(lengths):
        assert relative_error(out[row], paged.attend(row, length - 1, q[row])) < TOLERANCE[dtype], row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_attention(shape: tuple[int, int, int, int, int | None], dtype: torch.dtype) -> None:
    """Chunks that begin anywhere in their sequence: whole prompts, later parts, single tokens."""
    chunks = [(0, 1), (0, 70), (33, 5), (64, 64)] + ([(500, 300)] if ON_GPU else [])
    paged = Paged([start + count for start, count in chunks], shape, dtype)
    tiles = []
    num_tokens = 0
    for row, (start, count) in enumerate(chunks):
        for offset in range(0, count, QUERY_TILE):
            tiles.append((row, num_tokens + offset, start + offset, min(QUERY_TILE, count - offset)))
        num_tokens += count
    q = torch.randn(num_tokens, paged.heads, paged.head_dim, device=DEVICE).to(dtype)
    plan = PrefillTiles(paged.table.int().flatten(), int32([paged.columns]), *int32(tiles).T.contiguous())
    out = plan.attend(q, paged.keys, paged.values, paged.window)
    token = 0
    for row, (start, count) in enumerate(chunks):
        for position in range(start, start + count):
            expected = paged.attend(row, position, q[token])
            assert relative_error(out[token], expected) < TOLERANCE[dtype], (row, position)
            token += 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rotate_write(shape: tuple[int, int, int, int, int | None], dtype: torch.dtype, has_norm: bool) -> None:
    positions = int32([0, 5, 6, 40, 17])
    paged = Paged([60] * len(positions), shape, dtype)
    heads, kv_heads, dim = paged.heads, paged.kv_heads, paged.head_dim
    qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    weights = [torch.rand(dim, device=DEVICE).to(dtype) + 0.5 for _ in range(2)]
    angles = torch.arange(64, device=DEVICE)[:, None] * torch.rand(dim // 2, device=DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cells = (paged.table[range(len(positions)), (positions // paged.block_size).long()] * paged.block_size
             + positions % paged.block_size).int()  # fmt: skip
    before = paged.cache.keys.clone()
    norms = (weights[0], weights[1], 1e-6) if has_norm else None
    written = layers.Heads(heads, norms, (cos, sin), positions, cells, paged.keys, paged.values)
    q = layers.norm_rotate_write(qkv, written)

    at = positions.long()
    wide_cos = torch.cat((cos, cos), -1)[at][:, None].float()
    wide_sin = torch.cat((-sin, sin), -1)[at][:, None].float()
    sides = qkv.view(len(positions), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    exact = [side.float() for side in sides[:2]]
    if has_norm:
        exact = [ops.rms_norm(side, weight.float(), 1e-6) for side, weight in zip(exact, weights, strict=True)]
    turned = [ops.rotate(side, wide_cos, wide_sin) for side in exact]
    block, offset = (cells // paged.block_size).long(), (cells % paged.block_size).long()
    assert relative_error(q, turned[0]) < TOLERANCE[dtype]
    assert relative_error(paged.keys[block, offset], turned[1]) < TOLERANCE[dtype]
    assert torch.equal(paged.values[block, offset], sides[2])
    changed = (paged.cache.keys != before).any(-1).any(-1)
    assert int(changed.sum()) == len(positions), "it wrote elsewhere"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576, 1000] if ON_GPU else [72])
def test_between_products(size: int, dtype: torch.dtype) -> None:
    x, delta = (torch.randn(7, size, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.rand(size, device=DEVICE).to(dtype)
    added = x + delta
    for found, expected in (
        (layers.add_norm(x.clone(), None, weight, 1e-6), F.rms_norm(x, (size,), weight, 1e-6)),
        (layers.add_norm(x, delta, weight, 1e-6), F.rms_norm(added, (size,), weight, 1e-6)),
        (x, added),
        (layers.silu_mul(torch.cat((x, delta), -1)), F.silu(x) * delta),
    ):
        assert relative_error(found, expected) < TOLERANCE[dtype]


# rows, inputs, outputs, parts
PRODUCTS = [(1, 576, 96, 3), (16, 2048, 1024, 4), (17, 256, 64, 2), (100, 384, 576, 2), (70, 256, 64, 2)]


@pytest.mark.parametrize("dtype", DTYPES[-1:], ids=str)  # others are not served
@pytest.mark.parametrize(("rows", "inputs", "outputs", "parts"), PRODUCTS if ON_GPU else PRODUCTS[::2])
def test_products_of_few_rows(rows: int, inputs: int, outputs: int, parts: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(size, inputs, device=DEVICE).to(dtype) for size in (rows, 2 * outputs))
    exact = F.linear(x.float(), weight.float())
    found = gemm.split(x, weight, parts)
    assert found.shape == (parts, rows, 2 * outputs) and found.dtype == torch.float32
    assert relative_error(found.sum(0), exact) < 1e-5
    assert relative_error(gemm.gate_up(x, weight), ops.silu_mul(exact)) < TOLERANCE[dtype]
    residual = torch.randn(rows, 2 * outputs, device=DEVICE).to(dtype)
    added = residual + exact.to(dtype)
    normed = layers.add_norm(residual, found, torch.ones(2 * outputs, device=DEVICE).to(dtype), 1e-6)
    assert relative_error(residual, added) < TOLERANCE[dtype]
    assert relative_error(normed, F.rms_norm(added, (2 * outputs,), eps=1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES[-1:], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 64, 70, 256] if ON_GPU else [3, 66])
@pytest.mark.parametrize("has_norm", [True, False])
def test_queries_keys_and_values_by_one_kernel(rows: int, has_norm: bool, dtype: torch.dtype) -> None:
    """Like the product and what follows it, in kernels of their own."""
    shape = SHAPES[0]  # of a head dimension that is served
    heads, kv_heads, dim, block_size, _ = shape
    x = torch.randn(rows, 192, device=DEVICE).to(dtype)
    weight = torch.randn((heads + 2 * kv_heads) * dim, 192, device=DEVICE).to(dtype)
    scales = [torch.rand(dim, device=DEVICE).to(dtype) + 0.5 for _ in range(2)]
    angles = torch.arange(64, device=DEVICE)[:, None] * torch.rand(dim // 2, device=DEVICE)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    positions, cells = int32(np.arange(rows) % 50), int32(np.random.default_rng(0).permutation(4 * rows)[:rows])
    found: list[list[Tensor]] = []
    for is_fused in (True, False):
        cache = KVCache(1, 4 * rows, block_size, kv_heads, dim, dtype, DEVICE, heads_first=True)
        norms = (scales[0], scales[1], 1e-6) if has_norm else None
        to = layers.Heads(heads, norms, rotary, positions, cells, cache.keys[0], cache.values[0])
        q = gemm.qkv(x, weight, to) if is_fused else layers.norm_rotate_write(F.linear(x, weight), to)
        found.append([q, cache.keys, cache.values])
    for fused, plain in zip(*found, strict=True):
        assert relative_error(fused, plain) < TOLERANCE[dtype]


def test_which_products_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_processors", lambda _: 132)

    def parts(rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16) -> int:
        x, weight = (torch.empty(size, inputs, dtype=dtype, device="meta") for size in (rows, outputs))
        return gemm.num_parts(x, weight)

    assert parts(64, 2048, 1024) == parts(1, 3072, 1024) == 4
    assert parts(65, 2048, 1024) == 4 and parts(256, 2048, 1024) == 2  # 32 and 64 tiles
    assert parts(64, 576, 576) == 3  # 576 / 4 is no multiple of 64
    assert parts(64, 4096, 2560) == parts(257, 2048, 1024) == 1  # enough tiles without
    assert parts(64, 2048, 1000) == parts(64, 2040, 1024) == parts(64, 2048, 1024, torch.float32) == 1
    assert parts(64, 1024, 96) == 4 and parts(65, 1024, 96) == 1  # 96 is no multiple of 64

    def serves(rows: int, inputs: int, size: int) -> bool:
        x, weight = (torch.empty(size, inputs, dtype=torch.bfloat16, device="meta") for size in (rows, 2 * size))
        return gemm.serves_gate_up(x, weight)

    assert serves(64, 1024, 3072) and not serves(65, 1024, 3072) and not serves(64, 2560, 9728)
    assert not serves(64, 1000, 3072)

    def serves_qkv(rows: int, inputs: int, num_heads: int, head_dim: int) -> bool:
        x, weight = (
            torch.empty(size, inputs, dtype=torch.bfloat16, device="meta") for size in (rows, num_heads * head_dim)
        )
        return gemm.serves_qkv(x, weight, head_dim)

    assert serves_qkv(1, 1024, 32, 128) and serves_qkv(64, 1024, 32, 128) and serves_qkv(256, 576, 15, 64)
    assert not serves_qkv(65, 1024, 32, 128) and not serves_qkv(1, 2048, 32, 128)  # sums that cuBLAS is faster at
    assert not serves_qkv(64, 1024, 48, 128) and not serves_qkv(577, 576, 15, 64)  # more programs than processors
    assert not serves_qkv(64, 1024, 32, 80) and not serves_qkv(64, 1000, 32, 128)


def test_a_projection_with_a_bias_or_an_adapter_computes_its_product_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_processors", lambda _: 132)
    x = torch.randn(3, 64, device=DEVICE).bfloat16()

    def adapt(_module: object, _inputs: object, output: Tensor) -> Tensor:
        return output + 1

    class Adapted(Projection):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    hooked = Projection(64, 192, bias=False)
    hooked.register_forward_hook(adapt)
    for module in (Projection(64, 192, bias=True), hooked, Adapted(64, 192, bias=False)):
        module = module.to(DEVICE).bfloat16()
        assert torch.equal(forward.product(module, x), module(x))
        assert torch.equal(forward.gate_up(module, x), layers.silu_mul(module(x)))
        cache = KVCache(1, 4, 4, 1, 64, torch.bfloat16, DEVICE, heads_first=True)
        turn = torch.rand(4, 32, device=DEVICE).bfloat16()
        heads = layers.Heads(1, None, (turn, turn), int32(range(3)), int32(range(3)), cache.keys[0], cache.values[0])
        assert torch.equal(forward.qkv(module, x, heads), layers.norm_rotate_write(module(x), heads))


def test_embedding_takes_the_last_token_where_the_host_has_none() -> None:
    weight = torch.randn(50, 24, device=DEVICE)
    out = layers.embed(int32([3, -1, -1, 49]), int32([0, 2, 1, 0]), int32([11, 12, 13]), weight)
    assert torch.equal(out, weight[[3, 13, 12, 49]])


def sampling_cases(num_rows: int, *, plain: bool) -> SamplingRows:
    rng = np.random.default_rng(num_rows)

    def choose(*values: float) -> np.ndarray:
        return rng.choice(np.array(values, np.float32), num_rows)

    return SamplingRows(
        temperature=choose(0, 0.7, 1, 1.5),
        top_p=choose(1) if plain else choose(1, 0.9, 0.5, 0, 0.99),
        top_k=(choose(0) if plain else choose(0, 1, 5, 50, 10**6)).astype(np.int64),
        min_p=choose(0) if plain else choose(0, 0.05, 0.3),
        raw_logprobs=rng.random(num_rows) < 0.3,
        num_top=rng.choice([0, 1, 5, 20], num_rows),
        wants_kept=np.zeros(num_rows, np.bool_),
        seed=rng.integers(0, 99, num_rows).astype(np.uint64),
        sample_index=np.arange(num_rows).astype(np.uint64),
        position=np.arange(num_rows),
    )


def draw_rows(rows: SamplingRows) -> drawing.DrawRows:
    u = uniforms(rows.seed, rows.sample_index, rows.position)
    floats = [torch.from_numpy(values).to(DEVICE) for values in (rows.temperature, rows.top_p, rows.min_p, u)]
    temperature, top_p, min_p, uniform = floats
    integers = int32(rows.top_k), int32(rows.raw_logprobs), int32(rows.num_top)
    return drawing.DrawRows(int32(range(len(u))), temperature, top_p, min_p, uniform, *integers)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_are_those_of_the_sampler(plain: bool, dtype: torch.dtype) -> None:
    """Seeded draws included: the same uniform number gives the same token. Ties, of which bfloat16 has many, go to the
    lower token id."""
    num_rows, vocab = (200, 10007) if ON_GPU else (4, 70)
    rows = sampling_cases(num_rows, plain=plain)
    logits = (torch.randn(num_rows, vocab, device=DEVICE) * 3).to(dtype)
    sources = torch.randperm(num_rows, device=DEVICE)
    last = int32([-1] * num_rows)
    drawn = drawing.draw(logits, sources.int(), draw_rows(rows), last)
    expected = sample(logits[sources].cpu(), rows)
    differing = (drawn.tokens.cpu().numpy() != expected.tokens).sum()
    assert differing <= num_rows // 100  # where a uniform number falls on a border, up to rounding
    if differing == 0:
        assert np.abs(drawn.logprobs.cpu().numpy() - expected.logprobs).max() < 1e-4
    assert torch.equal(last, drawn.tokens)


@pytest.mark.parametrize("room", [1024, 3])
@pytest.mark.parametrize("is_adjusted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kept_tokens_are_those_of_the_sampler(
    dtype: torch.dtype, is_adjusted: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more are kept than the table has room for, and where other logits than the model's were drawn from."""
    monkeypatch.setattr(keeping, "ROOM", room)
    num_rows, vocab = (200, 10007) if ON_GPU else (12, 70)
    rows = sampling_cases(num_rows, plain=False)
    rows.wants_kept[:] = (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
    logits = (torch.randn(num_rows, vocab, device=DEVICE) * 3).to(dtype)
    adjusted = logits.float() + torch.randn_like(logits.float()) if is_adjusted else None
    drawn_from = logits if adjusted is None else adjusted
    asking = np.flatnonzero(rows.wants_kept)
    drawn = drawing.draw(drawn_from, int32(range(num_rows)), draw_rows(rows), int32([0] * num_rows))
    temperature, min_p = (torch.from_numpy(x[asking]).to(DEVICE) for x in (rows.temperature, rows.min_p))
    asked = keeping.KeptRows(int32(asking), int32(asking), temperature, min_p)
    found = keeping.keep(logits, drawn_from, asked, drawn, lambda x: x.cpu(), batch_invariant=False)()
    expected = sample(logits.cpu(), rows, None if adjusted is None else adjusted.cpu())
    counts = {len(kept.token_ids) for kept in found}
    assert min(counts) == 1 and max(counts) > 3
    differing = 0
    for row, mine in zip(asking.tolist(), found, strict=True):
        theirs = expected.kept[row]
        assert theirs is not None
        if mine.token_ids.tolist() == theirs.token_ids.tolist() and int(drawn.tokens[row]) == expected.tokens[row]:
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        else:
            differing += 1  # a border, up to rounding
    assert differing <= num_rows // 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [7, 5000, 151_936] if ON_GPU else [7, 5000])
def test_the_likeliest_tokens_come_with_the_draw(vocab: int, dtype: torch.dtype) -> None:
    """Of equal logits, of which bfloat16 has many, the lower token id comes first; no token comes twice."""
    num_rows = 64 if ON_GPU else 4
    rows = sampling_cases(num_rows, plain=True)
    logits = (torch.randn(num_rows, vocab, device=DEVICE) * 3).to(dtype)
    sources = torch.randperm(num_rows, device=DEVICE)
    drawn = drawing.draw(logits, sources.int(), draw_rows(rows), int32([0] * num_rows))
    order = logits[sources].float().cpu().sort(dim=-1, descending=True, stable=True).indices
    expected = sample(logits[sources].cpu(), rows)
    for row, asked in enumerate(np.minimum(rows.num_top, vocab).tolist()):
        assert torch.equal(drawn.top_tokens[:asked, row].cpu().long(), order[row, :asked])
        found = drawn.top_logprobs[:asked, row].cpu().numpy()
        np.testing.assert_allclose(found, expected.top_logprobs[row, :asked], atol=1e-4)


def test_logits_that_are_no_numbers_are_told() -> None:
    logits = torch.randn(4, 100, device=DEVICE)
    logits[1, 7], logits[2, 3], logits[3, :50] = torch.nan, torch.inf, -torch.inf
    rows = sampling_cases(4, plain=True)
    drawn = drawing.draw(logits, int32(range(4)), draw_rows(rows), int32([0] * 4))
    assert torch.isfinite(drawn.logprobs).tolist() == [True, False, False, True]
    assert 50 <= int(drawn.tokens[3]) < 100


CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Computed:
    """In place of a CUDA graph, where there is no GPU: computes once more."""

    def __init__(self, compute: Callable[[], drawing.DrawnOnDevice | None]) -> None:
        self.compute, self.drawn = compute, compute()

    def replay(self) -> None:
        drawn = self.compute()
        if self.drawn is not None and drawn is not None:
            self.drawn.words.copy_(drawn.words)


class ComputedGraphs(StepGraphs):
    def _record(self, compute: Callable[[], drawing.DrawnOnDevice | None]) -> Any:
        graph = Computed(compute)
        return graph, graph.drawn


class ReplayingRunner(CudaRunner):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not ON_GPU:
            self.graphs = ComputedGraphs(self.device)


def make_core(
    spec: ModelSpec,
    device: torch.device,
    *,
    with_kernels: bool,
    batch_invariant: bool = False,
    graphs: bool = False,
) -> EngineCore:
    decoder = new_decoder(spec, seed=0).requires_grad_(False).to(device)
    assert not batch_invariant or decoder.make_batch_invariant(device)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(10 if parameter.ndim > 1 else 1)  # the next token is then far from uniform
    state = SlotState(8, 64, 4)
    shape = (spec.num_layers, 65, 4, spec.num_kv_heads, spec.head_dim)
    cache = KVCache(*shape, torch.float32, device, heads_first=with_kernels)
    scheduler = Scheduler(state, BlockManager(64, 4), 20, isolate=False)
    adapters = AdapterBank(decoder)
    launcher = None
    if with_kernels:
        graph_tokens = 64 if graphs and not batch_invariant else 0
        launcher = ReplayingRunner(
            decoder, adapters, cache, state, device, use_graphs=graphs, graph_tokens=graph_tokens
        )
        if graphs:
            launcher.prepare()
    runner = launcher or Runner(decoder, adapters, cache, state, device)
    return EngineCore(EngineParts(decoder, adapters, cache, state, scheduler, runner, lambda: None, launcher), [])  # type: ignore[arg-type]


@torch.inference_mode()
def test_padding_of_prompts_changes_nothing() -> None:
    """As a CUDA graph has it; parts of prompts, one of which ends."""
    core = make_core(ModelSpec.from_config(CONFIG | {"architectures": ["Qwen3ForCausalLM"]}), DEVICE, with_kernels=True)
    for number, length in enumerate((3, 25)):
        prompt = np.random.default_rng(number).integers(2, 64, length).tolist()
        core.add(Request(number, GenerationRequest(prompt, Sampling(1)), 0, lambda _: None))
    core.scheduler.prepare_step()
    [(rows, chunk)] = core.scheduler.batches()
    assert chunk.tolist() == [3, 17]
    runner, wanted = core.runner, np.array([0, 1])
    assert isinstance(runner, CudaRunner)
    found = []
    for size in (None, 64):
        inputs = prefill_inputs(upload(runner._prefill_arrays(rows, chunk, wanted, size), DEVICE))
        found.append(runner._prefill(inputs)[inputs.last][:2].clone())
    assert relative_error(found[1], found[0]) < 1e-6


@torch.inference_mode()
def generate(core: EngineCore, requests: list[GenerationRequest]) -> list[GeneratedSample]:
    results: dict[int, GenerationResult] = {}
    for number, request in enumerate(requests):
        core.add(Request(number, request, number, lambda found, number=number: results.update({number: found})))  # type: ignore[dict-item]
    while core.scheduler.has_work:
        core.step()
    core.read_inflight()
    return [sample for number in range(len(requests)) for sample in results[number].samples]


@pytest.mark.parametrize(
    ("architecture", "batch_invariant", "graphs"),
    [
        ("Qwen3ForCausalLM", False, False),
        ("Qwen2ForCausalLM", False, True),
        ("Qwen3ForCausalLM", True, False),
    ],
)
def test_an_engine_of_kernels_draws_what_the_plain_one_draws(
    architecture: str, batch_invariant: bool, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head norms and biases; chunked prompts, groups that share theirs, steps launched ahead, a row that is drawn from
    other logits than the model's."""
    monkeypatch.setattr(cuda_runner, "WORTH_SHARING_BYTES", 1)
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    spec = ModelSpec.from_config(CONFIG | {"architectures": [architecture]})
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            rng.integers(2, 64, length).tolist(),
            Sampling(3, temperature, top_k=top_k, presence_penalty=penalty),
            n,
            top_logprobs=top,
            kept_tokens=True,
        )
        for length, temperature, top_k, n, top, penalty in [
            (5, 1.0, 0, 1, 0, 0.0),
            (22, 0.0, 0, 2, 2, 0.0),
            (1, 0.7, 5, 1, 2, 0.5),
            (9, 1.0, 7, 2, 0, 0.0),
        ]
    ]
    expected = generate(
        make_core(spec, torch.device("cpu"), with_kernels=False, batch_invariant=batch_invariant), requests
    )
    found = generate(
        make_core(spec, DEVICE, with_kernels=True, batch_invariant=batch_invariant, graphs=graphs), requests
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
        for here, there in zip(mine.top_logprobs or [], theirs.top_logprobs or [], strict=True):
            assert [token for token, _ in here] == [token for token, _ in there]
        assert mine.kept_tokens is not None and theirs.kept_tokens is not None
        for left, right in zip(mine.kept_tokens, theirs.kept_tokens, strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()
            assert left.logprob == pytest.approx(right.logprob, abs=1e-3)
    assert {len(left.token_ids) for sample in found for left in sample.kept_tokens or []} == {0, 5, 7}
