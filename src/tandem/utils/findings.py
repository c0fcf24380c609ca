"""Rules on metrics: what a researcher would notice in the curves of a run, in one sentence, and what to try.

Rules read rows of metrics.jsonl and nothing else, so that the log, the display, the summary and `rl --status` say the
same. docs/reliability.md says what each rule needs. utils.metrics feeds them with the rows of a run as they come.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.utils.files import is_number

Row = Mapping[str, Any]  # a line of metrics.jsonl
Check = Callable[["History"], "Finding | None"]

NUM_FIRST, NUM_LAST = 5, 20  # rows that are kept of each metric
REPEATED = 3  # a step is an accident, so many in a row are not
ENOUGH_GROUPS = 8
TRUNCATED, WITHOUT_SIGNAL = "completions/truncated", "groups/without_signal"
REWARD_STATISTICS = ("reward/mean", "reward/std", "reward/min", "reward/max", "reward/shaped_mean")
WATCHED = (TRUNCATED, WITHOUT_SIGNAL, "groups/total", "entropy", "mismatch_kl", "teacher_kl", "grad_norm")
LONGER = "Try a larger sampling.max_tokens (and seq_len), a prompt that asks for short answers, or sft first"


@dataclass(frozen=True)
class Finding:
    code: str
    severity: Literal["note", "warning", "error"]  # error: nothing is learned
    message: str
    advice: str

    def __str__(self) -> str:
        return f"{self.message}. {self.advice}"


class Series:
    """A metric by step: its first values and its last ones, and the extremes of all."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, step: int, value: float) -> None:
        # A run that goes back to a checkpoint does steps again.
        self.values = {known: old for known, old in self.values.items() if known < step} | {step: value}
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        if len(self.values) > NUM_FIRST + NUM_LAST:
            del self.values[list(self.values)[NUM_FIRST]]

    def first(self) -> list[float]:
        return list(self.values.values())[:NUM_FIRST]

    def last(self, count: int) -> list[float]:
        """Of so many steps; nothing where there were fewer."""
        return list(self.values.values())[-count:] if len(self.values) >= count else []


class History:
    """What rules look at."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}

    def add(self, row: Row) -> bool:
        """Whether the row has anything that rules look at."""
        watched = {name: value for name, value in row.items() if name in WATCHED or name.startswith("reward/")}
        for name, value in watched.items():
            if is_number(value) and math.isfinite(value):
                self.series.setdefault(name, Series()).add(row["step"], value)
        return bool(watched)

    def __getitem__(self, name: str) -> Series:
        """Of a metric that the run does not have, an empty one."""
        return self.series.get(name, Series())

    def __contains__(self, name: str) -> bool:
        return name in self.series


class Watch:
    """Takes rows one by one: `current` are the findings of now, `since` the step at which each was first made."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.current: list[Finding] = []
        self.since: dict[str, int] = {}
        self._history = History()
        for row in rows:
            self.take(row)

    def take(self, row: Row) -> list[Finding]:
        """The findings that this row is the first to show."""
        if not self._history.add(row):
            return []
        self.current = check(self._history)
        new = [finding for finding in self.current if finding.code not in self.since]
        self.since |= {finding.code: row["step"] for finding in new}
        return new


def check(history: History) -> list[Finding]:
    """What explains others stands for them: of a run without signal, no more is said."""
    if (nothing_learned := no_signal(history) or no_gradient(history)) is not None:
        return [nothing_learned]
    return [finding for rule in RULES if (finding := rule(history)) is not None]


def no_signal(history: History) -> Finding | None:
    """Groups whose rewards are equal have advantages of 0. Where an objective learns from something else (a critic, a
    teacher model, penalties on length), the gradient decides."""
    steps = _unbroken_steps(history, WITHOUT_SIGNAL)
    if not steps:
        return None
    norms = [norm for step, norm in history["grad_norm"].values.items() if step in steps]
    rewards = {value for name in ("reward/min", "reward/max") for value in history[name].last(len(steps))}
    has_other_signal = "teacher_kl" in history or "reward/shaped_mean" in history
    is_still = bool(norms) and max(norms) == 0
    if not is_still and (len(rewards) != 1 or has_other_signal):
        return None
    reason, advice = _why_equal(history, rewards, len(steps))
    learned = "only other terms of the loss still train the model" if norms and not is_still else "nothing is learned"
    return Finding("no_signal", "error", f"all groups have equal rewards, {learned}: {reason}", advice)


def _why_equal(history: History, rewards: set[float], num_steps: int) -> tuple[str, str]:
    """The reason and what to try."""
    is_paid = len(rewards) == 1 and max(rewards) > 0
    if not is_paid and (truncated := statistics.fmean(history[TRUNCATED].last(num_steps) or [0.0])) >= 0.95:
        return f"{truncated:.0%} of the completions are truncated", LONGER
    if len(rewards) != 1:
        return "each prompt is solved always or never", (
            "Try tasks of medium difficulty, a larger group_size or sampling.temperature, or filters.equal_rewards"
        )
    (reward,) = rewards
    if not is_paid:
        return f"every reward is {reward:g}", (
            "Read samples/: if right answers are there, the reward function misses them; if not, try easier tasks, a "
            "larger group_size, or sft first"
        )
    return f"every reward is {reward:g}", (
        "If the tasks are solved, try harder ones or end the run; if not, the reward function does not tell good "
        "completions from bad ones: read samples/"
    )


