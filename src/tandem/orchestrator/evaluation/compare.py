"""What evaluations gave, as people read it, and two of them on the same tasks: which of them changed."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.table import Column, Table

from tandem.commands.evaluate import EvaluateConfig
from tandem.orchestrator.evaluation.scores import confidence
from tandem.utils.console import Console
from tandem.utils.errors import UserError, shorten
from tandem.utils.files import read_json, read_json_lines
from tandem.utils.log import printable

Rewards = Mapping[str, Sequence[float]]  # of each task
Sample = Mapping[str, Any]
Samples = Mapping[str, Sequence[Sample]]  # of each task
MOST_LINES = 10
SHORTEST_NAME = 12  # columns that a model's name is left in a table
MOST_CHARS = 400  # of a message or completion that is shown


@dataclass(frozen=True)
class Comparison:
    num_common: int
    difference: float  # of the mean reward, over the tasks that both have
    ci95: float  # half the width of its 95 % confidence interval
    better: list[tuple[str, float]]  # task and difference, largest first
    worse: list[tuple[str, float]]


def compare(before: Rewards, after: Rewards) -> Comparison | None:
    """None where no task is in both."""
    common = [task for task in after if task in before]
    if not common:
        return None
    changes = {task: statistics.fmean(after[task]) - statistics.fmean(before[task]) for task in common}
    ordered = sorted(changes.items(), key=lambda change: (-abs(change[1]), change[0]))
    return Comparison(
        num_common=len(common),
        difference=statistics.fmean(changes.values()),
        ci95=confidence([change for _, change in ordered]),
        better=[(task, change) for task, change in ordered if change > 0],
        worse=[(task, change) for task, change in ordered if change < 0],
    )


def read_results(path: Path, config: EvaluateConfig) -> list[dict[str, Any]]:
    """What `evaluate` has written, of the same tasks as it is asked for now."""
    try:
        written = read_json(path)
        results, earlier = written["results"], written["config"]
        asked = config.model_dump(mode="json")
        options = {f"env.{name}": (earlier["env"][name], asked["env"][name]) for name in ("id", "args")}
        options["split"] = (earlier["split"], asked["split"])
        for result in results:
            _ = result["target"], result["scores"]["reward"], result["tasks"].items()
        _ = results[-1]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"compare = '{path}' is no results.json of `evaluate`: {error}") from error
    for name, (before, now) in options.items():
        if before != now:
            raise UserError(f"compare = '{path}' is of other tasks: {name} was {before!r} and is {now!r}")
    return results


def read_samples(results: Path, target: str) -> Samples:
    """What was sampled from one model, from the file next to its results; nothing where that is gone."""
    samples: dict[str, list[dict[str, Any]]] = {}
    for line in read_json_lines(results.with_name(results.name.replace("results", "samples")).with_suffix(".jsonl")):
        if line.get("target") == target:
            samples.setdefault(str(line.get("task")), []).append(line)
    return samples


def refuse_other_tasks(path: Path, earlier: Mapping[str, Any], fingerprints: Mapping[str, str]) -> None:
    """UserError where a task is another than it was under the same number. Older results have no fingerprints."""
    before = earlier.get("fingerprints", {})
    common = [task for task in fingerprints if task in before]
    others = [task for task in common if before[task] != fingerprints[task]]
    if others:
        raise UserError(
            f"compare = '{path}' is of other tasks: {len(others)} of {len(common)}, task {others[0]} first, have "
            "another prompt or answer now; evaluate the earlier model again, or leave out --compare"
        )


def short_names(targets: Sequence[str]) -> list[str]:
    """The versions of a run, which come last, by their names in its directory; a model from elsewhere by its path."""
    versions = Path(targets[-1]).parent if len(targets) > 1 else None
    return [Path(target).name if Path(target).parent == versions else target for target in targets]


def show_results(results: Sequence[dict[str, Any]]) -> None:
    """One line a model, where a terminal is wide enough for all scores; else one line a score."""
    console = Console()
    table = _table(results, SHORTEST_NAME)
    console.print(_table(results) if console.fits(table) else _long_table(results))
    for result in results:
        for task, error in list(result["errors"].items())[:MOST_LINES]:
            console.print(f"{result['target']}, task {task}: {printable(error)}")


def _table(results: Sequence[dict[str, Any]], max_width: int | None = None) -> Table:
    """`max_width`: of the model's name, which may be wrapped."""
    names = _scores_of(results[0])
    numbers = [Column(name, no_wrap=True) for name in (*names, "tasks", "failed")]
    table = Table(Column("model", overflow="fold", max_width=max_width), *numbers)
    for model, result in zip(short_names([result["target"] for result in results]), results, strict=True):
        cells = [_with_confidence(result, name) for name in names]
        table.add_row(model, *cells, str(result["num_prompts"]), str(result["num_failed"]))
    return table


