"""A loss and an advantage that are added as docs/algorithms.md says: a file each in a copy of the package."""

import re
import shutil
from pathlib import Path

from tests.documentation import FENCE, ROOT
from tests.integration.processes import Starter

from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir

BLOCKS = [block for language, block in FENCE.findall((ROOT / "docs" / "algorithms.md").read_text())]


def add(package: Path, folder: str, name: str) -> None:
    """The file of that name, as the page shows it, into a folder of the algorithms."""
    (text,) = (block for block in BLOCKS if block.startswith(f"# {name}\n"))
    path = package / "algorithms" / folder / name
    assert not path.exists()
    path.write_text(text)


def test_a_file_is_all_that_a_loss_or_an_advantage_needs(
    starter: Starter, warm_model: Path, tmp_path: Path, free_port: int
) -> None:
    package = tmp_path / "copy" / "tandem"
    shutil.copytree(ROOT / "src" / "tandem", package, ignore=shutil.ignore_patterns("__pycache__"))
    starter.environment["PYTHONPATH"] = str(package.parent)
    unknown = starter.run("rl", "--model.name", str(warm_model), "--trainer.loss.type", "mirror", "--dry-run")
    assert unknown.returncode == 2 and "'mirror' is not valid" in unknown.stdout

    add(package, "losses", "mirror.py")
    add(package, "advantages", "best_of_group.py")
    told = re.sub(r"[│\s]+", " ", starter.run("rl", "--help", "trainer.loss").stdout)
    assert "mirror: squared distance of log-ratio and advantage." in told
    assert "Weight of the distance to the old policy; mirror. None: 1." in told
    refused = starter.run("rl", "--model.name", str(warm_model), "--trainer.loss.tau", "0.5", "--dry-run")
    assert refused.returncode == 2 and "tau = 0.5 has no effect with type = 'grpo'" in refused.stdout

    done = starter.run(
        *("rl", "@", "examples/reverse_text/rl.toml", "--model.name", str(warm_model), "--max-steps", "2"),
        *("--output-dir", str(tmp_path / "run"), "--inference.server.port", str(free_port)),
        *("--trainer.loss.type", "mirror", "--trainer.loss.tau", "0.5"),
        *("--orchestrator.advantage.type", "best_of_group"),
        *("--orchestrator.prompts-per-step", "2", "--orchestrator.group-size", "4"),
    )
    assert done.returncode == 0, done.stdout
    run_dir = RunDir(tmp_path / "run")
    samples = [line for step in (1, 2) for line in read_json_lines(run_dir.samples(step))]
    assert {line["advantage"] for line in samples} <= {0.0, 1.0}
    steps = [line for line in read_json_lines(run_dir.metrics) if line["process"] == "trainer" and "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    # (A − τ log r)² / 2τ of tokens with A = 0 or 1 and r near 1: the share of tokens with A = 1.
    assert all(0.0 <= line["loss"] <= 1.01 and line["grad_norm"] >= 0.0 for line in steps)
