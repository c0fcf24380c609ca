"""A run that was saved and loaded goes on bit for bit."""

from pathlib import Path

import pytest
import torch

from tandem.config.shared import CheckpointConfig
from tandem.data.packing import pack
from tandem.trainer.checkpoint import Checkpointer
from tandem.trainer.step import Stepper
from tandem.transport.weights.manifest import verify_manifest
from tandem.utils.run_dir import RunDir


def checkpointer(stepper: Stepper, root: Path, **options: int) -> Checkpointer:
    return Checkpointer(RunDir(root), CheckpointConfig.model_validate(options), stepper.model, stepper.optimizer)


def train(stepper: Stepper, make_samples, steps: range) -> list[dict[str, float]]:
    stats = []
    for step in steps:
        batch = pack(make_samples(step), 30)
        stats.append(stepper.step(batch, sum(part.num_loss_tokens for part in batch)))
    return stats


def test_an_interrupted_run_equals_one_that_was_not(make_stepper, make_samples, tmp_path: Path) -> None:
    whole = make_stepper()
    expected = train(whole, make_samples, range(1, 5))

    first = make_stepper()
    train(first, make_samples, range(1, 3))
    torch.manual_seed(17)
    checkpointer(first, tmp_path).save(2)
    drawn = torch.rand(3)

    second = make_stepper()
    torch.manual_seed(99)
    checkpointer(second, tmp_path).load(2)
    assert torch.equal(torch.rand(3), drawn)
    assert train(second, make_samples, range(3, 5)) == expected[2:]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, dict(second.model.named_parameters())[name]), name


def test_without_the_optimizer_state_the_run_would_differ(make_stepper, make_samples, tmp_path: Path) -> None:
    """So that the test above is known to notice."""
    whole = make_stepper()
    expected = train(whole, make_samples, range(1, 4))
    first = make_stepper()
    train(first, make_samples, range(1, 3))
    checkpointer(first, tmp_path).save(2)
    second = make_stepper()
    checkpointer(second, tmp_path)._load_model(tmp_path / "checkpoints" / "step_000002" / "trainer")
    train(second, make_samples, range(3, 4))
    same = [torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True)]
    assert expected and not all(same)


def test_saved_when_due_and_only_the_newest_are_kept(make_stepper, make_samples, tmp_path: Path) -> None:
    stepper = make_stepper()
    train(stepper, make_samples, range(1, 2))
    saver = checkpointer(stepper, tmp_path, every=2, keep_last=2)
    for step in range(1, 8):
        saver.maybe_save(step)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000004", "step_000006"]
    for step in (4, 6):
        verify_manifest(tmp_path / "checkpoints" / f"step_{step:06d}", step)


def test_the_manifest_covers_what_the_orchestrator_left(make_stepper, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step_000003"
    folder.mkdir(parents=True)
    (folder / "orchestrator.json").write_text("{}")
    checkpointer(make_stepper(), tmp_path).save(3)
    verify_manifest(folder, 3)
    (folder / "orchestrator.json").write_text("[]")
    with pytest.raises(ValueError, match=r"orchestrator\.json does not match its checksum"):
        verify_manifest(folder, 3)


def test_never_due_without_every(make_stepper, tmp_path: Path) -> None:
    checkpointer(make_stepper(), tmp_path).maybe_save(100)
    assert not (tmp_path / "checkpoints").exists()
