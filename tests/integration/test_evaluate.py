"""`evaluate` with real servers: a model directory, a run, an endpoint, conversations, and two evaluations compared."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tests.integration.processes import Starter
from tests.integration.servers import wait_until_healthy

from tandem.utils.files import read_json_lines, write_json
from tandem.utils.run_dir import RunDir

TALK = '''
from tandem.types.rollout import Task


class Talk:
    """Two turns; rewarded for what the second is shown of the first."""

    def __init__(self):
        self.train_tasks = self.eval_tasks = [Task(i, [{"role": "user", "content": "abc"}], "cba") for i in (7, 8, 9)]

    async def rollout(self, task, model):
        if task.index == 9:
            raise RuntimeError("the referee is asleep")
        first = await model.chat(task.messages)
        second = await model.chat([*task.messages, first.message, {"role": "user", "content": "abcd"}])
        return {"first": first.text == "cba", "second": second.text == "dcba"}
'''


def evaluate(starter: Starter, output: Path, *arguments: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    done = starter.run("evaluate", "--output-dir", str(output), "--max-tokens", "24", "--seq-len", "64", *arguments)
    assert done.returncode == code, done.stdout
    path = output / "results.json"
    return done.stdout, json.loads(path.read_text()) if path.exists() else {}


def test_eval_is_the_same_command() -> None:
    installed = entry_points(group="console_scripts")
    assert installed["eval"].value == installed["evaluate"].value
    program = Path(sys.executable).with_name("eval")
    done = subprocess.run([program, "--env"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("evaluate: --env")


def test_a_model_a_run_and_an_endpoint_are_asked_the_same(
    starter: Starter, warm_model: Path, tiny_model: Path, free_port: int, tmp_path: Path
) -> None:
    """The run's newest version is the warm model, its start the untrained one. The endpoint serves the warm one."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.weights.mkdir(parents=True)
    (run_dir.weights / warm_model.resolve().name).symlink_to(warm_model.resolve())
    write_json(run_dir.config / "trainer.json", {"model": {"name": str(tiny_model)}})

    common = ["--env", "reverse-text", "--num-prompts", "12", "--threads", "1"]
    _, of_model = evaluate(starter, tmp_path / "model", "--model", str(warm_model), *common)
    output, of_run = evaluate(starter, tmp_path / "of_run", "--run", str(run_dir.root), *common)
    warm, [start, newest] = of_model["results"][0], of_run["results"]
    assert warm["scores"]["reward"] > start["scores"]["reward"] + 0.1
    assert (newest["tasks"], newest["scores"]) == (warm["tasks"], warm["scores"])
    assert len(read_json_lines(tmp_path / "of_run" / "samples.jsonl")) == 24
    assert warm_model.resolve().name in output

    server = starter.start(
        *("inference", "--model.name", str(warm_model), "--port", str(free_port), "--seq-len", "64", "--threads", "1")
    )
    url = f"http://127.0.0.1:{free_port}"
    wait_until_healthy(server, url)
    asked = ["--endpoint.base-url", f"{url}/v1", "--samples", "4", "--temperature", "1", "--solved-reward", "0.2"]
    compared = ["--compare", str(tmp_path / "of_run" / "results.json")]
    output, of_endpoint = evaluate(starter, tmp_path / "endpoint", *asked, *compared, *common)
    [sampled] = of_endpoint["results"]
    assert [len(rewards) for rewards in sampled["tasks"].values()] == [4] * 12
    assert sampled["scores"]["pass@4"] >= sampled["scores"]["pass@1"] > 0
    assert "on 12 tasks: reward" in output and "    before " in output  # at temperature 1, some got worse


def test_conversations_are_played_and_failures_told_by_task(starter: Starter, warm_model: Path, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    arguments = ["--model", str(warm_model), "--env", f"{tmp_path}/talk.py:Talk", "--solved-reward", "2"]
    output, results = evaluate(starter, tmp_path / "out", *arguments)
    [result] = results["results"]
    assert set(result["tasks"]) == {"7", "8"} and result["num_failed"] == 1
    assert "the referee is asleep" in result["errors"]["9"] and "the referee is asleep" in output
    samples = read_json_lines(tmp_path / "out" / "samples.jsonl")
    assert [message["role"] for message in samples[0]["conversation"]] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --model, --run and --endpoint.base-url"),
        (["--model", "m", "--samples", "4"], "samples = 4 are all the same with temperature = 0"),
        (["--run", "{tmp}"], "is not the directory of a run"),
        (["--model", "m", "--compare", "{tmp}/nothing.json"], "is no results.json of `evaluate`"),
        (["--endpoint.base-url", "http://127.0.0.1:9"], "does not name its models"),
        (["--model", "{tmp}/nothing"], "nothing' is not a directory; give a model directory"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    starter: Starter, tmp_path: Path, arguments: list[str], message: str
) -> None:
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    output, _ = evaluate(starter, tmp_path / "out", *given, code=2)
    assert message in output and "Traceback" not in output
