"""What `sft` and `align` check before they start."""

import importlib
import json
import shutil
from pathlib import Path

import pytest

from tandem.utils.files import read_json, write_json

ROW = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}


@pytest.fixture
def arguments(tiny_model: Path, tmp_path: Path) -> list[str]:
    """The model has 512 positions."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(ROW)}\n" for _ in range(8)))
    return ["--model.name", str(tiny_model), "--data.path", str(data), "--output-dir", str(tmp_path / "run")]


@pytest.mark.parametrize("command", ["sft", "align"])
def test_a_length_beyond_the_positions_is_refused(command, arguments, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", [command, *arguments, "--seq-len", "600"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"tandem.entrypoints.{command}").main()
    message = f"{command}: seq_len = 600 is above max_position_embeddings = 512 in the model's config.json"
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["sft", "align"])
def test_the_default_length_gives_way(command, arguments, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", [command, *arguments, "--dry-run"])
    importlib.import_module(f"tandem.entrypoints.{command}").main()
    assert read_json(tmp_path / "run" / "dry_run" / f"{command}.json")["seq_len"] == 512


@pytest.mark.parametrize("command", ["sft", "align"])
def test_a_token_beyond_the_embedding_is_refused(command, arguments, tiny_model, tmp_path, monkeypatch, capsys) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    write_json(model / "config.json", read_json(model / "config.json") | {"vocab_size": 5})
    monkeypatch.setattr("sys.argv", [command, *arguments, "--model.name", str(model)])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"tandem.entrypoints.{command}").main()
    assert caught.value.code == 2 and "is beyond vocab_size = 5 in the model's config.json" in capsys.readouterr().err
