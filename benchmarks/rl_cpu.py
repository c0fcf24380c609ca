"""RL on two CPU cores: TRL's GRPOTrainer and Tandem, one after the other, the same everything.

Same warmed-up tiny model, prompts, reward, batch (16 prompts × 8 completions of at most 16 tokens), optimizer, clip
and precision. Prints samples per second, seconds to a held-out reward of 0.9, and the ratios.

    pip install -e '.[benchmarks]'
    python benchmarks/rl_cpu.py                        # or --trl-python, for another environment with both in it

Neither side is evaluated on the clock: TRL's stands still meanwhile, and Tandem's versions are kept and evaluated
afterwards, with the same greedy generation by transformers. Tandem overlaps generation and training
(max_staleness = 1); TRL does them in turn.
"""

import argparse
import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tandem.envs.reverse_text import ReverseText
from tandem.types.rollout import Task
from tandem.utils.files import read_json_lines

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 3  # not counted in the seconds per step
WARM_UP_STEPS_OF_LR = 10
TEMPERATURE = 1.0
ROLLOUTS = 128


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def script(name: str) -> Path:
    return Path(sys.executable).parent / name


def warm_model(folder: Path) -> Path:
    """The model of the demo after its warm-up."""
    run(sys.executable, "examples/reverse_text/make_model.py", folder / "model")
    run(sys.executable, "examples/reverse_text/make_data.py", folder / "sft.jsonl")
    sft = [script("sft"), "@", "examples/reverse_text/sft.toml", "--clean", "--output-dir", folder / "sft"]
    run(*sft, "--model.name", folder / "model", "--data.path", folder / "sft.jsonl")
    return folder / "sft" / "weights" / "latest"


def write_rows(path: Path, tasks: list[Task]) -> Path:
    rows = [{"prompt": task.messages[0]["content"], "answer": task.answer} for task in tasks]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def run_trl(python: str, model: Path, train: Path, held_out: Path, args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, object] = {
        "train": train,
        "held-out": held_out,
        "reward": "tandem.rewards.functions:positional_match",
        "steps": args.steps,
        "lr": args.lr,
        "warmup-steps": WARM_UP_STEPS_OF_LR,
        "temperature": TEMPERATURE,
        "num-held-out": args.num_held_out,
        "eval-every": args.eval_every,
    }
    return json.loads(run(python, "benchmarks/trl_grpo.py", model, *flags(options)).splitlines()[-1])


def run_tandem(python: str, model: Path, held_out: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, object] = {
        "output-dir": folder,
        "model.name": model,
        "max-steps": args.steps,
        "trainer.optimizer.lr": args.lr,
        "trainer.scheduler.type": "constant",
        "trainer.scheduler.warmup-steps": WARM_UP_STEPS_OF_LR,
        "trainer.keep-weights": args.steps + 1,
        "orchestrator.sampling.temperature": TEMPERATURE,
        "orchestrator.eval.num-prompts": 1,
        "orchestrator.eval.every": None,
        "inference.server.port": args.port,
    }
    run(script("rl"), "@", "examples/reverse_text/rl.toml", "--clean", *flags(options))
    lines = [line for line in read_json_lines(folder / "metrics.jsonl") if line["process"] == "trainer"]
    # The first step waits for the processes to start; its own work is counted, their start is not.
    ends = [line["time"] for line in lines]
    first_s = lines[0]["train_s"] + lines[0]["publish_s"] + lines[1]["time"] - lines[0]["time"]
    step_s = [first_s, *(after - before for before, after in pairwise(ends))]
    versions = [step for step in range(args.steps + 1) if step % args.eval_every == 0]
    models = [model if step == 0 else folder / "weights" / f"step_{step:06d}" for step in versions]
    output = run(python, "benchmarks/held_out.py", held_out, args.num_held_out, *models)
    rewards = json.loads(output.splitlines()[-1])
    curve = [(step, round(sum(step_s[:step]), 3), reward) for step, reward in zip(versions, rewards, strict=True)]
    timed = step_s[WARM_UP_STEPS:]
    return {
        "samples_per_second": round(ROLLOUTS / statistics.mean(timed), 2),
        "step_s_median": round(statistics.median(timed), 4),
        "seconds_to_target": next((seconds for _, seconds, reward in curve if reward >= 0.9), None),
        "curve": curve,
    }


def report(trl: dict[str, Any], tandem: dict[str, Any]) -> None:
    print(f"{'':24}{'TRL':>12}{'Tandem':>12}{'ratio':>10}")
    for label, key, more_is_better in (
        ("samples per second", "samples_per_second", True),
        ("median step, s", "step_s_median", False),
        ("seconds to 0.9", "seconds_to_target", False),
    ):
        theirs, ours = trl[key], tandem[key]
        ratio = "–" if not theirs or not ours else f"{ours / theirs if more_is_better else theirs / ours:.2f} x"
        print(f"{label:24}{theirs or 'never':>12}{ours or 'never':>12}{ratio:>10}")
    for name, result in (("TRL", trl), ("Tandem", tandem)):
        print(f"\n{name}: step, seconds, held-out reward")
        print("  " + "  ".join(f"{step}:{seconds:.0f}s:{reward:.2f}" for step, seconds, reward in result["curve"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "bench_rl_cpu")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--num-held-out", type=int, default=128)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--port", type=int, default=8777)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    tasks = ReverseText()
    train = write_rows(args.folder / "train.jsonl", tasks.train_tasks)
    held_out = write_rows(args.folder / "held_out.jsonl", tasks.eval_tasks)
    model = warm_model(args.folder)
    trl = run_trl(args.trl_python, model, train, held_out, args)
    tandem = run_tandem(args.trl_python, model, held_out, args.folder / "tandem", args)
    report(trl, tandem)


if __name__ == "__main__":
    main()
