"""Which models `evaluate` asks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.evaluate import EvaluateConfig
from tandem.launch.provenance import write_run_config
from tandem.orchestrator.evaluation.models import load_version, models_of, template_of
from tandem.utils.errors import UserError
from tandem.utils.http import HttpClient, Reply
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_dir import RunDir, step_name


def store_run(root: Path, model: str) -> Path:
    run_dir = RunDir(root)
    run_dir.config.mkdir(parents=True)
    write_run_config(run_dir.config, {"trainer": {"model": {"name": model}}})
    (run_dir.weights / step_name(3)).mkdir(parents=True)
    (run_dir.weights / step_name(3) / MANIFEST).write_text("{}")
    return root


def test_the_model_of_a_run_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started_in, elsewhere = tmp_path / "started in", tmp_path / "elsewhere"
    for folder in (started_in, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(started_in)
    run = store_run(tmp_path / "run", "outputs/sft/weights/latest")
    monkeypatch.chdir(elsewhere)
    base, versions = models_of(EvaluateConfig(run=run))
    assert base == started_in / "outputs/sft/weights/latest"
    assert versions == [(0, base), (3, run / "weights" / step_name(3))]


def test_a_run_is_evaluated_with_its_chat_template(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model = {"name": "m", "chat_template": "own.jinja"}
    write_run_config(RunDir(run).config, {"trainer": {"model": model}})
    assert template_of(EvaluateConfig(run=run)) == str(Path.cwd() / "own.jinja")
    assert template_of(EvaluateConfig(run=run, chat_template=Path("other.jinja"))) == "other.jinja"
    assert template_of(EvaluateConfig(model=Path("m"))) is None
    write_run_config(RunDir(run).config, {"trainer": {"model": {"name": "m"}}})
    assert template_of(EvaluateConfig(run=run)) is None


def test_a_run_whose_command_is_damaged_is_refused(tmp_path: Path) -> None:
    run = store_run(tmp_path / "run", "model")
    (run / "config" / "command.txt").write_text("cd 'half of a path")
    with pytest.raises(UserError, match="which says where the run was started, is damaged: No closing quotation"):
        models_of(EvaluateConfig(run=run))


class Refusing(HttpClient):
    """A server that loads nothing."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", timeout_s=1)

    async def send(self, method: str, route: str, body: Any = None, timeout_s: float | None = None) -> Reply:
        return Reply(400, {}, b"no such weights")


def test_a_version_that_a_running_run_has_deleted_meanwhile_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / step_name(3)
    assert asyncio.run(load_version(Refusing(), 3, path)) is False
    path.mkdir()
    with pytest.raises(UserError, match=r"step_000003 cannot be served: "):
        asyncio.run(load_version(Refusing(), 3, path))
