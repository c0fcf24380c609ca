"""A checkpoint is the same whatever number of ranks saves or loads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.trainer.checkpoints.checkpoint_ranks import everything, load, make_checkpointer, update

from tandem.trainer.build import TrainState
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.files import read_json, read_json_lines
from tandem.utils.manifest import verify_manifest

SINGLE = Ranks.single(torch.device("cpu"))


def run_ranks(count: int, *arguments: str, script: str = "checkpoint_ranks.py") -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    done = subprocess.run(
        [*launcher, str(Path(__file__).with_name(script)), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Three ranks divide nothing evenly: some own a row more than others, or none.
@pytest.mark.parametrize(("count", "strategies"), [(3, ["zero3"]), (2, ["ddp", "zero2+offload"])])
def test_from_one_rank_to_several_and_back(tiny_model: Path, tmp_path: Path, count: int, strategies: list[str]) -> None:
    one = tmp_path / "one"
    for name in ("one", *strategies):
        (tmp_path / name).mkdir()
    first = load(tiny_model, "ddp", SINGLE)
    for step in (1, 2):
        update(first, step)
    saver = make_checkpointer(first, one, SINGLE)
    torch.manual_seed(5)
    saver.save(2, {"row": 5})
    saver.close()
    expected_draw = torch.rand(2)

    run_ranks(count, str(tiny_model), str(one), str(tmp_path), *strategies)
    for strategy in strategies:
        check(tiny_model, tmp_path / strategy, first, expected_draw, count)


def check(tiny_model: Path, several: Path, first: TrainState, expected_draw: torch.Tensor, count: int) -> None:
    """What the ranks loaded is `first`, and what they saved can be loaded by one."""
    assert_same(load_file(several / "loaded.safetensors"), everything(first))
    draws = [load_file(several / f"rank_{rank}.safetensors") for rank in range(count)]
    assert torch.equal(draws[0]["drawn"], expected_draw)
    assert not torch.equal(draws[1]["drawn"], expected_draw)  # it had none saved, and has one of its own

    folder = several / "checkpoints" / "step_000003"
    verify_manifest(folder, 3)
    files = set(read_json(folder / "manifest.json")["files"])
    assert files == {"trainer/state.json"} | {
        f"trainer/{kind}_{rank:05d}.{ending}"
        for rank in range(count)
        for kind, ending in (("shard", "safetensors"), ("random", "json"))
    }
    sizes = [(folder / "trainer" / f"shard_{rank:05d}.safetensors").stat().st_size for rank in range(count)]
    assert max(sizes) < 1.5 * min(sizes)  # the work is shared, also where all ranks hold everything

    second = load(tiny_model, "ddp", SINGLE)
    assert make_checkpointer(second, several, SINGLE).load(3) == {"row": 6}
    assert_same(everything(second), load_file(several / "step_3.safetensors"))
    assert torch.equal(torch.rand(2), draws[0]["next"])
    # Moments and weights go on alike: the next step gives what the ranks saved after it.
    update(second, 4)
    third = load(tiny_model, "ddp", SINGLE)
    assert make_checkpointer(third, several, SINGLE).load(4) == {"row": 7}
    assert_same(everything(third), everything(second))


def test_what_fails_on_one_rank_fails_on_all_and_is_made_good(tiny_model: Path, tmp_path: Path) -> None:
    """None waits for the other; they agree on the step after which it is tried again."""
    run_ranks(2, str(tiny_model), str(tmp_path), script="failing_ranks.py")
    events = [(event["event"], event["step"]) for event in read_json_lines(tmp_path / "events.jsonl")]
    (failed, first), (saved, second) = events
    assert (failed, first, saved) == ("checkpoint_failed", 10, "checkpoint") and second > 10
    verify_manifest(tmp_path / "checkpoints" / f"step_{second:06d}", second)
    told = "No space left on device; another rank could not write its part; see the first error in the log"
    assert read_json_lines(tmp_path / "events.jsonl")[0]["error"] == f"OSError: [Errno 28] {told}"
