"""A model that brings Python code: it is run where the user has said so, and nobody is asked on the terminal."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.integration.processes import ENVIRONMENT, command
from tests.patience import PATIENCE

from tandem.utils.files import read_json, write_json

CONFIGURATION = """
from transformers import Qwen3Config
class OddConfig(Qwen3Config):
    model_type = "odd"
"""
MODELING = """
from pathlib import Path
from transformers import Qwen3ForCausalLM
from .configuration_odd import OddConfig
Path({ran!r}).touch()
class OddForCausalLM(Qwen3ForCausalLM):
    config_class = OddConfig
"""
CODE = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """There once the code was run."""
    return tmp_path / "ran"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path, ran: Path) -> Path:
    folder = shutil.copytree(tiny_model, tmp_path / "odd")
    (folder / "configuration_odd.py").write_text(CONFIGURATION)
    (folder / "modeling_odd.py").write_text(MODELING.format(ran=str(ran)))
    config = read_json(folder / "config.json") | {"model_type": "odd", "architectures": ["OddForCausalLM"]}
    write_json(folder / "config.json", config | {"auto_map": CODE})
    return folder


def run(name: str, model: Path, output_dir: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    """With somebody at the terminal who says yes to everything."""
    arguments = ("--model.name", str(model), "--model.impl", "hf", "--output-dir", str(output_dir), *extra)
    return subprocess.run(
        command(name, *arguments),
        env=ENVIRONMENT | {"HF_MODULES_CACHE": str(output_dir.parent / "modules")},
        input="y\n" * 100,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240 * PATIENCE,
        check=False,
    )


def test_sft_runs_it_where_it_is_told_to(model: Path, ran: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "ab", "completion": "ba"}\n' * 2)
    options = ("--data.path", str(rows), "--seq-len", "32", "--batch-size", "2", "--max-steps", "1", "--device", "cpu")
    refused = run("sft", model, tmp_path / "refused", *options)
    assert refused.returncode == 2 and "--model.trust-remote-code" in refused.stdout.splitlines()[-1], refused.stdout
    assert "Traceback" not in refused.stdout and "[y/N]" not in refused.stdout and not ran.exists()

    trusted = run("sft", model, tmp_path / "trusted", *options, "--model.trust-remote-code")
    assert trusted.returncode == 0 and ran.exists(), trusted.stdout
    latest = tmp_path / "trusted" / "weights" / "latest"
    assert {"modeling_odd.py", "configuration_odd.py"} < {path.name for path in latest.iterdir()}
