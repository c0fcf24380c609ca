"""The benchmarks of a GPU run from end to end on a tiny model, so that they still do when there is a GPU again; what
the simulation of many GPUs says is what the docs say."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "gpu.py"


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """A script of the benchmarks."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def scaling() -> Iterator[ModuleType]:
    with imported("scaling") as module:
        yield module


def test_the_tables_of_the_docs_are_those_of_the_simulation(scaling: ModuleType) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    for table in (scaling.step_table, scaling.orchestrator_table, scaling.memory_table):
        for line in table():
            assert line in page, "run `python benchmarks/scaling.py` and put its tables into docs/scaling.md"


def test_the_simulated_server_decodes_at_the_measured_floor(scaling: ModuleType) -> None:
    """docs/performance.md: 87,500 tokens/s for 256 sequences of 128 + 512 tokens of 0.6B, less what we reach of it."""
    layout = scaling.Layout("0.6B", 1, 1, 1, prompts=256, group=1, prompt_tokens=128)
    seconds = scaling.decode(layout, scaling.spec_of("0.6B"), [512] * 256)
    assert 256 * 512 / seconds == pytest.approx(87_500 * scaling.DECODE_SHARE, rel=0.05)


def test_more_servers_are_faster_and_more_readers_are_slower(scaling: ModuleType) -> None:
    few, many = (scaling.Layout("4B", 4, servers, 1, prompts=64) for servers in (2, 8))
    assert scaling.simulate(many).generate < scaling.simulate(few).generate
    crowd = scaling.Layout("4B", 4, 512, 1, prompts=64)
    assert scaling.simulate(crowd).load > scaling.simulate(many).load


def test_the_benchmark_of_the_orchestrator(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    script = ROOT / "benchmarks" / "orchestrator_cpu.py"
    command = [sys.executable, script, "--rollouts", "32", "--delays", "0.01", "0.02", "--output", output]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(output.read_text())
    assert [(row["rollouts"], row["turns"] > 1) for row in figures.values()] == [(32, False), (32, True)]


@pytest.mark.parametrize(("section", "num_rows"), [("rollouts", 7), ("training", 2), ("offline", 3), ("rl", 1)])
def test_a_section_of_the_benchmarks(tmp_path: Path, section: str, num_rows: int) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--tiny", "--section", section, "--output", str(output)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(output.read_text())[section]
    assert len(rows) == num_rows and not any("error" in row for row in rows), done.stderr[-3000:]
    assert done.stdout.count("\n| ") >= num_rows, done.stdout


TINY_RUN = """
max_steps = 2
seq_len = 64
[orchestrator]
prompts_per_step = 2
group_size = 2
env = { id = "reverse-text" }
sampling = { max_tokens = 4 }
eval = { every = 1, num_prompts = 2 }
"""


def test_learning_curves_are_drawn_from_runs(tmp_path: Path, tiny_model: Path) -> None:
    """With a flag that goes to `rl`, and a deployment that this run cannot have, which costs the others nothing."""
    (tmp_path / "rl.toml").write_text(TINY_RUN)
    flags = ["--under", "vllm", "shared", "--model.name", str(tiny_model), "--inference.vllm.python", "/none"]
    command = [sys.executable, str(ROOT / "benchmarks" / "curves.py"), str(tmp_path / "rl.toml"), *flags]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--output", str(tmp_path)], env=hidden, capture_output=True, text=True)
    assert done.returncode == 1 and "vllm: exit status 2" in done.stdout, done.stdout + done.stderr
    assert "shared: exit status 0" in done.stdout and "| held-out reward at step | 0 | 1 | 2 | seconds |" in done.stdout
    (curve,) = json.loads((tmp_path / "curves.json").read_text())
    assert [step for step, _ in curve["training"]] == [1, 2] and [step for step, _ in curve["held_out"]] == [0, 1, 2]
    picture = (tmp_path / "curves.svg").read_text()
    assert picture.count("<polyline") == 2 and picture.count("<circle") == 3 and ">shared, " in picture


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 120, [0, 20, 40, 60, 80, 100, 120]),
        (0.054, 0.344, [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        (-0.608, -0.157, [-0.7, -0.6, -0.5, -0.4, -0.3, -0.2, -0.1]),
        (1, 1, [1, 1.2, 1.4, 1.6, 1.8, 2]),
    ],
)
def test_axes_have_round_numbers_around_all_points(low: float, high: float, expected: list[float]) -> None:
    with imported("curve_plot") as plot:
        assert plot.ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("script", "limit_s", "problem"),
    [
        ("print('{\"figure\": 1}'); print('a table'); raise SystemExit(3)", 3600, "exit status 3"),
        ("import time; time.sleep(3600)", 1, "stopped after 1 s"),
    ],
)
def test_a_section_that_fails_or_takes_too_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit_s: int, problem: str
) -> None:
    (tmp_path / "section.py").write_text(script)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with imported("gpu") as gpu:
        monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
        rows: list[dict[str, float]] = []
        assert gpu.run(gpu.Section("section.py", (), (), 0), limit_s, rows.append, tiny=False) == problem
        assert rows == ([{"figure": 1}] if limit_s == 3600 else [])
        lines = gpu.table({"rl": []}, {"rl": problem})
    assert lines[-1].startswith(f"| rl: {problem} |") and lines[-1].count("|") == lines[0].count("|")
