"""The same parts on a GPU as on a CPU: decoder, training step, engine."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tandem.config.inference import InferenceConfig
from tandem.config.shared import OptimizerConfig
from tandem.data.packing import pack
from tandem.inference.engine import GenerationRequest, Sampling
from tandem.inference.native.build import build_engine
from tandem.models.hf import load_decoder
from tandem.trainer.optimizer import make_optimizer
from tandem.trainer.step import Stepper
from tandem.trainer.train_sft import sft_loss
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


def generate(model_dir: Path, device: str) -> list[tuple[list[int], list[float]]]:
    config = InferenceConfig.model_validate(
        {"model": {"name": model_dir}, "seq_len": 64, "device": device, "kv_cache_tokens": 4096}
    )
    engine = build_engine(config, [2], lambda reason: None)
    engine.start()
    done: Future = Future()
    sampling = Sampling(temperature=0.7, max_tokens=12, seed=7)
    engine.submit(GenerationRequest(prompt_ids=PROMPT, n=4, sampling=sampling), done.set_result)
    samples = done.result(timeout=60)
    engine.stop()
    return [(sample.token_ids, sample.logprobs) for sample in samples]


@pytest.mark.gpu
def test_the_engine_samples_what_it_samples_on_the_cpu(tiny_model: Path) -> None:
    for (cpu_ids, cpu_logprobs), (gpu_ids, gpu_logprobs) in zip(
        generate(tiny_model, "cpu"), generate(tiny_model, "cuda"), strict=True
    ):
        assert gpu_ids == cpu_ids
        assert gpu_logprobs == pytest.approx(cpu_logprobs, abs=1e-3)
