"""What makes training fast on a GPU, against its plain twins: kernels, FlexAttention, log-probs."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.models.attention import PackedAttention, Rectangles
from tandem.models.gpu import flex
from tandem.models.memory_estimate import DEFAULT, LEAST, MOST
from tandem.trainer.build import load_trained
from tandem.trainer.model.memory import MicroBatchSize, free_bytes, plan_tokens
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.errors import OutOfMemory
from tandem.weights import files as filesystem
from tandem.weights.files import WeightsPublisher

pytestmark = pytest.mark.gpu
KERNELS = Path(__file__).parents[1] / "unit" / "models" / "gpu" / "interpreted.py"


@pytest.fixture(scope="module")
def comparisons() -> ModuleType:
    spec = importlib.util.spec_from_file_location("interpreted", KERNELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("memory_gib", [0.005, 100])
def test_kernels_compute_what_their_twins_do(
    comparisons: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, memory_gib: float
) -> None:
    monkeypatch.setattr(comparisons.logprobs, "memory_of", lambda device: int(memory_gib * 2**30))
    errors = {name: case() for name, case in comparisons.cases("cuda", dtype, scale=101)}
    assert len(errors) == 15
    assert {name: error for name, error in errors.items() if not error < tolerance} == {}


SHARED = [130, 40, 300, 128, 1000, 77], [-1, 0, 0, -1, 3, -1]
EQUAL = [384] * 3, [-1] * 3


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("segments", "heads", "head_dim", "window"),
    [
        (SHARED, (4, 2), 32, None),
        (SHARED, (16, 8), 128, 100),
        (SHARED, (3, 3), 64, None),
        (EQUAL, (16, 8), 128, None),
        (EQUAL, (4, 2), 32, 100),
    ],
)
def test_attention_is_that_of_rectangles(
    segments: tuple[list[int], list[int]], heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    torch._dynamo.reset()  # each case compiles twice, and after eight compilations PyTorch makes no more
    lengths, parents = (torch.tensor(x, device="cuda") for x in segments)
    total, padding = int(lengths.sum()), -int(lengths.sum()) % 128
    q, k, v = (torch.randn(total + padding, n, head_dim, device="cuda") for n in (heads[0], heads[1], heads[1]))

    def with_gradients(attend, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
        leaves = [x[:size].to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)[:total]
        pull = torch.linspace(-1, 1, out.numel(), device="cuda").cos().view_as(out).to(dtype)
        with torch.no_grad():
            assert torch.equal(attend(*leaves)[:total], out), "another kernel where nothing is learned"
        return [out, *(grad[:total] for grad in torch.autograd.grad(out, leaves, pull))]

    attention = PackedAttention(lengths, parents, padding)
    found = with_gradients(
        lambda q, k, v: cast(Any, attention).attend(0, q, k, v, window), torch.bfloat16, total + padding
    )
    assert ("flex" in attention.__dict__) == (segments is SHARED or window is not None)
    exact = Rectangles(lengths, parents)
    expected = with_gradients(lambda q, k, v: exact.attend(q, k, v, window), torch.float32, total)
    for one, other in zip(found, expected, strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 1e-2


@pytest.mark.filterwarnings("default")
def test_one_compilation_serves_all_numbers_of_tokens() -> None:
    torch._dynamo.reset()
    flex._compiled.cache_clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([28], [300] * 5, [4096, 17]):
            total = sum(lengths)
            attention = PackedAttention(torch.tensor(lengths, device="cuda"), padding=-total % 128)
            size = total + -total % 128
            q, k, v = (torch.randn(size, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
            q.requires_grad_()
            cast(Any, attention).attend(0, q, k, v, None).sum().backward()


def test_micro_batches_take_the_memory_that_is_left(tiny_model: Path) -> None:
    ranks = Ranks.single(torch.device("cuda"))
    model = ModelConfig(name=tiny_model, dtype="bfloat16")
    stepper = load_trained(model, OptimizerConfig(), ParallelConfig(), ranks).stepper
    assert plan_tokens(stepper, 0, least=100, deterministic=False) == MOST
    assert plan_tokens(stepper, 0, least=100, deterministic=True) == DEFAULT
    free, _ = torch.cuda.mem_get_info()
    somebody = torch.empty(int(free * 0.95), dtype=torch.uint8, device="cuda")
    assert LEAST <= plan_tokens(stepper, 0, least=100, deterministic=False) < MOST
    del somebody
    torch.cuda.empty_cache()


@pytest.mark.parametrize("most_pinned_bytes", [0, filesystem.MOST_PINNED_BYTES])
def test_weights_of_a_gpu_are_published_as_those_of_a_cpu(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_pinned_bytes: int
) -> None:
    """Cast on the GPU, copied without waiting: twice, since the second time finds the memory of the first."""
    monkeypatch.setattr(filesystem, "MOST_PINNED_BYTES", most_pinned_bytes)
    torch.manual_seed(0)
    for version in (1, 2):
        tensors = {f"w{i}": torch.randn(257, 31 + i) for i in range(20)}
        for device in ("cpu", "cuda"):
            placed = {name: tensor.to(device) for name, tensor in tensors.items()}
            WeightsPublisher(tmp_path / device, tiny_model, "bfloat16", keep=1).publish(placed, version)
        one, other = (tmp_path / device / "latest" / "model.safetensors" for device in ("cpu", "cuda"))
        assert one.read_bytes() == other.read_bytes()


def test_a_full_gpu_halves_a_chosen_size_and_names_one_that_was_given(tiny_model: Path) -> None:
    device = torch.device("cuda")
    stepper = load_trained(
        ModelConfig(name=tiny_model), OptimizerConfig(), ParallelConfig(), Ranks.single(device)
    ).stepper
    size = MicroBatchSize(stepper, 0, least=100)
    token_bytes = free_bytes(device) * 3 // 4 // size.tokens  # half as many tokens fit next to the filler
    filler = torch.empty(free_bytes(device) // 2, dtype=torch.uint8, device=device)

    def compute(tokens: int) -> int:
        return torch.empty(tokens * token_bytes, dtype=torch.uint8, device=device).numel() // token_bytes

    assert size.fit(compute) == size.tokens == MOST // 2
    given = MicroBatchSize(stepper, MOST, least=100)
    with pytest.raises(OutOfMemory, match=rf"this process used [\d.]+ \(weights.*Lower tokens_per_microbatch = {MOST}"):
        given.fit(compute)
    del filler
