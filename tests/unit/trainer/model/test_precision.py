"""The same weights give the same log-probs, to the bit, in every pass that the trainer makes."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.algorithms.losses.kind import LossOutput
from tandem.algorithms.losses.ppo import PpoConfig
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.lora import LoRAConfig
from tandem.config.parallel import Checkpointing, ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import divide, pack
from tandem.models import ops
from tandem.models.cpu import kernels
from tandem.models.hf import copy_weights, load_decoder, named_tensors
from tandem.models.precision import WorkingWeights
from tandem.trainer.build import TrainState, load_trained
from tandem.trainer.model.frozen import FrozenModel
from tandem.trainer.model.language_model import Inputs
from tandem.trainer.model.memory import MicroBatchSize
from tandem.trainer.offline.aligner import Aligner
from tandem.trainer.offline.preferences import BAD, GOOD, AlignBatch, AlignRow
from tandem.trainer.offline.reference import precompute, stream_reference
from tandem.trainer.offline.reward_model import load_trained_scorer
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl.learner import Learner
from tandem.types.rollout import TrainBatch, TrainingSequence

RANKS = Ranks.single(torch.device("cpu"))
DTYPES: list[Literal["float32", "bfloat16"]] = ["float32", "bfloat16"]
TEMPERATURE = 0.7


@pytest.fixture(params=["kernels", "pytorch"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our kernels, and as where there are none."""
    if request.param == "pytorch":
        monkeypatch.setattr(kernels, "find", lambda x: None)


def load(model: ModelConfig, *, lora: bool = False, checkpointing: Checkpointing = 0, **options: Any) -> TrainState:
    parallel = ParallelConfig(gradient_checkpointing=checkpointing)
    adapter = LoRAConfig(rank=4) if lora else None
    return load_trained(model, OptimizerConfig(lr=1e-2), parallel, RANKS, lora=adapter, **options)


