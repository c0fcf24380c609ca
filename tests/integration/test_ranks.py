"""Several ranks train one model: the update is that of one, however it is divided; one that fails ends all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.patience import PATIENCE

WORKER = Path(__file__).with_name("rank_worker.py")
BOUNDS = (1000, 60, 20)


def run_ranks(world_size: int, model: Path, folder: Path, ways: list[dict]) -> list[dict[str, torch.Tensor]]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command = command if world_size > 1 else [sys.executable]
    arguments = [str(WORKER), str(model), str(folder), json.dumps(ways)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *arguments], check=True, timeout=240 * PATIENCE, env=environment, capture_output=True, text=True
    )
    return [load_file(folder / f"{number}.safetensors") for number in range(len(ways))]


STRATEGIES = ("ddp", "zero2", "zero3", "zero3_offload")
PLAIN = [{"bound": bound, "parallel": {}} for bound in BOUNDS]
SHARDED = [{"bound": bound, "parallel": {"strategy": strategy}} for strategy in STRATEGIES for bound in BOUNDS] + [
    {"bound": 60, "parallel": {"strategy": "zero3", "gradient_checkpointing": checkpointing}}
    for checkpointing in (2, "elementwise", "mlp")
]
ADAMW = {"adamw": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}}
WITH_ADAMW = [{"bound": 60, "parallel": {"strategy": strategy}} | ADAMW for strategy in STRATEGIES] + [
    {"bound": 60, "parallel": {"strategy": "zero3", "optimizer_offload": True}} | ADAMW
]
PASSES = [{"passes": "bfloat16", "parallel": {"strategy": strategy}} for strategy in STRATEGIES[:3]]


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """To start ranks takes longer than what they do: those of one and of two do everything they are asked for here."""
    ways = [*PLAIN, {"bound": 1000, "parallel": {}} | ADAMW, {"passes": "bfloat16", "parallel": {}}]
    return run_ranks(1, tiny_model, tmp_path_factory.mktemp("ranks") / "one", ways)


@pytest.fixture(scope="module")
def of_two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    return run_ranks(2, tiny_model, tmp_path_factory.mktemp("ranks") / "two", SHARDED + WITH_ADAMW + PASSES)


def test_the_update_does_not_depend_on_ranks_micro_batches_or_sharding(
    alone: list[dict[str, torch.Tensor]], of_two: list[dict[str, torch.Tensor]], tiny_model: Path, tmp_path: Path
) -> None:
    # With three there are ranks without a micro-batch of their own, and some with fewer than others: they need dummies.
    several = [way for way in SHARDED if way["bound"] in (max(BOUNDS), min(BOUNDS))]
    of_three = run_ranks(3, tiny_model, tmp_path / "three", several + WITH_ADAMW)
    start = load_file(tiny_model / "model.safetensors")
    by_sgd = [*alone[1 : len(PLAIN)], *of_two[: len(SHARDED)], *of_three[: len(several)]]
    by_adamw = [*of_two[len(SHARDED) : -len(PASSES)], *of_three[len(several) :]]
    assert len(by_adamw) == 2 * len(WITH_ADAMW)
    for expected, others, tolerance in ((alone[0], by_sgd, 1e-6), (alone[len(PLAIN)], by_adamw, 2e-5)):
        assert max(float((expected[name] - start[name]).abs().max()) for name in start) > 1e-3
        for found in others:
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], atol=tolerance, rtol=0, msg=name)


def test_every_pass_says_the_same_to_the_bit_however_the_model_is_divided(
    alone: list[dict[str, torch.Tensor]], of_two: list[dict[str, torch.Tensor]]
) -> None:
    expected = alone[-1]["learning"]
    for found in [alone[-1], *of_two[-len(PASSES) :]]:
        assert set(found) == {"learning", "recomputed", "reference"}
        assert all(torch.equal(logprobs, expected) for logprobs in found.values())


@pytest.mark.parametrize("failure", ["dies", "hangs"])
def test_a_rank_that_fails_is_named_and_ends_the_job(failure: str, tiny_model: Path, tmp_path: Path) -> None:
    """A rank that dies is noticed at once; for one that hangs the others wait a while."""
    ways = [{"bound": 60, "parallel": {"strategy": "zero3"}, "failure": failure}]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_ranks(2, tiny_model, tmp_path / "failed", ways)
    message = caught.value.stderr
    if failure == "hangs":
        assert "RankLost: rank 0 waited in vain in step 2 (training) for: rank 1 on" in message
    else:
        assert "Signal 9 (SIGKILL) received by PID" in message
        assert "local_rank: 1" in message or "RankLost" in message