def _long_table(results: Sequence[dict[str, Any]]) -> Table:
    numbers = [Column(name, no_wrap=True) for name in ("score", "mean ± 95 %", "tasks", "failed")]
    table = Table(Column("model", overflow="fold"), *numbers)
    for model, result in zip(short_names([result["target"] for result in results]), results, strict=True):
        counts = str(result["num_prompts"]), str(result["num_failed"])
        for name in _scores_of(result):
            table.add_row(model, name, _with_confidence(result, name), *counts)
            model, counts = "", ("", "")  # once
        table.add_section()
    return table


def _scores_of(result: dict[str, Any]) -> list[str]:
    return [name for name in result["scores"] if not name.endswith("_ci95")]


def _with_confidence(result: dict[str, Any], name: str) -> str:
    return f"{result['scores'][name]:.3f} ± {result['scores'][f'{name}_ci95']:.3f}"


def show_comparison(
    before: dict[str, Any], after: dict[str, Any], samples_before: Samples, samples_now: Samples
) -> None:
    console = Console()
    comparison = compare(before["tasks"], after["tasks"])
    if comparison is None:
        console.print("the earlier evaluation has none of these tasks: nothing to compare")
        return
    console.print(
        f"against {before['target']}, on {comparison.num_common} tasks: reward {comparison.difference:+.3f} ± "
        f"{comparison.ci95:.3f}, {len(comparison.better)} tasks better, {len(comparison.worse)} worse",
    )
    for name, tasks in (("better", comparison.better), ("worse", comparison.worse)):
        for task, change in tasks[:MOST_LINES]:
            console.print(f"  {name}: task {task}, {change:+.3f}")
            if name == "worse":
                console.print(_what_was_said(samples_before.get(task, []), samples_now.get(task, [])))
        if len(tasks) > MOST_LINES:
            console.print(f"  and {len(tasks) - MOST_LINES} more that are {name}")


def _what_was_said(before: Sequence[Sample], now: Sequence[Sample]) -> Padding:
    """The prompt, the best completion that there was and the worst that there is."""
    grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 1))
    for message in [*before, *now][0]["messages"] if before or now else ():
        grid.add_row(f"{message['role']}:", _content(message))
    best, worst = max(before, key=_reward, default=None), min(now, key=_reward, default=None)
    for name, sample in (("before", best), ("now", worst)):
        if sample is not None:
            grid.add_row(f"{name} {_reward(sample):.3f}:", _said(sample))
    return Padding(grid, (0, 0, 0, 4), expand=False)


def _reward(sample: Sample) -> float:
    return sample["reward"]


def _said(sample: Sample) -> str:
    """The completion; of a conversation, all that followed the prompt."""
    if "completion" in sample:
        return shorten(sample["completion"], MOST_CHARS)
    return "\n".join(f"{message['role']}: {_content(message)}" for message in sample["conversation"])


def _content(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    return shorten(message.get("content") or (json.dumps(calls) if calls else ""), MOST_CHARS)
