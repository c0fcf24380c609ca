"""scripts/tmux.sh in a tmux server of its own."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.integration.processes import wait_until

ROOT = Path(__file__).parents[2]
Tmux = Callable[..., str]
Script = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None and "TANDEM_TEST_ALL" not in os.environ, reason="needs tmux: apt-get install tmux"
)


@pytest.fixture
def server() -> Iterator[str]:
    name = f"tandem-test-{uuid.uuid4().hex[:8]}"
    yield name
    subprocess.run(["tmux", "-L", name, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def tmux(server: str) -> Tmux:
    def run(*arguments: str) -> str:
        done = subprocess.run(["tmux", "-L", server, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    return run


@pytest.fixture
def script(server: str, tmp_path: Path) -> Script:
    """Typed in a directory of its own, in a plain shell, without a terminal to attach to."""
    environment = {name: value for name, value in os.environ.items() if name != "TMUX"}
    environment |= {"SHELL": "/bin/sh", "HOME": str(tmp_path), "TERM": "xterm"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", str(ROOT / "scripts" / "tmux.sh"), "-L", server, *arguments]
        return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    return run


def pane_ids(tmux: Tmux) -> dict[str, str]:
    return dict(
        line.split() for line in tmux("list-panes", "-t", "exp1", "-F", "#{pane_title} #{pane_id}").splitlines()
    )


def followers(logs: Path) -> list[str]:
    """Processes that follow files in `logs`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [path.parent.name] if str(logs).encode() in path.read_bytes() else []
    return found


def test_panes_follow_the_logs_and_the_session_is_used_again_until_it_is_ended(
    script: Script, tmux: Tmux, tmp_path: Path
) -> None:
    made = script("-s", "exp1", "-o", "outputs 1")
    assert made.returncode == 0 and "session exp1 is ready" in made.stdout, made.stderr
    panes = pane_ids(tmux)
    assert list(panes) == ["Run", "Trainer", "Orchestrator", "Inference"]
    logs = tmp_path / "outputs 1" / "logs"
    logs.mkdir(parents=True)  # only now: the run is started after the session
    for name in ("trainer", "orchestrator", "inference", "inference_1"):
        (logs / f"{name}.log").write_text(f"this is {name}\n")

    def shows(title: str, *lines: str) -> bool:
        shown = tmux("capture-pane", "-p", "-t", panes[title])
        return all(line in shown for line in lines)

    wait_until(lambda: shows("Trainer", "this is trainer"), 60, "the trainer's log")
    wait_until(lambda: shows("Orchestrator", "this is orchestrator"), 60, "the orchestrator's log")
    wait_until(lambda: shows("Inference", "this is inference", "this is inference_1"), 60, "the servers' logs")
    assert not shows("Run", "this is")

    again = script("-s", "exp1", "-o", "outputs 1/")
    assert again.returncode == 0 and pane_ids(tmux) == panes
    assert script("-s", "exp1").returncode == 0
    other = script("-s", "exp1", "-o", "outputs2")
    assert other.returncode == 2 and f"follows {tmp_path}/outputs 1; choose another name" in other.stderr
    assert script("-s", "exp2", "-o", "outputs2").returncode == 0

    ended = script("-s", "exp1", "-k")
    assert ended.returncode == 0 and tmux("list-sessions", "-F", "#{session_name}").split() == ["exp2"]
    assert script("-s", "exp1", "-k").returncode == 2
    wait_until(lambda: not followers(logs), 60, "those that followed the logs to end")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["outputs1"], "'outputs1' is not an option"), (["-s", "a.b"], "letters, digits"), (["-x"], "illegal option")],
)
def test_mistakes_are_refused(script: Script, arguments: list[str], told: str) -> None:
    done = script(*arguments)
    assert done.returncode == 2 and told in done.stderr
