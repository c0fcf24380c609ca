"""How long offline training lasts: in steps or in epochs."""

import pytest

from tandem.commands.sft import SFTConfig
from tandem.config.base import load_config

BASE = ("--model.name", "m", "--data.path", "rows.jsonl")


def load(*arguments: str) -> SFTConfig:
    return load_config(SFTConfig, [*BASE, *arguments])


@pytest.mark.parametrize(
    ("epochs", "batch_size", "num_rows", "steps"),
    [("1", "10", 100, 10), ("3", "8", 100, 38), ("0.5", "10", 100, 5), ("0.001", "10", 100, 1), ("2", "64", 10, 1)],
)
def test_epochs_become_steps(epochs: str, batch_size: str, num_rows: int, steps: int) -> None:
    config = load("--epochs", epochs, "--batch-size", batch_size).for_rows(num_rows)
    assert (config.max_steps, config.epochs) == (steps, None)


def test_without_epochs_steps_are_what_they_were() -> None:
    assert load().for_rows(7).max_steps == 100
    assert load("--max-steps", "3").for_rows(None).max_steps == 3


def test_a_flag_wins_over_files_whichever_way_it_counts(tmp_path) -> None:
    steps, epochs = tmp_path / "steps.toml", tmp_path / "epochs.toml"
    steps.write_text("max_steps = 160\n")
    epochs.write_text("epochs = 2\n")
    assert load("@", str(steps), "--epochs", "3").epochs == 3
    config = load("@", str(epochs), "--max-steps", "9")
    assert (config.max_steps, config.epochs) == (9, None)


def test_both_are_refused(refusal, tmp_path) -> None:
    message = refusal(*BASE, "--max-steps", "10", "--epochs", "3", cls=SFTConfig)
    assert "max_steps = 10 and epochs = 3 contradict each other; give one of them" in message


def test_epochs_of_rows_that_nobody_counts_are_refused(refusal) -> None:
    message = refusal(*BASE, "--epochs", "3", "--data.streaming", cls=SFTConfig)
    assert "epochs = 3 counts rows, and data.streaming does not; give max_steps" in message
