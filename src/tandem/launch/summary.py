"""The last words of a run: held-out reward before and after, the curve, where everything is, what to try next."""

import shlex
import sys

from rich.text import Text

from tandem.launch.progress import FINDING_STYLES, plot
from tandem.utils.console import Console
from tandem.utils.findings import Watch
from tandem.utils.metrics import read_metrics
from tandem.utils.run_dir import RunDir


def print_summary(console: Console, run_dir: RunDir, seconds: float) -> None:
    lines = read_metrics(run_dir)
    # A resumed run writes the steps after its checkpoint again: the last line of a step counts.
    steps = {line["step"]: line for line in lines if "reward/mean" in line}
    rewards = [steps[step]["reward/mean"] for step in sorted(steps)]
    held_out = [(line["step"], line["eval/reward"]) for line in lines if "eval/reward" in line]
    staleness = max((line["staleness/max"] for line in lines if "staleness/max" in line), default=0)
    tokens = sum(line["completion_tokens/total"] for line in lines if "completion_tokens/total" in line)
    console.print()
    if held_out:
        (_, before), (last, after) = held_out[0], held_out[-1]
        told = f"[bold]Held-out reward[/] {before:.3f} before, [bold green]{after:.3f}[/] after {last} steps"
        console.print(told, markup=True)
    console.print(f"{len(rewards)} steps in {seconds:.0f} s, {tokens:,} sampled tokens, staleness at most {staleness}")
    console.print("\nTraining reward")
    for row in plot(rewards, width=60, height=6):
        console.print(Text(row, style="green"))
    print_findings(console, Watch(lines))
    merged = run_dir.merged / "latest"  # there where an adapter was trained
    weights = merged if merged.exists() else run_dir.weights / "latest"
    command = shlex.join([f"{sys.executable.rsplit('/', 1)[0]}/inference", "--model.name", str(weights)])
    places = f"""
Run directory   {run_dir.root}
Trained model   {weights}
Rollouts        {run_dir.samples(max(steps, default=0))}

Talk to it:     {command}"""
    console.print(places, highlight=False, soft_wrap=True)


def print_findings(console: Console, watch: Watch) -> None:
    """What the run ended with; of what was over by then, the step at which it began."""
    for finding in watch.current:
        text = f"\nSince step {watch.since[finding.code]}: {finding.message}.\n{finding.advice}."
        console.print(Text(text, style=FINDING_STYLES[finding.severity]), soft_wrap=not console.is_terminal)
    held = [finding.code for finding in watch.current]
    over = [f"{code.replace('_', ' ')} at step {step}" for code, step in watch.since.items() if code not in held]
    if over:
        console.print(f"\nFound earlier, and over at the end: {', '.join(over)}", soft_wrap=not console.is_terminal)
