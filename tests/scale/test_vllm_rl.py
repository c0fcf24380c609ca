"""A whole `rl` run that starts vLLM, trains an adapter and has vLLM serve it."""

from pathlib import Path

from tests.integration.processes import Starter
from tests.ports import free_port
from tests.scale.vllm_server import QUICK, START_S

from tandem.utils.files import read_json_lines


def test_rl_trains_an_adapter_that_vllm_serves(vllm_python: Path, tiny_model: Path, tmp_path: Path) -> None:
    starter, run = Starter(), tmp_path / "run"
    starter.environment |= QUICK
    try:
        done = starter.run(
            "rl",
            *("@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model), "--output-dir", str(run)),
            *("--max-steps", "4", "--orchestrator.eval.every", "None", "--inference.server.port", str(free_port())),
            *("--inference.engine", "vllm", "--inference.vllm.python", str(vllm_python)),
            *("--inference.vllm.flags.enforce-eager", "--orchestrator.max-staleness", "0"),
            # Steps so large that log-probs of the model itself would be far from the adapter's.
            *("--trainer.lora.rank", "4", "--trainer.lora.alpha", "32", "--trainer.optimizer.lr", "0.02"),
            *("--orchestrator.client.startup-timeout-s", str(START_S)),
            timeout_s=400,
        )
    finally:
        starter.end_all()
    assert done.returncode == 0, done.stdout
    trainer = {row["step"]: row for row in read_json_lines(run / "metrics.jsonl") if row["process"] == "trainer"}
    for step in (1, 2, 3, 4):
        assert trainer[step]["mismatch_kl"] < 1e-4, "rollouts did not come from the adapter that is trained"
        rows = read_json_lines(run / "samples" / f"step_{step:06d}.jsonl")
        assert {row["oldest_version"] for row in rows} == {step - 1}
    assert (run / "weights" / "latest" / "adapter_model.safetensors").exists()
