"""A whole `rl` run whose rollouts vLLM writes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.processes import Starter
from tests.ports import free_port
from tests.scale.vllm_server import START_S

from tandem.utils.files import read_json_lines

STEPS = 6


@pytest.fixture
def starter() -> Iterator[Starter]:
    starter = Starter()
    starter.environment["VLLM_CPU_CI_ENV"] = "1"
    yield starter
    starter.end_all()


def test_rl_with_vllm(vllm_python: Path, tiny_model: Path, starter: Starter, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = starter.run(
        "rl",
        *("@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model), "--output-dir", str(run)),
        *("--max-steps", str(STEPS), "--orchestrator.eval.every", "None", "--inference.server.port", str(free_port())),
        *("--orchestrator.sampling.temperature", "0.8", "--inference.engine", "vllm"),
        *("--inference.vllm.python", str(vllm_python), "--inference.vllm.flags.enforce-eager"),
        *("--orchestrator.client.startup-timeout-s", str(START_S)),
        timeout_s=400,
    )
    assert done.returncode == 0, done.stdout
    rows = read_json_lines(run / "metrics.jsonl")
    trainer = {row["step"]: row for row in rows if row["process"] == "trainer"}
    assert sorted(trainer) == list(range(1, STEPS + 1))
    # On-policy, the trainer computes the log-probs that vLLM gave, at the sampling temperature.
    assert trainer[1]["mismatch_kl"] < 1e-6 and abs(trainer[1]["ratio"] - 1) < 1e-4
    samples = [json.loads(line) for line in (run / "samples" / "step_000004.jsonl").read_text().splitlines()]
    assert {sample["oldest_version"] for sample in samples} <= {2, 3}, "at most one version behind"
