"""`Cluster` on real raylets: messages, ranks, rendezvous, deaths; and RL over them, some killed on the way."""

import asyncio
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.integration.processes import ENVIRONMENT, command, wait_until
from tests.patience import PATIENCE
from tests.ports import free_port
from tests.scale.raylets import HEAD, SECOND, THIRD, Raylets, raylets

from tandem import Cluster, NodeConfig, UserError, WorkerDied
from tandem.launch.ray.cluster import RemoteWorker
from tandem.launch.ray.process import Placement
from tandem.orchestrator.loop import Orchestrator
from tandem.orchestrator.state import OrchestratorState
from tandem.types.rollout import Group
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_dir import RunDir, steps_with

pytest.importorskip("ray", reason="Ray is not installed: pip install 'tandem-rl[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
ECHO = "tests.scale.ray_work.echo"
# Nothing is scored while the run is further than it is allowed to be.
REWARD = """\
import time
from pathlib import Path


def length(completion: str, answer: str) -> float:
    while max([int(step.name[5:]) for step in Path("{weights}").glob("step_*[0-9]")], default=0) >= int(
        Path("{allowed}").read_text() or 0
    ):
        time.sleep(0.05)
    return min(1.0, len(completion) / 10)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Raylets]:
    with raylets() as running:
        yield running


@pytest.fixture
def both(nodes: Raylets) -> Raylets:
    nodes.add(SECOND)
    return nodes


def in_threads(calls: list[Callable[[], object]]) -> list[object]:
    """What each gives, or raises; all at the same time."""
    outcomes: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120 * PATIENCE)
        assert not thread.is_alive()
    return outcomes


def test_workers_have_messages_ranks_and_a_rendezvous_and_survive_each_other(both: Raylets) -> None:
    with Cluster([NodeConfig(HEAD), NodeConfig(SECOND, num_workers=2)], both.address) as cluster:
        workers = cluster.start(work_fn=ECHO)
        assert [worker.name for worker in workers] == [
            f"worker 0 on {HEAD}",
            f"worker 1 on {SECOND}",
            f"worker 2 on {SECOND}",
        ]
        answers = [worker.call({"text": "hé", "numbers": [1, 2.5, None]}) for worker in workers]
        assert [(one["rank"], one["world_size"]) for one in answers] == [(0, 3), (1, 3), (2, 3)]
        assert answers[0]["echo"] == {"text": "hé", "numbers": [1, 2.5, None]}
        assert [worker.environment["LOCAL_RANK"] for worker in workers] == ["0", "0", "1"]
        assert {worker.environment["MASTER_ADDR"] for worker in workers} == {HEAD}
        sums = in_threads([lambda one=worker: one.call({"all_reduce": 2.0**one.rank}) for worker in workers])
        assert sums == [{"sum": 7.0}] * 3
        check_large_and_late_messages(workers[0])
        check_deaths(workers)
        with pytest.raises(UserError, match="started already"):
            cluster.start(work_fn=ECHO)


def check_large_and_late_messages(worker: RemoteWorker) -> None:
    worker.send("x" * 1000)
    with pytest.raises(ValueError, match="max_size = 100"):
        worker.recv(max_size=100)
    with pytest.raises(TimeoutError, match=worker.name):
        worker.recv(timeout_s=0.01)
    worker.send("late")
    assert worker.recv()["echo"] == "late"


def check_deaths(workers: list[RemoteWorker]) -> None:
    first, second, third = workers
    pid = third.call("who")["pid"]
    with suppress(WorkerDied):  # it may die before it has said that it has the message
        third.send({"die": 3})
    for outcome in in_threads([third.recv, third.recv]):
        assert isinstance(outcome, WorkerDied) and third.name in str(outcome)
    with pytest.raises(WorkerDied, match=third.name):
        third.send("hello")
    assert third.restart() and third.call("who")["pid"] != pid
    with pytest.raises(WorkerDied, match=r"worker 1 on [\s\S]*ValueError: no such thing"):
        second.call({"raise": "no such thing"})
    assert second.restart() and second.call("x")["rank"] == 1
    assert first.call("still here")["echo"] == "still here"


def test_what_cannot_be_started_is_refused_and_leaves_nothing(both: Raylets) -> None:
    with pytest.raises(UserError, match=rf"'nowhere.invalid' is no live node[\s\S]*{SECOND}"):
        Cluster([NodeConfig("nowhere.invalid")], both.address)
    with pytest.raises(UserError, match="no nodes"):
        Cluster([], both.address)
    with pytest.raises(UserError, match="num_workers=0"):
        NodeConfig(HEAD, num_workers=0)
    cluster = Cluster([NodeConfig(HEAD)], both.address)
    with pytest.raises(UserError, match="names no module"):
        cluster.start(work_fn="echo")
    with pytest.raises(WorkerDied, match="has no 'ecko'; did you mean 'echo'"):
        cluster.start(work_fn="tests.scale.ray_work.ecko")
    assert cluster.workers == []


@pytest.fixture
def kill_second_at(both: Raylets, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The second node dies while the run is in its n-th step and the one after, and is dead before the third."""

    def prepare(step: int) -> None:
        killing = threading.Thread(target=both.kill, args=(SECOND,))
        stage = Orchestrator._stage_batch

        def kill_and_stage(loop: Orchestrator, groups: list[Group], number: int, state: OrchestratorState) -> None:
            if number == step:
                killing.start()
            if number == step + 2:
                killing.join()
            stage(loop, groups, number, state)

        monkeypatch.setattr(Orchestrator, "_stage_batch", kill_and_stage)

    return prepare


def test_two_nodes_train_on_when_an_inference_node_dies(
    both: Raylets,
    kill_second_at: Callable[[int], None],
    tiny_model: Path,
    tmp_path: Path,
    load_script: Callable[[str], ModuleType],
) -> None:
    example = load_script("python/two_nodes")
    given = ["--model", str(tiny_model), "--output-dir", str(tmp_path / "run"), "--steps", "6"]
    args = example.parse_arguments([*given, "--address", both.address, "--inference-node", HEAD, SECOND])
    kill_second_at(2)
    metrics = asyncio.run(example.main(args))
    assert SECOND not in both.added, "the node was to be killed"
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(line["staleness/max"] == 0 for line in metrics)
    assert (tmp_path / "run" / "weights" / "latest" / "model.safetensors").exists()


def test_many_nodes_go_on_from_a_checkpoint_when_a_training_node_dies(
    both: Raylets,
    kill_second_at: Callable[[int], None],
    tiny_model: Path,
    tmp_path: Path,
    load_script: Callable[[str], ModuleType],
) -> None:
    example, run_dir = load_script("python/many_nodes"), RunDir(tmp_path / "run")
    given = ["--model", str(tiny_model), "--output-dir", str(run_dir.root), "--steps", "9"]
    places = ["--training-node", HEAD, SECOND, "--inference-node", HEAD]
    kill_second_at(6)
    metrics = asyncio.run(example.main(example.parse_arguments([*given, *places, "--address", both.address])))
    assert SECOND not in both.added, "the node was to be killed"
    assert [line["step"] for line in metrics] == list(range(1, 10))
    events = list(read_json_lines(run_dir.events))
    restarts = [line for line in events if line["event"] == "trainer_restarted"]
    # The rank on the other node may notice first, and end for lack of its peer.
    assert len(restarts) == 1 and ("worker 1 on" in restarts[0]["reason"] or "worker 0 on" in restarts[0]["reason"])
    starts = [line for line in events if line["event"] == "started" and line["process"] == "trainer"]
    # A checkpoint that was being written when the node died does not count: then there is none yet.
    assert [line["ranks"] for line in starts] == [2, 2] and starts[0]["step"] == 0 and starts[1]["step"] in (0, 5)


def kill_servers_of(address: str) -> None:
    """With the power of a machine, all its processes are gone at once."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"--server.host\0{address}\0" in (folder / "cmdline").read_text():
                os.kill(int(folder.name), signal.SIGKILL)


def test_rl_runs_on_the_cluster_and_survives_the_death_of_its_nodes(
    both: Raylets, tiny_model: Path, tmp_path: Path
) -> None:
    """First the node of the server, later one of the two that train."""
    both.add(THIRD)
    run_dir, allowed, output = RunDir(tmp_path / "run"), tmp_path / "allowed", tmp_path / "output"
    allowed.write_text("2")
    (tmp_path / "reward.py").write_text(REWARD.format(weights=run_dir.weights, allowed=allowed))
    rl = command("rl", "@", "examples/reverse_text/rl.toml", "--show", "lines", "--model.name", str(tiny_model))
    rl += ["--output-dir", str(run_dir.root), "--max-steps", "12", "--inference.server.port", str(free_port())]
    rl += ["--orchestrator.env.reward", f"{tmp_path}/reward.py:length", "--orchestrator.env.score-timeout-s", "3000"]
    rl += ["--orchestrator.prompts-per-step", "4", "--orchestrator.eval.num-prompts", "2", "--checkpoint.every", "2"]
    rl += ["--trainer.parallel.ranks", "2", "--ray.address", both.address]
    rl += ["--ray.inference-nodes", f'["{SECOND}"]', "--ray.trainer-nodes", f'["{HEAD}", "{THIRD}"]']

    def events(name: str, process: str) -> list[dict[str, Any]]:
        lines = read_json_lines(run_dir.events)
        return [line for line in lines if (line["event"], line["process"]) == (name, process)]

    def restarts() -> list[dict[str, Any]]:
        return [line for line in events("restarted", "rl") if line["who"] == "trainer"]

    def until(condition: Callable[[], object], what: str) -> None:
        wait_until(lambda: process.poll() is not None or bool(condition()), 120, f"{what}:\n{output.read_text()}")
        assert process.poll() is None, output.read_text()

    with output.open("w") as printed:
        process = subprocess.Popen(rl, stdout=printed, stderr=printed, env=ENVIRONMENT)
    try:
        until(lambda: steps_with(run_dir.weights, MANIFEST)[-1:] >= [2], "two steps")
        kill_servers_of(SECOND)
        both.kill(SECOND)
        allowed.write_text("6")
        until(lambda: steps_with(run_dir.weights, MANIFEST)[-1:] >= [6], "steps with a server elsewhere")
        both.kill(THIRD)
        until(restarts, "a restart of the trainer")
        allowed.write_text("99")
        assert process.wait(240 * PATIENCE) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    moved = {urlsplit(line["server"]).hostname for line in events("server_joined", "orchestrator")}
    assert moved & {HEAD, THIRD}
    first, second = events("started", "trainer")
    assert (first["ranks"], first["step"], second["ranks"]) == (2, 0, 2)
    assert [second["step"]] == [line["step"] for line in restarts()] and second["step"] >= 4
    # The rank on the other node may notice first, and end for lack of its peer.
    assert re.search(rf"worker 1 on {THIRD}|worker 0 on {HEAD} ended", output.read_text())
    assert (run_dir.weights / "latest" / "model.safetensors").exists()


def test_a_server_s_command_ends_when_the_raylet_of_its_own_node_is_gone(both: Raylets, tmp_path: Path) -> None:
    """The last test: it kills the head's raylet, which the command is connected to. The supervisor starts it again."""
    (tmp_path / "serves.py").write_text("import time\nprint('serving', flush=True)\ntime.sleep(600)\n")
    placement = Placement(both.address, [SECOND], 0, [], port=4000, servers_file=str(tmp_path / "servers"))
    output = tmp_path / "output"
    with output.open("w") as printed:
        process = subprocess.Popen(
            placement.command("serves", []), stdout=printed, stderr=printed, cwd=tmp_path, env=ENVIRONMENT
        )
    try:
        wait_until(lambda: "serving" in output.read_text(), 120, "the server")
        both.cluster.head_node.kill_raylet()
        assert process.wait(120 * PATIENCE) == 1, output.read_text()
    finally:
        process.kill()
        process.wait()
