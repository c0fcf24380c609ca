"""What evaluations gave, as people read it, and two of them on the same tasks: which of them changed."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from tandem.config.evaluate import EvaluateConfig
from tandem.orchestrator.scores import confidence
from tandem.utils.console import Console
from tandem.utils.errors import UserError
from tandem.utils.files import read_json
from tandem.utils.log import printable

Rewards = Mapping[str, Sequence[float]]  # of each task
MOST_LINES = 10


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
        ci95=confidence(list(changes.values())),
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
    if len(targets) == 1:
        return list(targets)
    versions = Path(targets[-1]).parent
    return [Path(target).name if Path(target).parent == versions else target for target in targets]


def show_results(results: Sequence[dict[str, Any]]) -> None:
    """One line a model."""
    names = [name for name in results[0]["scores"] if not name.endswith("_ci95")]
    table = Table(Column("model", overflow="fold"), *names, "tasks", "failed")
    for model, result in zip(short_names([result["target"] for result in results]), results, strict=True):
        scores = result["scores"]
        cells = [f"{scores[name]:.3f} ± {scores[f'{name}_ci95']:.3f}" for name in names]
        table.add_row(model, *cells, str(result["num_prompts"]), str(result["num_failed"]))
    console = Console()
    console.print(table)
    for result in results:
        for task, error in list(result["errors"].items())[:MOST_LINES]:
            console.print(f"{result['target']}, task {task}: {printable(error)}")


def show_comparison(before: dict[str, Any], after: dict[str, Any]) -> None:
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
