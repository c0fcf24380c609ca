"""An adapter trained by two ranks that divide everything is the one that a single process trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.models.lora_ranks import train

from tandem.models.hf import load_decoder, named_tensors
from tandem.trainer.parallel.ranks import Ranks


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_two_ranks_train_what_one_does(impl: str, tiny_model: Path, tmp_path: Path) -> None:
    expected = train(tiny_model, impl, "ddp", Ranks.single(torch.device("cpu")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(Path(__file__).with_name("lora_ranks.py")), str(tiny_model), impl, "zero3"),
            str(tmp_path / "found.safetensors"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_file(tmp_path / "found.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    base = named_tensors(load_decoder(tiny_model, torch.float32, torch.device("cpu")))
    changed = {name for name, tensor in base.items() if not torch.allclose(found[name], tensor, atol=1e-4)}
    assert changed == {name for name in base if "_proj." in name}, "the adapter moved, and nothing else"
