"""`evaluate` before it starts anything, and what it leaves."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.evaluate import EvaluateConfig
from tandem.envs.config import EnvConfig
from tandem.launch.local.server import serving
from tandem.orchestrator.evaluation.command import evaluate_all, refuse_missing_model
from tandem.orchestrator.evaluation.endpoint import Answer
from tandem.orchestrator.evaluation.evaluate import Outcome, append_samples
from tandem.utils.errors import UserError
from tandem.utils.files import read_json, read_json_lines


def test_a_model_that_is_none_is_refused_by_the_name_of_the_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model = '.*/nothing' is not a directory; give a model directory"):
        refuse_missing_model(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"^model = '.*' holds no model: there is no config\.json in it"):
        refuse_missing_model(tmp_path)


def test_a_name_on_the_hub_is_left_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refuse_missing_model(Path("owner/model"))
    (tmp_path / "models").mkdir()
    with pytest.raises(UserError, match="is not a directory"):
        refuse_missing_model(Path("models/misspelt"))


class FakeEndpoint:
    """Says the same to everything; nothing: it fails."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def ask(self, messages: list[Any], *, n: int, seed: int) -> list[Answer]:
        if not self.text:
            raise RuntimeError("out of order")
        return [Answer({"role": "assistant", "content": self.text}, "stop")] * n


def test_samples_that_have_no_room_are_told_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        append_samples(path, "model", [Outcome(0, [1.0], samples=[{"reward": 1.0}])])


def test_no_room_for_the_files_of_the_server_is_refused_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / f".inference.json.{os.getpid()}.tmp").symlink_to("/dev/full")

    async def start() -> None:
        async with serving({}, tmp_path):
            pass

    with pytest.raises(UserError, match=r"cannot be written: No space left on device; free some space, or choose"):
        asyncio.run(start())


def test_earlier_results_are_kept_under_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three evaluations of two versions each into one folder, the second of which gives no results."""
    config = EvaluateConfig(
        run=tmp_path / "run", env=EnvConfig(id="reverse-text"), num_prompts=1, output_dir=tmp_path / "out"
    )

    def evaluate(text: str) -> None:
        async def targets(*_: Any) -> AsyncIterator[tuple[str, FakeEndpoint]]:
            for version in ("old", "new"):
                yield version, FakeEndpoint(text)

        monkeypatch.setattr("tandem.orchestrator.evaluation.command.targets", targets)
        asyncio.run(evaluate_all(config, serving))

    evaluate("first")
    first = read_json(tmp_path / "out" / "results.json")
    with pytest.raises(UserError, match=r"all 1 tasks failed on old: .*out of order"):
        evaluate("")
    assert read_json(tmp_path / "out" / "results.json") == first
    evaluate("second")
    evaluate("third")
    texts = {
        path.name: [line["completion"] for line in read_json_lines(path)] for path in tmp_path.glob("out/samples.*")
    }
    assert texts == {
        "samples.1.jsonl": ["first"] * 2,
        "samples.2.jsonl": ["second"] * 2,
        "samples.jsonl": ["third"] * 2,
    }
    assert read_json(tmp_path / "out" / "results.1.json") == first
    assert len(list(tmp_path.glob("out/results.*"))) == 3


def test_those_who_wait_are_told_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second task is answered when something was said of the first."""
    told: list[str] = []

    class SlowEndpoint(FakeEndpoint):
        num_asked = 0

        async def ask(self, messages: list[Any], *, n: int, seed: int) -> list[Answer]:
            self.num_asked += 1
            while self.num_asked == 2 and not told:
                told.extend(line for line in capsys.readouterr().err.splitlines() if "1 of 2" in line)
                await asyncio.sleep(0.001)
            return await super().ask(messages, n=n, seed=seed)

    async def targets(*_: Any) -> AsyncIterator[tuple[str, FakeEndpoint]]:
        yield "new", SlowEndpoint("text")

    monkeypatch.setattr("tandem.orchestrator.evaluation.command.targets", targets)
    monkeypatch.setattr("tandem.orchestrator.evaluation.evaluate.EVERY_S", 0.01)
    env = EnvConfig(id="reverse-text")
    asyncio.run(
        evaluate_all(
            EvaluateConfig(run=tmp_path / "run", env=env, num_prompts=2, concurrency=1, output_dir=tmp_path / "out"),
            serving,
        )
    )
    assert told[0] == "evaluate: 1 of 2 tasks done by new"
