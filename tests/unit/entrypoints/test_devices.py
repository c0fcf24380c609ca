"""`device = "cuda"` without a GPU is refused by every command, and before anything starts."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tandem.utils import devices
from tandem.utils.errors import UserError

ROWS = [{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}] * 8


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


COMMANDS = [
    ("rl", "trainer.device", ["--trainer.device", "cuda"]),
    ("rl", "trainer.device", ["--trainer.device", "cuda", "--dry-run"]),
    ("rl", "inference.device", ["--inference.device", "cuda", "--dry-run"]),
    ("sft", "device", ["--device", "cuda", "--data.path", "{data}"]),
    ("sft", "device", ["--device", "cuda", "--data.path", "{data}", "--dry-run"]),
    ("align", "device", ["--device", "cuda", "--data.path", "{data}"]),
    ("align", "device", ["--device", "cuda", "--data.path", "{data}", "--dry-run"]),
    ("trainer", "device", ["--device", "cuda"]),
    ("inference", "device", ["--device", "cuda"]),
    ("reward_server", "device", ["--device", "cuda"]),
]


@pytest.mark.parametrize(("command", "option", "arguments"), COMMANDS)
def test_refused(tiny_model: Path, data: str, tmp_path: Path, monkeypatch, capsys, command, option, arguments) -> None:
    monkeypatch.setattr(devices, "gpu_is_visible", lambda python: False)
    has_run = command not in ("inference", "reward_server")
    run = ["--output-dir", str(tmp_path / "run")] if has_run else []
    seq_len = ["--seq-len", "256"]
    given = [argument.format(data=data) for argument in arguments]
    monkeypatch.setattr("sys.argv", [command, "--model.name", str(tiny_model), *seq_len, *run, *given])
    if command == "rl" and "--inference.device" not in given:
        sys.argv += ["--inference.device", "cpu"]
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"tandem.entrypoints.{command}").main()
    message = f"{command.replace('_', '-')}: {option} = 'cuda', but no GPU is visible; set it to 'cpu'"
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_torch_is_asked_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(devices, "gpu_is_visible", asked.append)
    for device in ("cpu", "auto"):
        devices.refuse_missing_gpu(device, "device")
    monkeypatch.setenv(devices.SUPERVISOR_PID, "1")
    devices.refuse_missing_gpu("cuda", "device")
    assert asked == []
    monkeypatch.delenv(devices.SUPERVISOR_PID)
    with pytest.raises(UserError):
        devices.refuse_missing_gpu("cuda", "device", Path("/of/vllm"))
    assert asked == [Path("/of/vllm")]


def test_a_hidden_gpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not devices.gpu_is_visible(Path(sys.executable))
