"""Two hosts, a shared file system and addresses: the trainer on both, or inference on one and `rl` on the other."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file
from tests.documentation import ROOT, commands_of
from tests.integration.processes import wait_until
from tests.patience import PATIENCE
from tests.scale.hosts import Host

from tandem.commands.trainer import TrainerConfig
from tandem.data.batch_files import RolloutWriter
from tandem.data.packing import pack
from tandem.trainer.rl.train import train_rl
from tandem.types.rollout import TrainBatch, TrainingSequence
from tandem.utils.files import read_json_lines, write_json

STEPS = 3


def write_batches(root: Path, steps: int) -> None:
    draw = random.Random(5)
    root.mkdir(exist_ok=True)
    writer = RolloutWriter(root / "rollouts", keep=100)
    for step in range(1, steps + 1):
        samples = []
        for _ in range(6):
            prompt = [draw.randrange(6, 100) for _ in range(5)]
            for _ in range(3):
                completion = [draw.randrange(6, 100) for _ in range(draw.randint(2, 9))]
                size = len(prompt) + len(completion)
                streams = {"advantages": [draw.uniform(-1, 1)] * size, "logprobs": [-4.6] * size}
                samples.append(TrainingSequence(prompt + completion, [0] * 5 + [1] * len(completion), streams))
        writer.write(TrainBatch(step, 1.0, pack(samples)))


def config(model: Path, root: Path, **options: object) -> dict:
    return {
        "model": {"name": str(model)},
        "output_dir": str(root),
        "max_steps": STEPS,
        "device": "cpu",
        "threads": 1,
        "keep_weights": 10,
        # A large epsilon: Adam would else blow rounding up where the gradient is next to nothing.
        "optimizer": {"lr": 1e-2, "eps": 1e-2},
        **options,
    }


# What Python and torch take the time of day from, a minute late.
SLOW_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec -= 60;
    return result;
}
time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *place, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    place->tv_sec = now.tv_sec, place->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def slow_clock(folder: Path) -> Path:
    """A library to be loaded before all others."""
    source, library = folder / "slow_clock.c", folder / "slow_clock.so"
    source.write_text(SLOW_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def start(hosts: list[Host], config_file: Path) -> list[subprocess.Popen[str]]:
    """torchrun as docs/scaling.md shows it, on each host. The clock of the second is slow."""
    (shown,) = [shown for shown in commands_of(ROOT / "docs" / "scaling.md") if shown.program == "torchrun"]
    started = []
    for rank, host in enumerate(hosts):
        here = {"8": "1", "0": str(rank), "10.0.0.1:29500": f"{hosts[0].address}:29500"}
        words = [here.get(word, word) for word in shown.arguments]
        assert words[-2] == "@" and here.keys() <= {*shown.arguments}
        command = host.command([sys.executable, "-m", "torch.distributed.run", *words[:-1], str(config_file)])
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if rank > 0:
            environment |= {"LD_PRELOAD": str(slow_clock(config_file.parent))}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return started


def end(processes: list[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    try:
        return [process.communicate(timeout=timeout_s * PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_two_hosts_train_what_one_does(two_hosts: list[Host], tiny_model: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for root in (alone, together):
        write_batches(root, STEPS)
    train_rl(TrainerConfig.model_validate(config(tiny_model, alone)))
    config_file = tmp_path / "trainer.json"
    write_json(config_file, config(tiny_model, together, parallel={"strategy": "zero3"}))
    processes = start(two_hosts, config_file)
    outputs = end(processes, timeout_s=120)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    expected = load_file(alone / "weights" / "latest" / "model.safetensors")
    for name, tensor in load_file(together / "weights" / "latest" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=name)
    events = read_json_lines(together / "events.jsonl")
    found = [(event["event"], event.get("ranks")) for event in events]
    assert found == [("started", 2), ("checkpoint", None), ("finished", None)]
    assert len(read_json_lines(together / "metrics.jsonl")) == STEPS


def test_a_host_that_is_lost_is_named_within_the_deadline(
    two_hosts: list[Host], tiny_model: Path, tmp_path: Path
) -> None:
    """Both train step after step; then all of the second host is killed."""
    write_batches(tmp_path, 400)
    config_file = tmp_path / "trainer.json"
    parallel = {"strategy": "zero3", "timeout_s": 20}
    write_json(config_file, config(tiny_model, tmp_path, parallel=parallel, max_steps=400))
    processes = start(two_hosts, config_file)
    deadline = time.monotonic() + 60 * PATIENCE
    while not (tmp_path / "weights" / "step_000003").exists():
        assert time.monotonic() < deadline and processes[0].poll() is None, end(processes, 1)
        time.sleep(0.1)
    for pid in two_hosts[1].pids():
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    output = end(processes, timeout_s=60)[0]
    assert processes[0].returncode != 0
    assert time.monotonic() - began < 45 * PATIENCE
    assert "RankLost: rank 0 waited in vain" in output and "rank 1 on" in output, output


def test_inference_with_a_key_on_one_host_and_rl_on_the_other(
    two_hosts: list[Host], tiny_model: Path, tmp_path: Path
) -> None:
    """As docs/scaling.md shows it."""
    files, run_dir = Path("examples/reverse_text/three_files").resolve(), tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "INFERENCE_SERVER_API_KEY": "correct-horse"}
    name = ["--model.name", str(tiny_model)]
    key = ["--host", "0.0.0.0", "--api-key-var", "INFERENCE_SERVER_API_KEY", "--server.weight-roots", str(run_dir)]
    serve = [sys.executable, "-m", "tandem.entrypoints.inference", str(files / "inference.toml"), *name, *key]
    train = [sys.executable, "-m", "tandem.entrypoints.rl", "--trainer", "@", str(files / "trainer.toml")]
    train += ["--orchestrator", "@", str(files / "orchestrator.toml"), *name, "--output-dir", str(run_dir)]
    train += ["--orchestrator.client.base-url", f"http://{two_hosts[0].address}:8000/v1", "--max-steps", str(STEPS)]
    train += ["--orchestrator.prompts-per-step", "2", "--orchestrator.eval.num-prompts", "2"]
    train += ["--orchestrator.env.args", '{"num_train": 32, "num_eval": 2}']
    api_key = ["--orchestrator.client.api-key-var", "INFERENCE_SERVER_API_KEY"]
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    early = subprocess.run(two_hosts[1].command([*train, *api_key]), **options, check=False)
    assert early.returncode == 2 and "no inference server answers there" in early.stdout, early.stdout
    assert "`inference @ …` --host 0.0.0.0" in early.stdout
    server = subprocess.Popen(two_hosts[0].command(serve), **options)
    try:
        with two_hosts[0].client(8000, timeout=60) as http:
            wait_until(lambda: server.poll() is not None or answers(http), 120, "the server")
            assert server.poll() is None, end([server], 1)
            assert http.get("/v1/models").status_code == 401
        done = subprocess.run(two_hosts[1].command([*train, *api_key]), **options, check=False)
        assert done.returncode == 0, done.stdout
    finally:
        server.kill()
        server.communicate()
    assert (run_dir / "weights" / f"step_{STEPS:06d}" / "manifest.json").exists()
    events = read_json_lines(run_dir / "events.jsonl")
    served = [event["version"] for event in events if event["event"] == "version_served"]
    assert served and served == sorted(set(served))


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


NUM_ASKED = 6
ASKING = str(Path(__file__).with_name("asking.py"))


@contextmanager
def serving(host: Host, model: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tandem.entrypoints.inference", "--model.name", str(model), "--seq-len", "64"]
    command += ["--host", "0.0.0.0", "--allow-unauthenticated", "--threads", "1"]
    with subprocess.Popen(host.command(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def asked_and_silent(hosts: list[Host], model: Path, folder: Path, *limits: str) -> Iterator[subprocess.Popen[str]]:
    """The second host has asked the server on the first, which is paused: no byte comes on their connections."""
    url = f"http://{hosts[0].address}:8000"
    command = hosts[1].command([sys.executable, ASKING, url, str(model), str(folder), str(NUM_ASKED), *limits])
    pipe = subprocess.PIPE
    with hosts[0].client(8000, timeout=60) as http:
        wait_until(lambda: answers(http), 120, "the server")
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True) as asking:
            try:
                assert asking.stdin is not None and asking.stdout is not None
                assert asking.stdout.readline() == "ready\n"
                http.post("/pause")
                asking.stdin.write("\n")
                asking.stdin.flush()
                wait_until(lambda: num_waiting(http) == NUM_ASKED, 60, "the requests")
                yield asking
            finally:
                asking.kill()


def num_waiting(http: httpx.Client) -> int:
    (line,) = [line for line in http.get("/metrics").text.splitlines() if line.startswith("tandem_sequences_waiting")]
    return int(float(line.split()[-1]))


def outcome(asking: subprocess.Popen[str]) -> str:
    return asking.communicate(timeout=60 * PATIENCE)[0]


def test_a_server_that_loses_its_power_is_missed_and_asked_again_when_it_is_back(
    two_hosts: list[Host], tiny_model: Path, tmp_path: Path
) -> None:
    """Its machine closes no connection. One that is there and silent is not missed."""
    first, _ = two_hosts
    with serving(first, tiny_model), asked_and_silent(two_hosts, tiny_model, tmp_path) as asking:
        first.lose_power()
        first.power_on()
        with serving(first, tiny_model):
            said = outcome(asking)
            assert said.endswith(f"{NUM_ASKED} answers\n"), said
            check_that_only_the_dead_are_missed(two_hosts, tiny_model, tmp_path)
    assert [event["event"] for event in read_json_lines(tmp_path / "events.jsonl")] == ["server_restored"]


def check_that_only_the_dead_are_missed(hosts: list[Host], model: Path, folder: Path) -> None:
    outage_s, dead_s = 1, 3
    with asked_and_silent(hosts, model, folder, str(outage_s), str(dead_s)) as asking:
        time.sleep(2 * dead_s)
        assert asking.poll() is None, outcome(asking)
        hosts[0].lose_power()
        said = outcome(asking)
    assert f"lost: waited {outage_s} s for the inference server at http://{hosts[0].address}:8000; " in said, said
