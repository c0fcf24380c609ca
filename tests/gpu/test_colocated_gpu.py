"""Trainer and engine in one process on a GPU: one set of weights, and a KV cache that makes room."""

import subprocess
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.patience import PATIENCE
from tests.ports import free_port

from tandem.config.inference import InferenceConfig
from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer
from tandem.engine.build import build_engine
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GenerationRequest, GenerationResult, Sampling
from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir, step_name

WAIT_S = 20 * PATIENCE


def generate(engine: NativeEngine) -> list[list[int]]:
    done: Future[GenerationResult | Exception] = Future()
    sampling = Sampling(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    engine.submit(GenerationRequest([1, 4, 101, 71, 72, 73, 74], sampling, n=6), done.set_result)
    result = done.result(WAIT_S)
    assert isinstance(result, GenerationResult), result
    return [sample.token_ids for sample in result.samples]


@pytest.mark.gpu
def test_cuda_graphs_stay_true_where_the_cache_was_released(tiny_model: Path) -> None:
    model = {"name": tiny_model, "dtype": "bfloat16"}
    cache = {"kv_cache_tokens": 1 << 20, "seq_len": 128}
    config = InferenceConfig.model_validate({"device": "cuda", "model": model} | cache)
    tokenizer = Tokenizer(tiny_model)
    options = [], partial(TextStream, tokenizer), print
    engine = build_engine(config, *options, releasable_cache=True)
    engine.start()
    try:
        expected = generate(engine)
        for _ in range(2):
            before, _ = torch.cuda.mem_get_info()
            engine.release_cache()
            between, _ = torch.cuda.mem_get_info()
            assert between - before >= engine.core.cache.num_bytes, "the GPU has it back"
            others = torch.full((between // 2,), 255, dtype=torch.uint8, device="cuda")  # NaN where a cache reads it
            del others
            torch.cuda.empty_cache()
            engine.reacquire_cache()
            assert generate(engine) == expected
    finally:
        engine.stop()


def run(folder: Path, model: Path, *more: str) -> RunDir:
    arguments = [
        *("@", "examples/reverse_text/rl.toml", "--model.name", str(model), "--model.dtype", "bfloat16"),
        *("--max-steps", "5", "--output-dir", str(folder), "--deployment", "colocated", "--show", "lines"),
        *("--orchestrator.max-staleness", "0", "--orchestrator.prompts-per-step", "4"),
        *("--orchestrator.eval.num-prompts", "4", "--checkpoint.every", "None"),
        *("--inference.server.port", str(free_port())),
    ]
    command = [sys.executable, "-m", "tandem.entrypoints.rl", *arguments, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S * 4, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return RunDir(folder)


@pytest.mark.gpu
def test_a_deterministic_run_gives_the_same_bits_again_and_with_room_made(tiny_model: Path, tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "first", tiny_model, "--deterministic"),
        run(tmp_path / "second", tiny_model, "--deterministic", "--release-cache", "True"),
    ]
    first, second = ((one.weights / step_name(5) / "model.safetensors").read_bytes() for one in runs)
    assert first == second


@pytest.mark.gpu
def test_an_adapter_is_trained_and_served_over_one_base(tiny_model: Path, tmp_path: Path) -> None:
    run_dir = run(tmp_path / "run", tiny_model, "--trainer.lora.rank", "8", "--trainer.optimizer.lr", "1e-3")
    lines = [line for line in read_json_lines(run_dir.metrics) if line["process"] == "trainer"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert max(line["mismatch_kl"] for line in lines) < 0.05, "the engine serves what is trained"
