"""A run that trains an adapter: rollouts come from it, reward rises, and what it leaves loads with PEFT."""

import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem.data.batch_files import RolloutReader
from tandem.models.hf_model import lay_out
from tandem.types.rollout import PackedBatch
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import verify_manifest
from tandem.utils.run_dir import RunDir, step_name

LORA = ["--trainer.lora.rank", "8", "--trainer.lora.alpha", "16", "--trainer.optimizer.lr", "4e-3"]


def succeed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout


def trainer_metrics(run_dir: RunDir) -> dict[int, dict]:
    return {line["step"]: line for line in read_json_lines(run_dir.metrics) if line["process"] == "trainer"}


@pytest.mark.parametrize(("mode", "steps"), [("keep", 30), ("wait", 8)])
def test_reward_rises_and_rollouts_come_from_the_adapter(mode, steps, starter, rl_arguments, warm_model, tmp_path):
    succeed(
        starter.run("rl", *rl_arguments, *LORA, "--max-steps", str(steps), "--orchestrator.client.update-mode", mode)
    )
    run_dir = RunDir(tmp_path / "run")
    lines = read_json_lines(run_dir.metrics)
    curve = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert len(curve) == steps
    if steps == 30:  # long enough to see it
        assert statistics.fmean(curve[-5:]) > statistics.fmean(curve[:5]) + 0.05
    # Every token says which adapter made it: at staleness 0 or 1 the trainer all but agrees on its log-prob.
    assert max(line["staleness/max"] for line in lines if "staleness/max" in line) <= 1
    assert max(line["mismatch_kl"] for line in trainer_metrics(run_dir).values()) < 0.05

    latest = run_dir.weights / "latest"
    verify_manifest(latest, steps)
    assert {path.name for path in latest.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    }
    base = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float32)
    tensors = load_file(latest / "adapter_model.safetensors")
    moved = [tensor.abs().max() for name, tensor in tensors.items() if "lora_B" in name]
    assert len(moved) == 7 * base.config.num_hidden_layers and min(moved) > 0
    adapted = PeftModel.from_pretrained(base, str(latest)).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(run_dir.merged / "latest", dtype=torch.float32).state_dict()
    for name, tensor in adapted.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)


def test_on_policy_rollouts_are_the_adapters_and_not_the_models(starter, rl_arguments, warm_model, tmp_path):
    """With strides this large the model itself is soon far from its adapter."""
    arguments = [*rl_arguments, *LORA, "--orchestrator.max-staleness", "0", "--orchestrator.prompts-per-step", "4"]
    succeed(starter.run("rl", *arguments, "--max-steps", "6", "--trainer.optimizer.lr", "0.02"))
    run_dir = RunDir(tmp_path / "run")
    assert max(line["mismatch_kl"] for line in trainer_metrics(run_dir).values()) < 1e-6
    base = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float32).eval()
    version = run_dir.weights / "step_000005"  # made the rollouts of step 6
    batch = RolloutReader(run_dir.rollouts, timeout_s=1).read(6).packed
    sampled = torch.from_numpy(batch.streams["logprobs"])
    plain = logprobs_of(base, batch)
    adapted = logprobs_of(PeftModel.from_pretrained(base, str(version)).eval(), batch)
    assert (sampled - adapted).abs().max() < 1e-4
    assert (sampled - plain).abs().mean() > 0.05


def logprobs_of(model: Any, batch: PackedBatch) -> torch.Tensor:
    """(loss tokens,), computed row by row: every sequence whole."""
    rows, cells = lay_out(torch.from_numpy(batch.segment_lengths), torch.from_numpy(batch.segment_parents))
    token_ids = torch.from_numpy(batch.token_ids)
    with torch.no_grad():
        logprobs = model(token_ids[rows]).logits.log_softmax(-1).flatten(0, 1)  # (cells, vocab)
    targets = torch.from_numpy(batch.targets)
    return logprobs[cells[targets] - 1].gather(1, token_ids[targets][:, None])[:, 0]


def test_a_resumed_run_ends_like_an_uninterrupted_one(starter, rl_arguments, tmp_path):
    """What lies after step 2 is taken away. It goes on in one process, where the base model is there once, rounded."""
    on_policy = ["--orchestrator.max-staleness", "0", "--deterministic", "--orchestrator.prompts-per-step", "4"]
    arguments = [*rl_arguments, *LORA, *on_policy, "--checkpoint.every", "2", "--max-steps", "4"]
    arguments += ["--model.dtype", "bfloat16"]
    run_dir = RunDir(tmp_path / "run")
    succeed(starter.run("rl", *arguments))
    weights = run_dir.weights / step_name(4) / "adapter_model.safetensors"
    merged = run_dir.merged / "latest" / "model.safetensors"
    whole = weights.read_bytes(), merged.read_bytes()
    shutil.rmtree(run_dir.checkpoints / step_name(4))
    shutil.rmtree(weights.parent)
    resumed = starter.run("rl", *arguments, "--deployment", "colocated", "--resume")
    succeed(resumed)
    assert "resuming after step 2" in resumed.stdout
    assert (weights.read_bytes(), merged.read_bytes()) == whole
    differences = [line["max/logprob_difference"] for line in trainer_metrics(run_dir).values()]
    assert differences == [0.0] * 4


def test_sft_leaves_the_adapter_and_the_merged_model(starter, warm_model: Path, tiny_model: Path, tmp_path):
    data = warm_model.resolve().parents[2] / "data.jsonl"
    run = tmp_path / "sft"
    succeed(
        starter.run(
            "sft",
            *("@", "examples/reverse_text/sft.toml", "--model.name", str(warm_model), "--data.path", str(data)),
            *("--output-dir", str(run), "--max-steps", "3", "--lora.rank", "4", "--lora.targets", "all-linear"),
        )
    )
    base = AutoModelForCausalLM.from_pretrained(warm_model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(run / "adapter" / "latest")).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(run / "weights" / "latest", dtype=torch.float32).state_dict()
    assert merged.keys() == adapted.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, adapted[name], rtol=1e-5, atol=1e-6)


def test_rl_through_transformers(starter, rl_arguments, tmp_path):
    """The trainer computes with transformers and PEFT, the server with our decoder: they agree."""
    on_policy = ["--orchestrator.max-staleness", "0", "--orchestrator.prompts-per-step", "4", "--max-steps", "3"]
    succeed(starter.run("rl", *rl_arguments, *LORA, *on_policy, "--model.impl", "hf"))
    whole = ["--model.impl", "hf", "--output-dir", str(tmp_path / "whole")]
    succeed(starter.run("rl", *rl_arguments, *on_policy, *whole))
    for name in ("run", "whole"):
        metrics = trainer_metrics(RunDir(tmp_path / name))
        assert sorted(metrics) == [1, 2, 3]
        assert max(line["mismatch_kl"] for line in metrics.values()) < 1e-6
