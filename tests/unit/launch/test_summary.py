"""The last words of a run, from a metrics file written by hand."""

import io
import shlex
from pathlib import Path

from tandem.launch.summary import print_summary
from tandem.utils.console import Console
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


def summary(root: Path) -> str:
    output = io.StringIO()
    print_summary(Console(file=output, width=400), RunDir(root), seconds=12.4)
    return output.getvalue()


def log_step(log: RunLog, step: int, reward: float, staleness: int = 0) -> None:
    log.metrics(step, {"reward/mean": reward, "staleness/max": staleness, "completion_tokens/total": 1000})


def test_before_and_after_the_curve_and_where_everything_is(tmp_path: Path) -> None:
    log = RunLog(RunDir(tmp_path), "orchestrator")
    log.metrics(0, {"eval/reward": 0.25})
    for step, reward in ((1, 0.0), (2, 0.5), (3, 1.0)):
        log_step(log, step, reward, staleness=step % 2)
        RunLog(RunDir(tmp_path), "trainer").metrics(step, {"loss": 1.0})
    log.metrics(3, {"eval/reward": 0.875})
    text = summary(tmp_path)
    assert "Held-out reward 0.250 before, 0.875 after 3 steps" in text
    assert "3 steps in 12 s, 3,000 sampled tokens, staleness at most 1" in text
    rows = [line for line in text.splitlines() if "┤" in line]
    assert len(rows) == 6
    assert rows[0].startswith("  1.00 ┤  █") and rows[-1].startswith("  0.00 ┤ ██")
    assert f"Run directory   {tmp_path}\n" in text
    assert f"Trained model   {tmp_path}/weights/latest\n" in text
    assert f"Rollouts        {tmp_path}/samples/step_000003.jsonl\n" in text
    assert f"/inference --model.name {tmp_path}/weights/latest" in text


def test_steps_that_a_resumed_run_made_again_count_once(tmp_path: Path) -> None:
    """Steps 1 to 3, killed; resumed after 1: 2 and 3 again, then 4."""
    log = RunLog(RunDir(tmp_path), "orchestrator")
    for step, reward in ((1, 0.0), (2, 0.1), (3, 0.1), (2, 0.5), (3, 0.5), (4, 1.0)):
        log_step(log, step, reward)
    text = summary(tmp_path)
    assert "4 steps in 12 s" in text
    assert "samples/step_000004.jsonl" in text


def test_what_was_found_is_told_before_where_the_model_is(tmp_path: Path) -> None:
    """Truncated up to the sixth step; from the fifth on there are no rewards."""
    for step in range(1, 9):
        rewards = {"reward/min": 0, "reward/max": 0 if step >= 5 else 1, "completions/truncated": float(step <= 6)}
        RunLog(RunDir(tmp_path), "orchestrator").metrics(
            step, rewards | {"reward/mean": 0, "groups/without_signal": float(step >= 5)}
        )
    text = summary(tmp_path)
    told = (
        "Since step 7: all groups have equal rewards, nothing is learned: every reward is 0.\nRead samples/: "
        "if right answers are there, the reward function misses them;"
    )
    assert told in text and text.index(told) < text.index("Trained model")
    assert "Found earlier, and over at the end: all truncated at step 3\n" in text


def test_a_healthy_run_has_nothing_found(tmp_path: Path) -> None:
    log = RunLog(RunDir(tmp_path), "orchestrator")
    for step in range(1, 9):
        log_step(log, step, step / 8)
    assert "Since" not in summary(tmp_path) and "Found" not in summary(tmp_path)


def test_a_run_without_metrics(tmp_path: Path) -> None:
    text = summary(tmp_path)
    assert "0 steps in 12 s" in text and "Held-out" not in text


def test_after_training_an_adapter_the_merged_model_is_what_to_talk_to(tmp_path: Path) -> None:
    (tmp_path / "merged" / "latest").mkdir(parents=True)
    assert f"/inference --model.name {tmp_path}/merged/latest" in summary(tmp_path)


def test_paths_are_told_as_they_are_and_the_command_can_be_pasted(tmp_path: Path) -> None:
    root = tmp_path / "my runs [v2]"
    root.mkdir()
    log_step(RunLog(RunDir(root), "orchestrator"), 1, 0.0)
    text = summary(root)
    assert f"Trained model   {root}/weights/latest\n" in text
    assert shlex.split(text.partition("Talk to it:")[2])[1:] == ["--model.name", f"{root}/weights/latest"]
