"""The same parts on a GPU as on a CPU: decoder, training step, engine."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.config.inference import InferenceConfig
from tandem.config.shared import OptimizerConfig
from tandem.data.packing import pack
from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer
from tandem.inference.engine import GenerationRequest, Sampling
from tandem.inference.native.build import build_engine
from tandem.models.hf import load_decoder
from tandem.trainer.optimizer import make_optimizer
from tandem.trainer.step import Stepper
from tandem.trainer.train_sft import sft_loss
from tandem.transport.weights.manifest import write_manifest
from tandem.types.rollout import Sample

PROMPT = [1, 4, 101, 71, 72, 73, 74, 2, 101, 1, 5, 101]


def make_samples() -> list[Sample]:
    """Three completions of one prompt, and a sequence by itself."""
    rows = [(PROMPT, [74, 73, 72, 71, 2]), (PROMPT, [74, 2]), (PROMPT, [71, 72, 73]), ([7, 8, 9], [10, 11])]
    return [
        Sample(prompt + rest, [0] * len(prompt) + [1] * len(rest), *[[0.0] * len(prompt + rest)] * 2)
        for prompt, rest in rows
    ]


def train_one_step(model_dir: Path, device: str, dtype: torch.dtype) -> tuple[dict[str, float], list[torch.Tensor]]:
    model = load_decoder(model_dir, torch.float32, torch.device(device))
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-3))
    stepper = Stepper(model, optimizer, sft_loss, device=torch.device(device), compute_dtype=dtype, max_grad_norm=1.0)
    batch = pack(make_samples(), 1000)
    stats = stepper.step(batch, sum(part.num_loss_tokens for part in batch))
    return stats, [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.gpu
def test_a_training_step_gives_the_gradients_of_the_cpu(tiny_model: Path) -> None:
    cpu_stats, cpu_grads = train_one_step(tiny_model, "cpu", torch.float32)
    gpu_stats, gpu_grads = train_one_step(tiny_model, "cuda", torch.float32)
    assert gpu_stats["loss"] == pytest.approx(cpu_stats["loss"], abs=1e-5)
    for on_cpu, on_gpu in zip(cpu_grads, gpu_grads, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
def test_bfloat16_compute_stays_near(tiny_model: Path) -> None:
    exact, _ = train_one_step(tiny_model, "cuda", torch.float32)
    rounded, _ = train_one_step(tiny_model, "cuda", torch.bfloat16)
    assert rounded["loss"] == pytest.approx(exact["loss"], abs=0.05)


def generate(model_dir: Path, device: str, requests: list[GenerationRequest], **options: Any) -> list[list[Any]]:
    """Token ids and log-probs of every sample; on a GPU also that recorded steps were replayed, or not."""
    settings = {"model": {"name": model_dir}, "seq_len": 96, "device": device, "kv_cache_tokens": 4096, "block_size": 4}
    engine = build_engine(
        InferenceConfig.model_validate(settings | options), [2], lambda: TextStream(Tokenizer(model_dir)), print
    )
    engine.start()
    futures: list[Future] = [Future() for _ in requests]
    for request, future in zip(requests, futures, strict=True):
        engine.submit(request, future.set_result)
    samples = [sample for future in futures for sample in future.result(timeout=120).samples]
    engine.stop()
    graphs = engine.core.runner.graphs
    assert (graphs is not None and len(graphs._graphs) > 0) == (device == "cuda" and options.get("cuda_graphs", True))
    return [[sample.token_ids, sample.logprobs] for sample in samples]


def mixed_requests() -> list[GenerationRequest]:
    """Lengths that pass through several buckets of rows and of context."""
    return [
        GenerationRequest(PROMPT * (1 + i % 3), Sampling(5 + 3 * i, 0.7, seed=i, ignore_eos=True), n=1 + i % 4)
        for i in range(14)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"kv_cache_tokens": 200}], ids=str)
def test_the_engine_samples_what_it_samples_on_the_cpu(tiny_model: Path, options: dict[str, Any]) -> None:
    requests = mixed_requests()
    expected = generate(tiny_model, "cpu", requests)
    for (cpu_ids, cpu_logprobs), (gpu_ids, gpu_logprobs) in zip(
        expected, generate(tiny_model, "cuda", requests, **options), strict=True
    ):
        assert gpu_ids == cpu_ids
        assert gpu_logprobs == pytest.approx(cpu_logprobs, abs=1e-3)


@pytest.mark.gpu
def test_recorded_steps_stay_true_when_weights_change(tiny_model: Path, tmp_path: Path) -> None:
    config = InferenceConfig.model_validate({"model": {"name": tiny_model}, "seq_len": 64, "device": "cuda"})
    engine = build_engine(config, [2], lambda: TextStream(Tokenizer(tiny_model)), print)
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
