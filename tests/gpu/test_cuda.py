"""The same parts on a GPU as on a CPU: decoder, training step, engine."""

import shutil
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.inference import InferenceConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import pack
from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer
from tandem.engine.build import build_engine
from tandem.engine.grammars import Grammars
from tandem.engine.protocol import GenerationRequest, Sampling
from tandem.engine.structure import Structure
from tandem.models.spec import ModelSpec
from tandem.trainer.build import load_trained
from tandem.trainer.model.frozen import FrozenModel
from tandem.trainer.offline.sft import sft_loss
from tandem.trainer.parallel.ranks import joined
from tandem.trainer.parallel.sharding import needs_group
from tandem.types.rollout import TrainingSequence
from tandem.utils.files import write_json
from tandem.utils.manifest import write_manifest

PROMPT = [1, 4, 101, 71, 72, 73, 74, 2, 101, 1, 5, 101]


def make_samples() -> list[TrainingSequence]:
    """Three completions of one prompt, and a sequence by itself."""
    rows = [(PROMPT, [74, 73, 72, 71, 2]), (PROMPT, [74, 2]), (PROMPT, [71, 72, 73]), ([7, 8, 9], [10, 11])]
    return [TrainingSequence(prompt + rest, [0] * len(prompt) + [1] * len(rest)) for prompt, rest in rows]


