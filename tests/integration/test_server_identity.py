"""Servers that die and return, and runs that meet where they should not: nobody trains on another's tokens."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import Starter, children_of, wait_until
from tests.integration.servers import wait_until_healthy
from tests.patience import PATIENCE
from tests.ports import free_port

from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir, step_name

STEPS = 8
PROMPTS = 4
GROUP = 8
SMALL = ["--orchestrator.prompts-per-step", str(PROMPTS), "--orchestrator.eval.num-prompts", "4"]
ON_POLICY = ["--orchestrator.max-staleness", "0", "--deterministic"]
LORA = ["--trainer.lora.rank", "8", "--trainer.lora.alpha", "16", "--trainer.optimizer.lr", "4e-3"]

Run = Callable[..., list[str]]
Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def url(free_port: int) -> str:
    return f"http://127.0.0.1:{free_port}"


@pytest.fixture
def serve(starter: Starter, warm_model: Path, free_port: int, url: str, tmp_path: Path) -> Serve:
    """Starts an inference server by hand, on the same port unless another is given."""

    def start(port: int = free_port) -> subprocess.Popen[str]:
        process = starter.start(
            "inference",
            *("--model.name", str(warm_model), "--server.port", str(port), "--seq-len", "64", "--threads", "1"),
            *("--max-sequences", "128", "--deterministic", "--server.weight-roots", str(tmp_path)),
        )
        wait_until_healthy(process, f"http://127.0.0.1:{port}")
        return process

    return start


@pytest.fixture
def arguments(warm_model: Path, url: str, tmp_path: Path) -> Run:
    """Of `rl` without a server of its own: it uses the one at `url`."""
    shared = tmp_path / "no_inference.toml"
    shared.write_text(Path("examples/reverse_text/rl.toml").read_text().split("[inference]")[0])

    def make(name: str, *options: str) -> list[str]:
        return [
            *("@", str(shared), "--model.name", str(warm_model), "--output-dir", str(tmp_path / name)),
            *("--orchestrator.client.base-url", url, *SMALL, *options),
        ]

    return make


def metrics(run: Path, process: str, key: str = "step") -> list[float]:
    return [line[key] for line in read_json_lines(RunDir(run).metrics) if line["process"] == process and key in line]


def batches(run: Path) -> list[int]:
    """The steps whose batches the orchestrator has written."""
    return [line["step"] for line in read_json_lines(RunDir(run).metrics) if "reward/mean" in line]


def wait_for_batch(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    def is_there() -> bool:
        return process.poll() is not None or (RunDir(run).metrics.exists() and step in batches(run))

    wait_until(is_there, 300, f"the batch of step {step}")
    assert process.poll() is None, process.communicate()[0]


def trained_tasks(run: Path, num_steps: int = STEPS) -> list[int]:
    """The task of every group that was trained on."""
    rows = [read_json_lines(RunDir(run).samples(step)) for step in range(1, num_steps + 1)]
    assert all(len(lines) == PROMPTS * GROUP for lines in rows)
    return [line["task"] for lines in rows for line in lines[::GROUP]]


def event_names(run: Path) -> list[str]:
    return [event["event"] for event in read_json_lines(RunDir(run).events)]


def kill_amid_requests(server: subprocess.Popen[str]) -> None:
    """Frozen first: whatever the run asks for next is under way when the server dies."""
    server.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 3  # where everything the run asks for was read before, nothing more will come
    while unread_bytes(server.pid) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    server.kill()
    server.wait()


def outlive_two_servers(process: subprocess.Popen[str], run: Path, server: subprocess.Popen[str], serve: Serve) -> None:
    """The run goes to its end although its server is killed, and the next one too."""
    for step in (1, 3):  # early: however late a busy machine sees them, the run is not over
        wait_for_batch(run, step, process)
        kill_amid_requests(server)
        server = serve()
    output, _ = process.communicate(timeout=300 * PATIENCE)
    assert process.returncode == 0, output


def unread_bytes(pid: int) -> int:
    """What clients have sent and the process has not read."""
    sockets = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(int(fields[4].split(":")[1], 16) for fields in lines if f"socket:[{fields[9]}]" in sockets)


@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "lora"])
def test_a_server_that_is_killed_and_started_again_changes_no_bit(
    starter: Starter, serve: Serve, arguments: Run, tmp_path: Path, adapter: bool
) -> None:
    options = [*ON_POLICY, *(LORA if adapter else []), "--max-steps", str(STEPS)]
    server = serve()
    undisturbed = starter.run("rl", *arguments("undisturbed", *options))
    assert undisturbed.returncode == 0, undisturbed.stdout
    process = starter.start("rl", *arguments("disturbed", *options))
    run = tmp_path / "disturbed"
    outlive_two_servers(process, run, server, serve)

    assert batches(run) == metrics(run, "trainer") == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        one, two = (RunDir(tmp_path / name).samples(step).read_text() for name in ("undisturbed", "disturbed"))
        assert one == two
        assert {line["oldest_version"] for line in read_json_lines(RunDir(run).samples(step))} == {step - 1}
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    one, two = (tmp_path / name / "weights" / step_name(STEPS) / file for name in ("undisturbed", "disturbed"))
    assert one.read_bytes() == two.read_bytes()
    before = tmp_path / "disturbed" / "weights" / step_name(STEPS - 1) / file
    assert before.read_bytes() != two.read_bytes()
    assert len(set(trained_tasks(run))) == STEPS * PROMPTS
    assert "group_failed" not in event_names(run)


def test_no_task_is_lost_or_trained_twice_when_generation_and_training_overlap(
    starter: Starter, serve: Serve, arguments: Run, tmp_path: Path
) -> None:
    """With an adapter, which a new server does not have; one that gets whole weights is among the two servers below."""
    server = serve()
    options = [*LORA, "--max-steps", str(STEPS), "--orchestrator.eval.every", "2"]
    process = starter.start("rl", *arguments("run", *options))
    run = tmp_path / "run"
    outlive_two_servers(process, run, server, serve)
    assert batches(run) == metrics(run, "trainer") == list(range(1, STEPS + 1))
    tasks = trained_tasks(run)
    assert len(tasks) == len(set(tasks)) == STEPS * PROMPTS
    assert max(metrics(run, "orchestrator", "staleness/max")) <= 1
    assert max(metrics(run, "trainer", "mismatch_kl")) < 0.05
    assert set(metrics(run, "orchestrator", "eval/num_failed")) == {0}
    events = read_json_lines(RunDir(run).events)
    assert "group_failed" not in {event["event"] for event in events}
    instances = [event["instance"] for event in events if event["event"] == "server_restored"]
    assert len(set(instances)) == len(instances) <= 2


def test_of_two_servers_one_may_die_and_return_and_every_task_is_trained_as_often_as_planned(
    starter: Starter, serve: Serve, arguments: Run, url: str, tmp_path: Path
) -> None:
    """While it is away the other does its work; when it is back it takes part again, with the newest weights. A third
    one is never there."""
    other_port = free_port()
    serve()
    mortal = serve(other_port)
    other, never = (f"http://127.0.0.1:{port}" for port in (other_port, free_port()))
    num_steps = 2 * STEPS  # enough to stop it on its way, however late a busy machine sees where it is
    options = ["--max-steps", str(num_steps), "--orchestrator.client.base-url", f"{never},{url},{other}"]
    process = starter.start("rl", *arguments("run", *options))
    run = tmp_path / "run"
    wait_for_batch(run, 1, process)
    kill_amid_requests(mortal)
    wait_until(lambda: 1 in metrics(run, "orchestrator", "servers/present"), 120, "a batch of the other alone")
    trainer = children_of(process.pid)["trainer"]
    os.kill(trainer, signal.SIGSTOP)  # so that the run is not over before the server is back
    serve(other_port)
    wait_until(lambda: "server_joined" in event_names(run), 60, "the server to take part again")
    os.kill(trainer, signal.SIGCONT)
    output, _ = process.communicate(timeout=300 * PATIENCE)
    assert process.returncode == 0, output

    assert batches(run) == metrics(run, "trainer") == list(range(1, num_steps + 1))
    tasks = trained_tasks(run, num_steps)
    assert len(tasks) == len(set(tasks)) == num_steps * PROMPTS
    present = metrics(run, "orchestrator", "servers/present")
    assert present[0] == present[-1] == 2 and min(present) == 1
    events = [(event["event"], event["server"]) for event in read_json_lines(RunDir(run).events) if "server" in event]
    assert events == [("server_away", never), ("server_away", other), ("server_joined", other)]
    assert max(metrics(run, "trainer", "mismatch_kl")) < 0.05


def test_a_server_that_stays_away_ends_the_run_with_its_name(
    starter: Starter, serve: Serve, arguments: Run, url: str, tmp_path
):
    server = serve()
    options = ["--max-steps", "100000", "--orchestrator.client.outage-timeout-s", "1"]
    process = starter.start("rl", *arguments("run", *options))
    wait_for_batch(tmp_path / "run", 2, process)
    server.kill()
    output, _ = process.communicate(timeout=120 * PATIENCE)
    assert process.returncode == 1
    assert f"orchestrator: waited 1 s for the inference server at {url}; it was lost with:" in output
    assert "Traceback" not in output


def test_of_two_servers_on_one_port_the_second_is_refused(starter: Starter, warm_model: Path, free_port: int, url: str):
    options = ("--model.name", str(warm_model), "--server.port", str(free_port), "--seq-len", "64")
    servers = [starter.start("inference", *options) for _ in range(2)]
    wait_until(lambda: any(server.poll() is not None for server in servers), 120, "one of them to give up")
    refused, serving = sorted(servers, key=lambda server: server.poll() is None)
    output, _ = refused.communicate()
    assert refused.returncode == 2 and "Traceback" not in output
    assert f"inference: server.port = {free_port} cannot be bound on 127.0.0.1" in output and "is free" in output
    wait_until_healthy(serving, url)
    assert len({httpx.get(f"{url}/health", trust_env=False).json()["instance"] for _ in range(5)}) == 1


def test_of_two_runs_on_one_port_the_second_is_refused(starter: Starter, rl_arguments: list[str], tmp_path: Path):
    common = [*rl_arguments, *SMALL, "--orchestrator.max-staleness", "0", "--max-steps", "100000"]
    processes = {
        name: starter.start("rl", *common, "--output-dir", str(tmp_path / name), "--trainer.optimizer.lr", rate)
        for name, rate in (("one", "1e-3"), ("two", "2e-3"))
    }
    wait_until(lambda: any(each.poll() is not None for each in processes.values()), 120, "one of them to give up")
    refused, going_on = sorted(processes, key=lambda name: processes[name].poll() is None)
    output, _ = processes[refused].communicate()
    assert processes[refused].returncode == 2, output
    assert "inference.server.port" in output and "cannot be bound" in output
    assert not (tmp_path / refused).exists()  # nothing was started
    wait_for_batch(tmp_path / going_on, 4, processes[going_on])
    # On-policy: were a token another model's, the trainer would not agree on its log-prob.
    disagreement = metrics(tmp_path / going_on, "trainer", "mismatch_kl")
    assert len(disagreement) >= 2 and max(disagreement) < 1e-6


def test_a_server_that_a_run_trains_with_is_refused_to_another_until_that_run_has_ended(
    starter: Starter, serve: Serve, arguments: Run, url: str, tmp_path: Path
) -> None:
    """Two runs, one with LoRA, are given one server by mistake. The first is killed, goes on at once, and ends."""
    serve()
    on_policy = ["--orchestrator.max-staleness", "0"]
    first = starter.start(
        "rl", *arguments("first", *on_policy, *LORA, "--max-steps", "100000", "--checkpoint.every", "1")
    )
    wait_for_batch(tmp_path / "first", 3, first)
    others = arguments("second", *on_policy, "--max-steps", "2", "--seed", "7")
    refused = starter.run("rl", *others)
    assert refused.returncode == 2 and "Traceback" not in refused.stdout, refused.stdout
    assert f"rl: orchestrator.client.base_url = '{url}': the server there refuses this run: " in refused.stdout
    assert f"run '{run_name(tmp_path / 'first')}' ({tmp_path / 'first'} on " in refused.stdout
    assert not (tmp_path / "second").exists()
    wait_for_batch(tmp_path / "first", batches(tmp_path / "first")[-1] + 2, first)
    first.kill()
    first.communicate()
    last = batches(tmp_path / "first")[-1] + 2
    resumed = starter.run("rl", "--resume", str(tmp_path / "first"), "--max-steps", str(last), "--allow-changes")
    assert resumed.returncode == 0 and "waiting for http" not in resumed.stdout, resumed.stdout
    second = starter.run("rl", *others)
    assert second.returncode == 0 and "waiting for http" not in second.stdout, second.stdout
    for name, num_steps in (("first", last), ("second", 2)):
        assert max(metrics(tmp_path / name, "trainer", "mismatch_kl")) < 1e-6
        assert metrics(tmp_path / name, "trainer") == list(range(1, num_steps + 1))


def run_name(run: Path) -> str:
    """As the servers of its last start know it."""
    return [event["run"] for event in read_json_lines(RunDir(run).events) if "run" in event][-1]
