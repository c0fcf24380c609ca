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

IMPLS = ("native", "hf")


@pytest.fixture(scope="module")
def of_two_ranks(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have trained, a file for each implementation of the model."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(Path(__file__).with_name("lora_ranks.py")), str(tiny_model), "zero3", str(folder), *IMPLS),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("impl", IMPLS)
def test_two_ranks_train_what_one_does(impl: str, tiny_model: Path, of_two_ranks: Path) -> None:
    expected = train(tiny_model, impl, "ddp", Ranks.single(torch.device("cpu")))
    found = load_file(of_two_ranks / f"{impl}.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    base = named_tensors(load_decoder(tiny_model, torch.float32, torch.device("cpu")))
    changed = {name for name, tensor in base.items() if not torch.allclose(found[name], tensor, atol=1e-4)}
    assert changed == {name for name in base if "_proj." in name}, "the adapter moved, and nothing else"