def train(model_dir: Path, device: str, dtype: str = "float32", **parallel: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps, and the weights after them."""
    config = ParallelConfig.model_validate(parallel)
    with joined(device, 60, group_for_one=needs_group(config)) as ranks:  # type: ignore[arg-type]
        model = ModelConfig.model_validate({"name": model_dir, "dtype": dtype})
        # A large epsilon: Adam would else blow rounding up where the gradient is next to nothing.
        trained = load_trained(model, OptimizerConfig(lr=1e-2, eps=1e-2), config, ranks)
        batch = pack(make_samples())
        losses = [trained.stepper.step([batch], sft_loss, batch.num_loss_tokens)["loss"] for _ in range(3)]
        weights: dict[str, torch.Tensor] = {}
        trained.publish(lambda tensors, version: weights.update(tensors), version=1)
        return losses, {name: tensor.cpu() for name, tensor in weights.items()}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch warns itself where it compiles
@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"gradient_checkpointing": 1},
        {"gradient_checkpointing": 2},
        {"gradient_checkpointing": "elementwise"},
        {"gradient_checkpointing": "mlp"},
        {"optimizer_offload": True},
        {"strategy": "zero3_offload"},
        {"strategy": "zero3_offload", "gradient_checkpointing": 1},
        {"compile": True},
        {"compile": True, "gradient_checkpointing": "mlp"},
    ],
    ids=str,
)
def test_training_on_a_gpu_is_training_on_the_cpu(tiny_model: Path, parallel: dict[str, Any]) -> None:
    cpu_losses, cpu_weights = train(tiny_model, "cpu")
    losses, weights = train(tiny_model, "cuda", **parallel)
    assert losses == pytest.approx(cpu_losses, abs=1e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, cpu_weights[name], atol=1e-4, rtol=0, msg=name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("impl", ["native", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "parallel",
    [{}, {"gradient_checkpointing": 1}, {"gradient_checkpointing": "mlp"}, {"strategy": "zero3_offload"}],
    ids=str,
)
def test_every_pass_says_the_same_to_the_bit(tiny_model: Path, impl: str, dtype: str, parallel: dict[str, Any]) -> None:
    """The one that learns, the one that recomputes, a reference of the same weights; sequences short, long and of one
    length."""
    config = ParallelConfig.model_validate(parallel)
    model = ModelConfig.model_validate({"name": tiny_model, "dtype": dtype, "impl": impl})
    longer = [token % 90 + 6 for token in range(400)]
    rows = [(longer, 10), (longer[::-1], 50)]
    alone = [TrainingSequence(row, [0] * prompt + [1] * (400 - prompt)) for row, prompt in rows]
    packed = pack([*make_samples(), *alone])
    of_one_length = pack([TrainingSequence(longer[first : first + 256], [0] + [1] * 255) for first in (0, 1)])
    with joined("cuda", 60, group_for_one=needs_group(config)) as ranks:
        stepper = load_trained(model, OptimizerConfig(), config, ranks).stepper
        frozen = FrozenModel(model, config, ranks)
        for batch in (packed, of_one_length):
            learning = stepper.predict(batch, 0.7)
            assert learning.logprobs.requires_grad
            assert torch.equal(stepper.infer(batch, 0.7).logprobs, learning.logprobs)
            assert torch.equal(frozen.logprobs(batch, 0.7), learning.logprobs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("parallel", [{}, {"strategy": "zero3_offload"}, {"compile": True}], ids=str)
def test_bfloat16_compute_stays_near(tiny_model: Path, parallel: dict[str, Any]) -> None:
    exact, _ = train(tiny_model, "cuda")
    rounded, weights = train(tiny_model, "cuda", "bfloat16", **parallel)
    assert rounded == pytest.approx(exact, abs=0.05)
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def generate(model_dir: Path, device: str, requests: list[GenerationRequest], **options: Any) -> list[list[Any]]:
    """Token ids and log-probs of every sample; on a GPU also that there are CUDA graphs, or not."""
    settings = {"model": {"name": model_dir}, "seq_len": 96, "device": device, "kv_cache_tokens": 4096, "block_size": 4}
    engine = build_engine(
        InferenceConfig.model_validate(settings | options), [2], partial(TextStream, Tokenizer(model_dir)), print
    )
    engine.start()
    futures: list[Future] = [Future() for _ in requests]
    for request, future in zip(requests, futures, strict=True):
        engine.submit(request, future.set_result)
    samples = [sample for future in futures for sample in future.result(timeout=120).samples]
    engine.stop()
    graphs = getattr(engine.core.runner, "graphs", {})
    assert (len(graphs) > 0) == (device == "cuda" and options.get("cuda_graphs", True))
    return [[sample.token_ids, sample.logprobs] for sample in samples]


def mixed_requests() -> list[GenerationRequest]:
    """Lengths that pass through several buckets of rows; every way of drawing."""
    options: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 7, "min_p": 0.02}]
    return [
        GenerationRequest(
            PROMPT * (1 + i % 3),
            Sampling(**({"max_tokens": 5 + 3 * i, "temperature": 0.7, "seed": i, "ignore_eos": True} | options[i % 4])),
            n=1 + i % 4,
        )
        for i in range(14)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graphs": False},
        {"kv_cache_tokens": 200},
        {"tokens_per_step": 70},  # prompts in parts, by the smallest graph or by none
        {"deterministic": True},
    ],
    ids=str,
)
def test_the_engine_samples_what_it_samples_on_the_cpu(tiny_model: Path, options: dict[str, Any]) -> None:
    requests = mixed_requests()
    expected = generate(tiny_model, "cpu", requests)
    for (cpu_ids, cpu_logprobs), (gpu_ids, gpu_logprobs) in zip(
        expected, generate(tiny_model, "cuda", requests, **options), strict=True
    ):
        assert gpu_ids == cpu_ids
        assert gpu_logprobs == pytest.approx(cpu_logprobs, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}], ids=str)
def test_grammars_mask_the_rows_they_belong_to(tiny_model: Path, options: dict[str, Any]) -> None:
    """Rows with and without one share steps, CUDA graphs included."""
    tokenizer = Tokenizer(tiny_model)
    grammar = Grammars(tokenizer, tokenizer.vocab_size).compile(Structure("test", "regex", "[0-9]{1,30}(ab|cd)*"))
    requests = [
        replace(request, grammar=grammar, sampling=replace(request.sampling, ignore_eos=False)) if i % 2 else request
        for i, request in enumerate(mixed_requests())
    ]
    expected = generate(tiny_model, "cpu", requests)
    found = generate(tiny_model, "cuda", requests, **options)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@pytest.mark.gpu
def test_cuda_graphs_stay_true_when_weights_change(tiny_model: Path, tmp_path: Path) -> None:
    config = InferenceConfig.model_validate({"model": {"name": tiny_model}, "seq_len": 64, "device": "cuda"})
    engine = build_engine(config, [2], partial(TextStream, Tokenizer(tiny_model)), print)
    engine.start()

    def logprobs() -> list[float]:
        done: Future = Future()
        engine.submit(GenerationRequest(PROMPT, Sampling(20, 0.0, ignore_eos=True)), done.set_result)
        return done.result(timeout=60).samples[0].logprobs

    before = logprobs()
    changed = shutil.copytree(tiny_model, tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, changed / "model.safetensors")
    write_manifest(changed, 1)
    engine.update_weights(changed, 1)
    after = logprobs()
    engine.stop()
    assert after != pytest.approx(before, abs=1e-3)
    sampling = Sampling(20, 0.0, ignore_eos=True)
    [[_, expected]] = generate(changed, "cpu", [GenerationRequest(PROMPT, sampling)])
    assert after == pytest.approx(expected, abs=1e-3)


def write_adapter(folder: Path, model_dir: Path, rank: int, seed: int) -> Path:
    """Random, for some of the projections of every layer."""
    spec = ModelSpec.load(model_dir)
    generator = torch.Generator().manual_seed(seed)
    sizes = {"self_attn.q_proj": (spec.q_size, spec.hidden_size), "self_attn.v_proj": (spec.kv_size, spec.hidden_size)}
    sizes["mlp.down_proj"] = (spec.hidden_size, spec.intermediate_size)
    tensors = {}
    for layer in range(spec.num_layers):
        for name, (outputs, inputs) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}.lora"
            tensors[f"{key}_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.3
            tensors[f"{key}_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "lora_alpha": 2 * rank})
    return folder


@pytest.mark.gpu
def test_cuda_graphs_of_adapters_are_those_of_their_weights(tiny_model: Path, tmp_path: Path) -> None:
    """Adapters replaced by others of the same shape and of another one; rows of several adapters in one step."""
    adapters = [write_adapter(tmp_path / str(i), tiny_model, rank, i) for i, rank in enumerate((4, 4, 6, 6))]
    found: dict[str, list[Any]] = {}
    for device in ("cpu", "cuda"):
        config = InferenceConfig.model_validate({"model": {"name": tiny_model}, "seq_len": 64, "device": device})
        engine = build_engine(config, [2], partial(TextStream, Tokenizer(tiny_model)), print)
        engine.start()

        def ask(*names: str | None, engine: Any = engine) -> list[Any]:
            sampling = Sampling(12, 0.7, seed=1, ignore_eos=True)
            futures: list[Future] = [Future() for _ in names]
            for name, future in zip(names, futures, strict=True):
                engine.submit(GenerationRequest(PROMPT, sampling, 3, adapter=name), future.set_result)
            return [sample for future in futures for sample in future.result(timeout=60).samples]

        samples = ask(None)
        for adapter in adapters[:3]:
            engine.load_adapter("one", adapter, replace=True)
            samples += ask("one")
        if device == "cuda":
            places = {key.place for key in engine.core.runner.graphs}  # type: ignore[union-attr]
            assert len(places) == 2, "those of the weights that were replaced elsewhere are left"
        engine.load_adapter("two", adapters[3])
        samples += ask("one", "two", None) + ask("two") + ask(None)
        engine.stop()
        found[device] = samples
    assert len({tuple(sample.token_ids) for sample in found["cpu"]}) > len(adapters)
    for on_cpu, on_gpu in zip(*found.values(), strict=True):
        assert on_gpu.token_ids == on_cpu.token_ids
        assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=1e-3)
