"""The trainer's loop on batches made by hand: batches in, weights out."""

from pathlib import Path

import pytest
import torch

from tandem.commands.trainer import TrainerConfig
from tandem.data.batch_files import RolloutWriter
from tandem.data.packing import pack
from tandem.models.hf import load_decoder, named_tensors
from tandem.trainer.model.optimizer import set_lr
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl.train import load_policy, train_rl
from tandem.types.rollout import TrainBatch
from tandem.utils.errors import UserError
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import verify_manifest

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def settings_of_torch():
    """The loop sets threads and determinism for its process; here the process is everybody's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def write_batches(root: Path, make_samples, steps: range) -> None:
    root.mkdir(exist_ok=True)
    writer = RolloutWriter(root / "rollouts", keep=10)
    for step in steps:
        writer.write(TrainBatch(step, 1.0, pack(make_samples(step))))


def config(model: Path, root: Path, **options: object) -> TrainerConfig:
    tree = {
        "model": {"name": model},
        "output_dir": root,
        "rollout_timeout_s": 5,
        "device": "cpu",
        "threads": 1,
        "deterministic": True,
        "optimizer": {"lr": 1e-3},
        "scheduler": {"type": "linear", "warmup_steps": 1},
        "keep_weights": 10,
        "seq_len": 30,
        "tokens_per_microbatch": 30,
    }
    return TrainerConfig.model_validate(tree | options)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return named_tensors(load_decoder(path, torch.float32, CPU))


@pytest.mark.parametrize("critic_lr", [None, 0.25])
def test_a_critic_has_the_learning_rate_that_was_asked_for(tiny_model: Path, tmp_path: Path, critic_lr) -> None:
    loss = {"type": "ppo", "ppo": {"critic_lr": critic_lr}}
    trained = load_policy(config(tiny_model, tmp_path, loss=loss), Ranks.single(CPU), batch_invariant=False)
    head = trained.model.value_head
    assert head is not None and (head.weight == 0).all()
    head.weight.grad = torch.ones_like(head.weight)
    set_lr(trained.optimizer, 1e-3)
    trained.optimizer.step()
    torch.testing.assert_close(head.weight.detach(), torch.full_like(head.weight, -(critic_lr or 1e-3)))


def test_only_ppo_has_a_critic(tiny_model: Path, tmp_path: Path) -> None:
    loss = {"type": "grpo", "ppo": {"critic_lr": 0.25}}
    trained = load_policy(config(tiny_model, tmp_path, loss=loss), Ranks.single(CPU), batch_invariant=False)
    assert trained.model.value_head is None


def test_every_step_publishes_a_whole_model(tiny_model: Path, make_samples, tmp_path: Path) -> None:
    write_batches(tmp_path, make_samples, range(1, 4))
    train_rl(config(tiny_model, tmp_path, max_steps=3, keep_weights=2))
    weights = tmp_path / "weights"
    assert sorted(path.name for path in weights.glob("step_*")) == ["step_000002", "step_000003"]
    for version in (2, 3):
        verify_manifest(weights / f"step_{version:06d}", version)
    assert (weights / "latest").resolve() == (weights / "step_000003").resolve()
    before, after = tensors(tiny_model), tensors(weights / "step_000003")
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert (weights / "step_000003" / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert [(line["process"], line["step"]) for line in lines] == [("trainer", 1), ("trainer", 2), ("trainer", 3)]
    assert [line["lr"] for line in lines] == pytest.approx([1e-3, 1e-3, 5e-4])
    assert read_json_lines(tmp_path / "events.jsonl")[-1]["event"] == "finished"


def test_weights_are_published_when_a_sync_is_due_and_after_the_last_step(
    tiny_model: Path, make_samples, tmp_path: Path
) -> None:
    write_batches(tmp_path, make_samples, range(1, 6))
    train_rl(config(tiny_model, tmp_path, max_steps=5, sync_every=2))
    published = sorted(path.name for path in (tmp_path / "weights").glob("step_*"))
    assert published == ["step_000002", "step_000004", "step_000005"]


def test_the_whole_model_is_published_without_the_adapters_module(
    tiny_model: Path, make_samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(decoder: object) -> None:
        raise AssertionError("no adapter is trained")

    monkeypatch.setattr("tandem.models.lora_training.merged_tensors", refuse)
    write_batches(tmp_path, make_samples, range(1, 2))
    train_rl(config(tiny_model, tmp_path, max_steps=1))
    verify_manifest(tmp_path / "weights" / "step_000001", 1)


def test_a_resumed_run_ends_with_the_same_weights(tiny_model: Path, make_samples, tmp_path: Path) -> None:
    schedule = {"type": "constant"}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for root in (whole, cut):
        write_batches(root, make_samples, range(1, 5))
    train_rl(config(tiny_model, whole, max_steps=4, scheduler=schedule))
    train_rl(config(tiny_model, cut, max_steps=2, scheduler=schedule, checkpoint={"every": 2}))
    train_rl(config(tiny_model, cut, max_steps=4, scheduler=schedule, resume=True))
    expected = tensors(whole / "weights" / "step_000004")
    for name, tensor in tensors(cut / "weights" / "step_000004").items():
        assert torch.equal(tensor, expected[name]), name


def test_weights_of_another_run_are_refused(tiny_model: Path, make_samples, tmp_path: Path) -> None:
    write_batches(tmp_path, make_samples, range(1, 2))
    train_rl(config(tiny_model, tmp_path, max_steps=1))
    with pytest.raises(UserError, match="holds weights up to step 1, but this run starts after step 0"):
        train_rl(config(tiny_model, tmp_path, max_steps=1))


def test_an_orchestrator_that_does_not_come_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the orchestrator's batch .*step_000001"):
        train_rl(config(tiny_model, tmp_path, max_steps=1, rollout_timeout_s=0.1))
