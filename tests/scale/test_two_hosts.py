"""Two hosts, a shared file system and addresses: the trainer on both, or inference on one and `rl` on the other."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file
from tests.integration.processes import wait_until
from tests.patience import PATIENCE
from tests.scale.hosts import Host

from tandem.config.trainer import TrainerConfig
from tandem.data.packing import pack
from tandem.trainer.rl.train import train_rl
from tandem.transport.rollouts.filesystem import RolloutWriter
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


def start(hosts: list[Host], config_file: Path) -> list[subprocess.Popen[str]]:
    """torchrun as the documentation shows it, on each host."""
    started = []
    for rank, host in enumerate(hosts):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        torchrun += [f"--node-rank={rank}", "--rdzv-id=test", "--rdzv-backend=c10d"]
        torchrun += [f"--rdzv-endpoint={hosts[0].address}:29500", f"--local-addr={host.address}"]
        torchrun += [f"--rdzv-conf=is_host={int(rank == 0)},join_timeout=300"]
        command = host.command([*torchrun, "-m", "tandem.entrypoints.trainer", "@", str(config_file)])
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
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
    namespace = two_hosts[1].namespace
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    for pid in listed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
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
