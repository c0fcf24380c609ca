"""Supervised fine-tuning learns what it is shown."""

from pathlib import Path

import pytest
import torch

from tandem.config.sft import SFTConfig
from tandem.data.conversations import tokenize_conversation
from tandem.data.packing import pack
from tandem.data.tokenizer import Tokenizer
from tandem.trainer.step import Predictions
from tandem.trainer.train_sft import sft_loss, train_sft
from tandem.transport.weights.manifest import verify_manifest
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import MetricsForwarder


def test_the_loss_is_the_sum_of_negative_log_probs(make_samples) -> None:
    (batch,) = pack(make_samples(0), 1000)
    loss, metrics = sft_loss(batch, Predictions(torch.tensor([-0.5, -2.0]), torch.zeros(2)))
    assert (loss.item(), metrics) == (2.5, {})


def test_the_loss_falls_and_the_model_is_published(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    rows = [("ab", "ba"), ("xyz", "zyx"), ("hello", "olleh")]
    samples = [
        tokenize_conversation([{"role": "user", "content": a}, {"role": "assistant", "content": b}], tokenizer)
        for a, b in rows
    ]
    config = SFTConfig.model_validate(
        {
            "model": {"name": tiny_model},
            "data": {"path": "unused.jsonl"},
            "output_dir": tmp_path,
            "max_steps": 12,
            "batch_size": 3,
            "device": "cpu",
            "optimizer": {"lr": 5e-3},
        }
    )
    train_sft(config, samples, MetricsForwarder(tmp_path / "metrics.jsonl", []))
    losses = [line["loss"] for line in read_json_lines(tmp_path / "metrics.jsonl")]
    assert losses[0] == pytest.approx(4.6, abs=0.3)  # ln 102: nothing is known
    assert losses[-1] < 2.0
    verify_manifest((tmp_path / "weights" / "latest").resolve(), 12)