def no_gradient(history: History) -> Finding | None:
    """Steps without signal are left to the rule on signal: of few groups, some steps have none."""
    norms = history["grad_norm"].last(REPEATED)
    last_steps = list(history["grad_norm"].values)[-REPEATED:]
    is_explained = any(history[WITHOUT_SIGNAL].values.get(step) == 1 for step in last_steps)
    if not norms or max(norms) > 0 or is_explained:
        return None
    return Finding(
        "no_gradient",
        "error",
        f"the gradient was 0 in the last {REPEATED} steps, nothing is learned",
        "Look for a loss that masks every token (loss.correction, masked_fraction), rows without learned tokens, or a "
        "loss that does not depend on the model",
    )


def all_truncated(history: History) -> Finding | None:
    steps = _unbroken_steps(history, TRUNCATED)
    if not steps:
        return None
    return Finding("all_truncated", "warning", f"every completion of the last {len(steps)} steps was truncated", LONGER)


def entropy_collapsed(history: History) -> Finding | None:
    """A tenth of what it was, and little by any measure. Where tasks are nearly solved, that is how it should be."""
    entropy, rewards = history["entropy"], history["reward/mean"].last(NUM_FIRST)
    if not rewards or len(entropy.values) < 2 * NUM_FIRST:
        return None
    before, now = statistics.fmean(entropy.first()), max(entropy.last(NUM_FIRST))
    worst, best = history["reward/min"].lowest, history["reward/max"].highest
    is_solved = best > worst and statistics.fmean(rewards) >= worst + 0.9 * (best - worst)
    if is_solved or now > 0.05 or now > before / 10:
        return None
    return Finding(
        "entropy_collapsed",
        "warning",
        f"the entropy has collapsed from {before:.3g} to {now:.3g} while rewards are not at their best: the policy "
        "no longer explores",
        "Go back to a checkpoint before it, with a lower optimizer.lr, loss.entropy_coef above 0 or a larger "
        "loss.clip_high",
    )


def mismatch_growing(history: History) -> Finding | None:
    mismatch = history["mismatch_kl"]
    if len(mismatch.values) < 2 * NUM_FIRST:
        return None
    before, now = statistics.fmean(mismatch.first()), mismatch.last(NUM_FIRST)
    if min(now) < 0.02 or statistics.fmean(now) < 5 * before:
        return None
    return Finding(
        "mismatch_growing",
        "warning",
        f"the mismatch between engine and trainer has grown from {before:.2g} to {statistics.fmean(now):.2g} "
        "(mismatch_kl): rollouts are no longer the policy's own",
        "Try a lower max_staleness or optimizer.lr, loss.correction, or model.dtype = 'float32'",
    )


def gradient_spikes(history: History) -> Finding | None:
    """Of the last steps, two or more that are far above the median of those with a gradient."""
    norms = [norm for norm in history["grad_norm"].last(NUM_LAST) if norm > 0]
    if len(norms) < NUM_LAST // 2:
        return None
    median = statistics.median(norms)
    spikes = [norm for norm in norms if norm > 10 * median]
    if len(spikes) < 2:
        return None
    return Finding(
        "gradient_spikes",
        "warning",
        f"the gradient norm had {len(spikes)} spikes in the last {NUM_LAST} steps, up to {max(spikes):.3g} where the "
        f"median is {median:.3g}",
        "Try a lower optimizer.lr, a lower optimizer.max_grad_norm, or larger batches",
    )


def constant_reward_parts(history: History) -> Finding | None:
    parts = {name: series for name, series in history.series.items() if name.startswith("reward/")}
    parts = {name: series for name, series in parts.items() if name not in REWARD_STATISTICS}
    constant = {
        name.removeprefix("reward/"): series.lowest
        for name, series in parts.items()
        if len(series.values) >= 2 * NUM_FIRST and math.isclose(series.lowest, series.highest, abs_tol=1e-9)
    }
    if not constant:
        return None
    values = ", ".join(f"{name} was always {value:g}" for name, value in constant.items())
    return Finding(
        "constant_reward_part",
        "note",
        f"a part of the reward never changes, so nothing is learned from it: {values}",
        "Read samples/ to see whether it measures what it should; else leave it out",
    )


RULES: tuple[Check, ...] = (
    all_truncated,
    entropy_collapsed,
    mismatch_growing,
    gradient_spikes,
    constant_reward_parts,
)


def _unbroken_steps(history: History, share: str) -> list[int]:
    """The last steps in which a share was 1, where they are enough to mean something."""
    values, num_groups = history[share].values, history["groups/total"].values
    steps = list(itertools.takewhile(lambda step: values[step] == 1, reversed(values)))[:NUM_LAST]
    is_enough = not num_groups or sum(num_groups.get(step, 0) for step in steps) >= ENOUGH_GROUPS
    return steps if len(steps) >= REPEATED and is_enough else []
