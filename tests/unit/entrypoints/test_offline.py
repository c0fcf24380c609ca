"""What `sft` and `align` check before they start."""

import importlib
import json
import shutil
import sys
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


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("pairs", [], None),
        ("completions", ["--loss.labeled"], None),
        ("summed", [], "returned losses of shape (); return one per pair: (2,)"),
        ("constant", [], "returned losses without a gradient; compute them from streams.logprobs"),
        (
            "completions",
            [],
            "failed on a tiny example: AttributeError: 'PairStreams' object has no attribute 'logprobs'",
        ),
    ],
)
def test_a_dry_run_of_align_tries_a_loss_of_ones_own(
    name: str, extra: list[str], message: str | None, arguments, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW | {'label': True})}\n" * 8)
    (tmp_path / "align_loss_of_a_test.py").write_text(
        "from tandem.trainer.losses import Losses\n"
        "def pairs(streams): return Losses(streams.rejected_logprobs - streams.chosen_logprobs)\n"
        "def completions(streams): return Losses(-streams.logprobs * streams.is_good)\n"
        "def summed(streams): return Losses(pairs(streams).losses.sum())\n"
        "def constant(streams): return Losses(streams.reference_chosen)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    own = ["--loss.type", f"./align_loss_of_a_test.py:{name}", *extra]
    monkeypatch.setattr("sys.argv", ["align", *arguments, "--dry-run", *own])
    main = importlib.import_module("tandem.entrypoints.align").main
    if message is None:
        main()
    else:
        with pytest.raises(SystemExit) as caught:
            main()
        told = f"align: loss.type = './align_loss_of_a_test.py:{name}' {message}"
        assert caught.value.code == 2 and capsys.readouterr().err.startswith(told)
    assert (tmp_path / "run").exists() == (message is None)
    del sys.modules["align_loss_of_a_test"]


@pytest.mark.parametrize("command", ["sft", "align"])
def test_a_resumed_run_that_would_be_too_short_keeps_its_configuration(
    command, arguments, tmp_path, monkeypatch, capsys
) -> None:
    for path in ("config/" + command, "checkpoints/step_000003/manifest"):
        (tmp_path / "run" / path).parent.mkdir(parents=True)
        write_json(tmp_path / "run" / f"{path}.json", {"max_steps": 3})
    monkeypatch.setattr("sys.argv", [command, *arguments, "--resume", "--max-steps", "2"])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"tandem.entrypoints.{command}").main()
    assert caught.value.code == 2 and "is at step 3, but max_steps = 2" in capsys.readouterr().err
    assert read_json(tmp_path / "run" / "config" / f"{command}.json") == {"max_steps": 3}
