"""Supervised fine-tuning learns what it is shown."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from tandem.commands.sft import SFTConfig
from tandem.data.conversations import encode_sft_row
from tandem.data.dataset import load_dataset
from tandem.data.packing import pack
from tandem.data.tokenizer import Tokenizer
from tandem.trainer.model.step import Predictions
from tandem.trainer.offline.sft import ProgressLine, sft_loss, train_sft
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import verify_manifest
from tandem.utils.metrics import MetricsForwarder
from tandem.utils.run_dir import RunDir


def test_the_loss_is_the_sum_of_negative_log_probs(make_samples) -> None:
    output = sft_loss(pack(make_samples(0)), Predictions(torch.tensor([-0.5, -2.0]), torch.zeros(2)))
    assert (output.loss.item(), output.metrics) == (2.5, {})


def test_the_loss_falls_and_the_model_is_published(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [("ab", "ba"), ("xyz", "zyx"), ("hello", "olleh")]
    path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in rows))
    config = SFTConfig.model_validate(
        {
            "model": {"name": tiny_model},
            "data": {"path": str(path)},
            "output_dir": tmp_path,
            "max_steps": 12,
            "batch_size": 3,
            "device": "cpu",
            "optimizer": {"lr": 5e-3},
        }
    )
    encode = partial(encode_sft_row, tokenizer=Tokenizer(tiny_model))
    data = load_dataset(config.data, encode, seq_len=config.seq_len, seed=config.seed)
    train_sft(config, data, MetricsForwarder(RunDir(tmp_path)))
    losses = [line["loss"] for line in read_json_lines(tmp_path / "metrics.jsonl")]
    assert losses[0] == pytest.approx(4.6, abs=0.3)  # ln 102: nothing is known
    assert losses[-1] < 2.0
    verify_manifest((tmp_path / "weights" / "latest").resolve(), 12)


def test_every_evaluation_is_logged_and_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    progress = ProgressLine(40, enabled=True)
    with caplog.at_level(logging.INFO):
        for step in range(1, 41):
            progress.show(step, f"loss {step}", {"eval/loss": 10 / step} if step % 10 == 0 else {})
        progress.close(Path("weights"), [])
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [
        "step 1 of 40: loss 1",  # the next would come seconds later
        *(f"step {step} of 40: loss {step}, eval loss {10 / step:.4f}" for step in (10, 20, 30, 40)),
        "eval loss 1.0000 after step 10, 0.2500 after step 40",
        "the model is in weights",
    ]