def make_samples(longest: int) -> list[TrainingSequence]:
    """Groups of prompts and completions up to `longest` tokens each: beyond 256 together, other kernels take over."""
    draw = random.Random(longest)
    samples = []
    for _ in range(3):
        prompt = [draw.randrange(6, 100) for _ in range(draw.randint(longest // 2, longest))]
        for _ in range(3):
            completion = [draw.randrange(6, 100) for _ in range(draw.randint(longest // 2, longest))]
            mask = [0] * len(prompt) + [1] * len(completion)
            streams = {"advantages": [draw.uniform(-1, 1)] * len(mask), "logprobs": [-4.6] * len(mask)}
            samples.append(TrainingSequence(prompt + completion, mask, streams))
    return samples


def take_a_step(trained: TrainState, samples: list[TrainingSequence]) -> None:
    """Away from weights that bfloat16 can hold exactly, and from an adapter of zeros."""
    batch = pack(samples)
    trained.stepper.step([batch], lambda _, said: LossOutput(-said.logprobs.sum(), {}), batch.num_loss_tokens)


@pytest.mark.parametrize("longest", [20, 200])
@pytest.mark.parametrize("checkpointing", [0, 1, "elementwise", "mlp"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("operations")
def test_every_pass_says_the_same(
    tiny_model: Path, dtype, lora: bool, checkpointing: Checkpointing, longest: int
) -> None:
    config = ModelConfig(name=tiny_model, dtype=dtype)
    trained = load(config, lora=lora, checkpointing=checkpointing)
    frozen = FrozenModel(config, ParallelConfig(), RANKS)
    batch = pack(make_samples(longest))
    learning = trained.stepper.predict(batch, TEMPERATURE)
    assert learning.logprobs.requires_grad
    assert torch.equal(frozen.logprobs(batch, TEMPERATURE), learning.logprobs)
    for _ in range(2):
        learning = trained.stepper.predict(batch, TEMPERATURE)
        predicted = trained.stepper.infer(batch, TEMPERATURE)
        assert torch.equal(predicted.logprobs, learning.logprobs) and torch.equal(predicted.entropy, learning.entropy)
        take_a_step(trained, make_samples(20))
    assert not torch.equal(frozen.logprobs(batch, TEMPERATURE), learning.logprobs), "nothing was learned"


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_so_do_models_of_transformers(tiny_model: Path, dtype, lora: bool) -> None:
    config = ModelConfig(name=tiny_model, dtype=dtype, impl="hf")
    trained, frozen = load(config, lora=lora), FrozenModel(config, ParallelConfig(), RANKS)
    batch = pack(make_samples(20))
    learning = trained.stepper.predict(batch, TEMPERATURE).logprobs
    assert torch.equal(trained.stepper.infer(batch, TEMPERATURE).logprobs, learning)
    assert torch.equal(frozen.logprobs(batch, TEMPERATURE), learning)


class Allocations(TorchDispatchMode):
    """Remembers what operations allocate, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return result

    @property
    def kept(self) -> int:
        """Bytes that are still there."""
        return sum(size for ref, size in self.storages.items() if not ref.expired())


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_the_backward_pass_finds_less_and_computes_the_same(tiny_model: Path, impl, dtype, lora: bool) -> None:
    """Each way keeps less than the one before it, and all give the same gradient, to the bit."""
    config = ModelConfig(name=tiny_model, impl=impl, dtype=dtype)
    inputs = Inputs.of(pack(make_samples(20)), torch.device("cpu"))

    def kept_and_gradients(checkpointing: Checkpointing) -> tuple[int, dict[str, torch.Tensor]]:
        model = load(config, checkpointing=checkpointing, lora=lora).model
        learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for parameter in learned.values():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
        with Allocations() as allocations:
            logprobs = model(inputs, 1.0)[0]
        kept = allocations.kept
        logprobs.sum().backward()
        return kept, {name: parameter.grad for name, parameter in learned.items() if parameter.grad is not None}

    most, expected = kept_and_gradients(0)
    assert expected
    ways: list[Checkpointing] = ["mlp", 1] if impl == "hf" else ["elementwise", "mlp", 1]
    for checkpointing in ways:
        kept, found = kept_and_gradients(checkpointing)
        assert kept < 0.9 * most, checkpointing
        most = kept
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), (checkpointing, name)


@pytest.mark.parametrize("longest", [20, 200])
@pytest.mark.usefixtures("operations")
def test_what_needs_no_matrix_product_is_not_kept(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """Norms, heads, and the product of gate and up are gone after the forward pass."""
    made: list[StorageWeakRef] = []

    def watch(name: str, outputs: Callable[[Any], Sequence[torch.Tensor]]) -> None:
        operation = getattr(ops, name)

        def run(*args: Any) -> Any:
            result = operation(*args)
            made.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in outputs(result))
            return result

        monkeypatch.setattr(ops, name, run)

    watch("add_norm", lambda result: result[1:])
    watch("silu_mul", lambda result: [result])
    watch("heads", lambda result: result[:2])
    inputs = Inputs.of(pack(make_samples(longest)), torch.device("cpu"))
    ways: list[Checkpointing] = [0, "elementwise", "mlp"]
    for checkpointing in ways:
        made.clear()
        logprobs = load(ModelConfig(name=tiny_model), checkpointing=checkpointing).model(inputs, 1.0)[0]
        assert any(not ref.expired() for ref in made) == (checkpointing == 0) and logprobs.requires_grad


@pytest.mark.parametrize("checkpointing", [1, "mlp"])
@pytest.mark.parametrize("impl", ["native", "hf"])
def test_dropout_is_the_same_when_it_is_computed_again(tiny_model: Path, impl, checkpointing: Checkpointing) -> None:
    inputs = Inputs.of(pack(make_samples(20)), torch.device("cpu"))

    def gradients(checkpointing: Checkpointing) -> list[torch.Tensor]:
        lora, parallel = LoRAConfig(rank=4, dropout=0.5), ParallelConfig(gradient_checkpointing=checkpointing)
        config = ModelConfig(name=tiny_model, impl=impl)
        trained = load_trained(config, OptimizerConfig(), parallel, RANKS, lora=lora)
        learned = [parameter for parameter in trained.model.parameters() if parameter.requires_grad]
        for parameter in learned:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        trained.model.train()(inputs, 1.0)[0].sum().backward()
        return [parameter.grad for parameter in learned if parameter.grad is not None]

    expected, found = gradients(0), gradients(checkpointing)
    assert len(expected) == len(found) > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_lower_precision_is_another_one(tiny_model: Path) -> None:
    """Else all of the above would hold for a trainer that ignores the option."""
    batch = pack(make_samples(20))
    for impl in ("native", "hf"):
        exact, rounded = (
            load(ModelConfig(name=tiny_model, dtype=dtype, impl=impl)).stepper.infer(batch).logprobs for dtype in DTYPES
        )
        assert 0 < (exact - rounded).abs().max() < 0.1


def test_masters_in_float32_count_as_they_are_published(tiny_model: Path) -> None:
    """After an update the weights fit into bfloat16 no longer: a frozen copy holds them rounded, as the policy uses
    them, and gradients and masters stay in float32."""
    config = ModelConfig(name=tiny_model, dtype="bfloat16")
    trained, frozen = load(config), FrozenModel(config, ParallelConfig(), RANKS)
    take_a_step(trained, make_samples(20))
    for parameter in trained.model.parameters():
        assert parameter.grad is not None and parameter.dtype == parameter.grad.dtype == torch.float32
    assert {parameter.dtype for parameter in frozen.model.parameters()} == {torch.bfloat16}
    copy_weights(frozen.model.decoder, named_tensors(trained.decoder))  # type: ignore[arg-type]
    batch = pack(make_samples(20))
    assert torch.equal(frozen.logprobs(batch, TEMPERATURE), trained.stepper.infer(batch, TEMPERATURE).logprobs)


@pytest.mark.parametrize("longest", [20, 200])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_before_the_first_update_ratios_are_one_and_the_kl_is_zero(
    tiny_model: Path, dtype, lora: bool, longest: int
) -> None:
    """GSPO, whose bounds are as narrow as 3e-4, in two updates that move nothing, in several micro-batches."""
    loss = {
        "type": "gspo",
        "normalize": "sequences",
        "old_logprobs": "recomputed",
        "kl": {"coef": 0.1, "estimator": "k3"},
        "teacher": {"coef": 0.1, "model": tiny_model},
    }
    model = {"name": tiny_model, "dtype": dtype}
    config = TrainerConfig.model_validate(
        {"model": model, "seq_len": 400, "tokens_per_microbatch": 450, "epochs_per_batch": 2, "loss": loss}
    )
    trained = load(config.model, lora=lora)
    trained.stepper.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.0)
    frozen = FrozenModel(config.model, config.parallel, RANKS)
    frozen_models = {"reference_logprobs": frozen, "teacher_logprobs": frozen}
    batch = pack(make_samples(longest))
    assert longest == 20 or len(divide(batch, 0, 1, 450)) > 1
    stats = Learner(config, trained.stepper, frozen_models).learn(TrainBatch(1, TEMPERATURE, batch))
    exact = {"reference_kl": 0.0, "teacher_kl": 0.0, "ratio": 1.0, "clip_fraction": 0.0, "loss/kl": 0.0}
    assert {name: stats[name] for name in exact} == exact


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_before_the_batch_are_those_of_the_first_update(tiny_model: Path, dtype) -> None:
    trained = load(ModelConfig(name=tiny_model, dtype=dtype), critic=PpoConfig())
    head = trained.model.value_head
    assert head is not None
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    batch = pack(make_samples(20))
    learning, predicted = trained.stepper.predict(batch), trained.stepper.infer(batch)
    assert learning.values is not None and predicted.values is not None
    assert learning.values.dtype == torch.float32 and float(learning.values.detach().std()) > 0.1
    assert torch.equal(learning.values, predicted.values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_a_reward_model_do_not_depend_on_the_pass(tiny_model: Path, dtype) -> None:
    options = OptimizerConfig(), ParallelConfig(), RANKS
    stepper = load_trained_scorer(ModelConfig(name=tiny_model, dtype=dtype), *options, seed=0).stepper
    batch = pack(make_samples(20))
    assert torch.equal(stepper.predict(batch).scores, stepper.infer(batch).scores)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["precomputed", "model"])
def test_before_the_first_step_an_aligned_model_is_its_reference(tiny_model: Path, dtype, source, tmp_path) -> None:
    """With long sequences in several micro-batches, where the company matters to the last bit."""
    samples = [TrainingSequence(sample.token_ids, sample.loss_mask) for sample in make_samples(200)]
    rows = [AlignRow((samples[i], samples[i + 1]), (GOOD, BAD)) for i in (0, 3, 6)]
    config = ModelConfig(name=tiny_model, dtype=dtype)
    stepper = load(config).stepper
    reference_of = FrozenModel(config, ParallelConfig(), RANKS).logprobs
    size = MicroBatchSize(stepper, 800, least=800)
    if source == "precomputed":
        rows = precompute(stepper, [rows], config, size, tmp_path / "reference").attach(rows)
        reference_of = stream_reference(RANKS.device)
    batch = AlignBatch.of(rows)
    assert len(batch.divide(0, 1, 800)) > 1
    stats = Aligner(AlignLossConfig(type="dpo"), stepper, reference_of, size).step(batch, [])
    assert [stats[name] for name in ("rewards_chosen", "rewards_rejected", "kl")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_an_engine_serves_are_computed_with_to_the_same_bits(tiny_model: Path, dtype, lora: bool) -> None:
    config, samples = ModelConfig(name=tiny_model, dtype=dtype), make_samples(20)
    own, sharing = load(config, lora=lora), load(config, lora=lora)
    served = load_decoder(tiny_model, getattr(torch, dtype), RANKS.device).requires_grad_(False)
    memory = {name: parameter.detach() for name, parameter in served.named_parameters()}
    working = WorkingWeights(sharing.decoder, memory)
    batch = pack(samples)
    for _ in range(2):
        take_a_step(own, samples)
        take_a_step(sharing, samples)
        working.refresh()
        said = [trained.stepper.predict(batch, TEMPERATURE).logprobs for trained in (own, sharing)]
        assert torch.equal(*said)
    for (name, parameter), other in zip(sharing.decoder.named_parameters(), own.decoder.parameters(), strict=True):
        if lora and name in memory:
            assert parameter.data_ptr() == memory[name].data_ptr(), "what is frozen is there once"
        else:
            assert torch.equal(parameter, other)
        if name in memory:
            assert torch.equal(memory[name], other.to(memory[name].dtype)), "what is served is what was trained"
            assert dtype != "float32" or parameter.data_ptr() == memory[name].data_ptr()
