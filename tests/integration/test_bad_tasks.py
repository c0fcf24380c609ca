"""Tasks that cannot be scored: the run goes on without them and says why; where nothing can be, it ends with that."""

import pytest

from tandem.utils.files import read_json, read_json_lines
from tandem.utils.run_dir import RunDir

# Ten tasks, of which four cannot be scored; the first one can, and is what is tried before the start.
ENVIRONMENT = """\
import time
from tandem.envs.reverse_text import ReverseText

class Mixed(ReverseText):
    async def score(self, task, completion):
        place = task.index - self.args.num_eval
        if place == 2:
            raise LookupError("row 2 is damaged")
        if place == 4:
            time.sleep(1000)
        if place == 6:
            return float("nan")
        if place == 8:
            return "0.5"
        return await super().score(task, completion)

class Hopeless(ReverseText):
    async def score(self, task, completion):
        if task.index < self.args.num_eval:
            return 1.0
        if len(task.answer) % 2:
            raise LookupError("odd")
        return None
"""
BAD = {2: "LookupError: row 2 is damaged", 4: "env.score_timeout_s = 5 s", 6: "the reward is nan", 8: "'0.5'"}
NUM_EVAL = 4


@pytest.fixture
def arguments(starter, tiny_model, free_port, tmp_path):
    """The shipped configuration on the model as it is made: what is learned is of no concern here."""
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    starter.add_to_path(tmp_path)

    def make(name: str, *extra: str, num_train: int = 10) -> list[str]:
        args = f'{{"num_train": {num_train}, "num_eval": {NUM_EVAL}, "min_length": 4, "max_length": 5}}'
        return [
            *("@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model)),
            *("--output-dir", str(tmp_path / "run"), "--inference.server.port", str(free_port)),
            *("--orchestrator.env.id", f"my_env:{name}", "--orchestrator.env.args", args),
            *("--orchestrator.env.score-timeout-s", "5", "--orchestrator.env.tries", "2"),
            *("--orchestrator.prompts-per-step", "2", "--orchestrator.group-size", "4"),
            *extra,
        ]

    return make


def trained(run_dir: RunDir, steps: range) -> list[int]:
    """The place of the task of every group that was trained on."""
    lines = [line for step in steps for line in read_json_lines(run_dir.samples(step))]
    return [line["task"] - NUM_EVAL for line in lines[::4]]


def test_bad_tasks_cost_themselves_and_stay_set_aside(starter, arguments, tmp_path):
    """Six good tasks of ten, two a step: three steps see each of them once, whatever the others do."""
    run_dir = RunDir(tmp_path / "run")
    command = arguments("Mixed", "--checkpoint.every", "3", "--trainer.scheduler.type", "constant")
    done = starter.run("rl", *command, "--max-steps", "6")
    assert done.returncode == 0, done.stdout
    good = [0, 1, 3, 5, 7, 9]
    assert sorted(trained(run_dir, range(1, 7))) == sorted(good * 2)

    set_aside = [event for event in read_json_lines(run_dir.events) if event["event"] == "task_set_aside"]
    assert {event["task"] - NUM_EVAL for event in set_aside} == BAD.keys()
    failures = read_json_lines(run_dir.failures)
    assert {line["task"] - NUM_EVAL for line in failures} == BAD.keys()
    for line in failures:
        assert BAD[line["task"] - NUM_EVAL] in line["reason"]
        assert line["where"].startswith("my_env.py:") and line["purpose"] == "train"
    damaged = next(line for line in failures if line["task"] - NUM_EVAL == 2)
    assert 'raise LookupError("row 2 is damaged")' in damaged["traceback"]
    hung = next(line for line in failures if line["task"] - NUM_EVAL == 4)
    assert "my_env.py" in hung["traceback"]
    steps = [line for line in read_json_lines(run_dir.metrics) if "tasks/set_aside" in line]
    assert steps[-1]["tasks/set_aside"] == 4
    assert steps[-1]["rollouts/failed"] == sum(line["num_rollouts"] for line in failures)

    state = read_json(run_dir.checkpoints / "step_000006" / "orchestrator.json")
    assert set(state["set_aside"]) == BAD.keys()
    resumed = starter.run("rl", *command, "--max-steps", "9", "--resume")
    assert resumed.returncode == 0, resumed.stdout
    assert sorted(trained(run_dir, range(1, 10))) == sorted(good * 3)
    assert len(read_json_lines(run_dir.failures)) == len(failures)  # nothing bad was tried again


def test_where_nothing_can_be_scored_the_run_ends_with_the_reasons_counted(starter, arguments, tmp_path):
    done = starter.run("rl", *arguments("Hopeless", "--no-orchestrator.env.check", num_train=200))
    assert done.returncode == 1
    assert "the orchestrator process ended with exit code 1" in done.stdout
    assert "rollouts of the last" in done.stdout and "(max_failed_share = 0.5 over 64 groups): " in done.stdout
    assert "× LookupError: odd (my_env.py:" in done.stdout and "× the reward is None, not a number" in done.stdout
    assert "Traceback" not in done.stdout


def test_an_environment_that_cannot_score_is_refused_before_anything_starts(starter, arguments, tmp_path):
    done = starter.run("rl", *arguments("Hopeless"))
    assert done.returncode == 2
    assert "env.id = 'my_env:Hopeless': scoring an empty completion of training task" in done.stdout
    assert "env.check = false" in done.stdout and "my_env.py:" in done.stdout
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "run" / "logs").exists()


def test_the_orchestrator_alone_refuses_it_too(starter, tiny_model, tmp_path):
    (tmp_path / "my_env.py").write_text(ENVIRONMENT)
    starter.add_to_path(tmp_path)
    options = ["--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run"), "--env.id", "my_env:Hopeless"]
    done = starter.run("orchestrator", *options)
    assert done.returncode == 2
    assert "orchestrator: env.id = 'my_env:Hopeless': scoring an empty completion of training task" in done.stdout
    assert not (tmp_path / "run").exists()
