"""docs/metrics.md against the sources: it names every metric that is written, and none that is not. The runs of the
integration tests are compared with it, too."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.metrics_table import documented, undocumented
from tests.unit.serving.http.fake_engine import FakeEngine

import tandem
from tandem.config.goals import GoalConfig, GoalOptions
from tandem.serving.http.metrics import Metrics
from tandem.serving.rewards.service import GoalService
from tandem.utils.files import write_json
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

SOURCES = Path(tandem.__file__).parent
WRITERS = ("algorithms", "orchestrator", "trainer", "python", "envs", "rewards")
NAMES = [name for name in documented() if not name.startswith("tandem_")]
PROMETHEUS = {name for name in documented() if name.startswith("tandem_")}


def trees(*folders: str) -> Iterator[ast.AST]:
    for folder in folders:
        for path in sorted((SOURCES / folder).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text()))


def text_of(node: ast.AST) -> str | None:
    """A string of the sources; what is filled in is <>."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "<>" for part in node.values)
    return None


def is_written(name: str, texts: set[str]) -> bool:
    """Whether the sources hold the name, or its parts: metrics are named loss/<part>, eval/<metric> and so on."""
    if name in texts or (name.endswith("_ci95") and is_written(name.removesuffix("_ci95"), texts)):
        return True
    head, _, tail = name.partition("/")
    return bool(tail) and not texts.isdisjoint({f"{head}/", f"{head}/<>"}) and is_written(tail, texts)


def test_every_metric_of_the_page_is_written_somewhere() -> None:
    texts = {text for node in trees(*WRITERS) if (text := text_of(node)) is not None} | {"<>"}
    assert not [name for name in NAMES if not is_written(re.sub("<.*?>", "<>", name), texts)]
    assert not is_written("loss/made_up", texts) and not is_written("made_up", texts)


def test_every_metric_of_an_objective_is_on_the_page() -> None:
    made = ("mean_of", "loss_part", "maximum_of")
    tables = [node for node in trees("algorithms", "trainer") if isinstance(node, ast.Dict)]
    found = {
        text_of(key)
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if key and isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in made
    }
    assert len(found) > 20 and found - {"loss/<>"} <= set(NAMES)


def test_every_name_of_a_group_of_metrics_is_on_the_page() -> None:
    groups = {name.partition("/")[0] for name in NAMES if "/" in name and not name.startswith("<")}
    found = {
        text
        for node in trees("algorithms", "orchestrator", "trainer", "envs", "python")
        if (text := text_of(node)) is not None
        and re.fullmatch(r"[a-z_]+/[a-z_@<>/]*[a-z>]", text)
        and text.partition("/")[0] in groups
    }
    known = {re.sub("<.*?>", "<>", name) for name in NAMES} | {"loss/<>"}  # its parts have names of their own
    assert len(found) > 20
    assert not {name for name in found if name not in known and name.removeprefix("eval/") not in known}


def test_what_a_run_writes_beside_the_page_is_found(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_json(run_dir.config / "orchestrator.json", {"envs": [{"name": "a"}]})
    write_json(run_dir.config / "trainer.json", {"loss": {"type": "./mine.py:loss"}})
    write_json(run_dir.config / "align.json", {"loss": {"type": "dpo"}})
    known = {"reward/mean": 1, "a/reward/mean": 1, "a/groups": 2, "eval/a/pass@4_ci95": 1, "env/hits/total": 1}
    RunLog(run_dir, "orchestrator").metrics(1, known | {"groups/new": 1, "eval/new": 1})
    RunLog(run_dir, "trainer").metrics(1, {"users_own": 1})
    RunLog(run_dir, "align").metrics(1, {"eval/margin": 1, "eval/new": 1})
    assert undocumented(run_dir) == {"orchestrator: groups/new", "orchestrator: eval/new", "align: eval/new"}


@pytest.mark.parametrize("server", ["inference", "goals"])
def test_the_page_names_what_a_server_counts(server: str) -> None:
    if server == "goals":
        registry: CollectorRegistry = GoalService(GoalOptions(goals=[GoalConfig(type="length")])).registry
        text = generate_latest(registry).decode()
    else:
        text = Metrics(FakeEngine(cast(Any, None), lambda request, sample: [])).render().decode()
    told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    ours = {name for name in told if name.startswith("tandem_") and not name.endswith("_created")}
    assert ours == {name for name in PROMETHEUS if name.startswith("tandem_goal_") == (server == "goals")}
