"""Does a model learn the same whatever serves it? An example's run under several deployments, and its learning curves.

    python benchmarks/curves.py examples/sentences/rl.toml --under colocated shared vllm
    python benchmarks/curves.py examples/steering/rl_smollm2.toml --under shared vllm \\
        --reward-server examples/steering/reward_server.toml --goals length reading_difficulty

    colocated   trainer and server are one process
    shared      two processes, weights through memory
    split       two processes, weights through files, a GPU each
    vllm        the same with vLLM as the server; with one GPU, both on it

Other flags go to `rl`. In the output directory: a run directory each, curves.svg, curves.json, and with --goals a
picture of goal space before and after. The table for docs/log.md is printed. Nothing is fetched from anywhere.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from curve_plot import Curve, draw, read_curve, table
from tandem.utils.ports import nearest_free_port

ROOT = Path(__file__).resolve().parents[1]
UNDER = {
    "colocated": ["--deployment", "colocated"],
    "shared": ["--deployment", "shared"],
    "split": ["--deployment", "split"],
    "vllm": ["--inference.engine", "vllm"],
}
START_S = 120.0


def run_once(config: Path, way: str, folder: Path, flags: list[str]) -> int:
    """Its exit status; the log is next to the run directory."""
    port = nearest_free_port("127.0.0.1", 8300)
    fixed = ["--output-dir", str(folder), "--inference.server.port", str(port), "--show", "lines", "--clean"]
    command = [sys.executable, "-m", "tandem.entrypoints.rl", "@", str(config), *UNDER[way], *fixed, *flags]
    log = folder.with_suffix(".log")
    began = time.monotonic()
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ).returncode
    print(f"{way}: exit status {status} after {time.monotonic() - began:.0f} s", flush=True)
    if status:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
    return status


@contextmanager
def reward_server(config: Path | None, log: Path) -> Iterator[str]:
    """Started for as long as the block takes; its address."""
    if config is None:
        yield ""
        return
    port = tomllib.loads(config.read_text())["server"]["port"]  # which the run's own file names too
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tandem.entrypoints.reward_server", "@", str(config)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(url + "/health", server, log)
        yield url
    finally:
        server.terminate()
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the reward server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def plot_goals(run: Path, goals: list[str], url: str) -> None:
    subprocess.run([sys.executable, ROOT / "examples/steering/plot.py", run, *goals, "--url", url], check=True)
    (run / "goal_space.svg").replace(run.with_name(f"goal_space_{run.name}.svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="the TOML file of the run")
    parser.add_argument("--under", nargs="+", choices=list(UNDER), default=["shared"])
    parser.add_argument("--reward-server", type=Path, help="the TOML file of a reward server to start for the runs")
    parser.add_argument("--goals", nargs=2, help="two goals of it, for the picture of goal space")
    parser.add_argument("--title", help="of the plot; the configuration's folder if left out")
    parser.add_argument("--output", type=Path, default=Path("outputs/curves"))
    args, flags = parser.parse_known_args()
    args.output.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    failed = False
    with reward_server(args.reward_server, args.output / "reward_server.log") as url:
        for way in args.under:
            folder = args.output / way
            if run_once(args.config, way, folder, flags):
                failed = True
                continue
            curves.append(read_curve(folder, way))
            if args.goals:
                plot_goals(folder, args.goals, url)
            # After every run, so that what is finished is there if the next one is cut off.
            (args.output / "curves.svg").write_text(draw(curves, args.title or args.config.parent.name))
            (args.output / "curves.json").write_text(json.dumps([asdict(curve) for curve in curves], indent=1))
    print("\n".join(table(curves) if curves else []))
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
