"""Weights through the memory of a GPU: what one process holds, another reads."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from tandem.weights.cuda_ipc import DeviceMemory, read_device
from tandem.weights.versions import Place

READER = """
import json, sys, torch
from tandem.weights.cuda_ipc import read_device
from tandem.weights.versions import Place
for line in sys.stdin:
    asked = json.loads(line)
    try:
        found = read_device(Place(**asked["place"]), asked["version"], torch.device("cuda"))
        print(json.dumps({name: [str(t.dtype), t.float().cpu().tolist()] for name, t in found.items()}), flush=True)
    except (OSError, ValueError) as error:
        print(json.dumps(str(error)), flush=True)
"""


@pytest.mark.gpu
def test_another_process_reads_what_this_one_holds() -> None:
    memory = DeviceMemory(torch.bfloat16, torch.device("cuda"))
    tensors = {"a": torch.randn(3, 5, device="cuda"), "b": torch.randn(7, device="cuda")}
    held = memory.hold(tensors, 1, None)
    assert held.place is not None and held.place.path.startswith("cuda:")
    with subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:

        def ask(place: Place, version: int) -> object:
            assert reader.stdin is not None and reader.stdout is not None
            reader.stdin.write(json.dumps({"place": asdict(place), "version": version}).encode() + b"\n")
            reader.stdin.flush()
            return json.loads(reader.stdout.readline())

        for version in (1, 2):
            expected = {name: ["torch.bfloat16", t.bfloat16().float().cpu().tolist()] for name, t in tensors.items()}
            assert ask(held.place, version) == expected
            assert ask(held.place, version + 1) == f"the memory holds version {version} by now, not {version + 1}"
            tensors = {name: tensor + 1 for name, tensor in tensors.items()}
            held = memory.hold(iter(tensors.items()), version + 1, None)  # over the one before
            assert held.place is not None
        far = Place(held.place.path, {"a": ["bfloat16", [1 << 40], 256]})
        assert "outside" in str(ask(far, 3))
        nowhere = Place("cuda:" + "00" * 64 + "+0", held.place.tensors)
        assert "cuIpcOpenMemHandle" in str(ask(nowhere, 3))
        assert reader.stdin is not None
        reader.stdin.close()
    assert reader.returncode == 0
    with pytest.raises(ValueError, match="no place in the memory of cpu"):
        read_device(held.place, 3, torch.device("cpu"))
