"""What a resumed run is told differently from what it was started with, and whether that makes it another run."""

import json
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from tandem.commands.rl import SECTIONS, SHARED_KEYS
from tandem.config.base import Config
from tandem.config.lora import TARGETS
from tandem.config.shared import SchedulerConfig, lr_factor
from tandem.config.sources import Tree
from tandem.utils.errors import UserError, shorten
from tandem.utils.files import read_json
from tandem.utils.secrets import hidden, names_secret

logger = logging.getLogger(__name__)

# Options that change where, when and how fast things happen, or what is shown, but not what is learned.
HARMLESS = (
    *("output_dir", "show", "log_level", "deployment", "release_cache", "gpus.*", "max_restarts", "restart_delay_s"),
    *("slurm", "slurm.*", "ray.*"),
    *("checkpoint.*", "metrics.*", "client.*", "inference", "inference.*", "eval.*", "data.eval_path"),
    *("parallel.*", "device", "deterministic", "tokens_per_microbatch"),
    *("keep_weights", "keep_rollouts", "*timeout_s", "*retries", "max_failed_share", "env.tries", "env.check"),
)
UNTOLD = ("resume", "allow_changes", "clean", "dry_run", "threads")  # of a command or a machine, not of a run
# Of a model's config.json: with other values its weights have other shapes.
SHAPE_KEYS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
MAX_CHARS = 80


@dataclass(frozen=True)
class Change:
    key: str
    old: Any
    new: Any

    @property
    def is_harmless(self) -> bool:
        return any(fnmatchcase(self._option, pattern) for pattern in HARMLESS)

    @property
    def trains_other_parameters(self) -> bool:
        """Than the checkpoints hold, so that no run can go on from them."""
        if self._option == "lora.targets":
            return _projections(self.old) != _projections(self.new)
        if self._option == "loss.type":
            return "reward" in (self.old, self.new)  # a score head in place of the output matrix
        if self._option == "model.name":
            shapes = _model_shape(self.old), _model_shape(self.new)
            return None not in shapes and shapes[0] != shapes[1]
        return self._option in ("lora", "lora.rank", "model.impl")

    @property
    def _option(self) -> str:
        """Its key in `sft` and `align`, where it has one."""
        section, _, rest = self.key.partition(".")
        return rest if section in ("trainer", "orchestrator") else self.key

    def __str__(self) -> str:
        if names_secret(self.key):
            return f"{self.key} (not shown)"
        old, new = (shorten(repr(hidden(value)), MAX_CHARS) for value in (self.old, self.new))
        return f"{self.key} = {old} → {new}"


def review_changes(config: Config, stored: Path, step: int, *, allowed: bool) -> dict[str, list[Any]]:
    """Tell what differs from the configuration in `stored`; UserError where it would be another run and is not
    allowed to, or cannot go on from its checkpoints. `step` is where the run goes on from. Returns old and new values
    by key, for the record."""
    old = _read(stored, type(config))
    if old is None:
        return {}
    new = config.model_dump(mode="json")
    changes = find_changes(old, new)
    for change in changes:
        logger.info("resume: %s", change)
    if impossible := [str(change) for change in changes if change.trains_other_parameters]:
        raise UserError(
            f"resume: the checkpoints hold other parameters than these options train: {', '.join(impossible)}; give "
            "the old values, or start a new run from the model that "
            f"`export-model --run-dir {shlex.quote(str(stored.parent.parent))}` writes"
        )
    serious = [change for change in changes if not change.is_harmless and not _keeps_the_schedule(change, old, new)]
    if serious:
        told = ", ".join(str(change) for change in serious) + _rate_jump(old, new, step + 1)
        if not allowed:
            raise UserError(
                f"resume: these options change what the run learns ({stored}): {told}; give the old values, or "
                "continue anyway with --allow-changes"
            )
        logger.warning("resume: continues with options that change what is learned: %s", told)
    return {change.key: [hidden(change.old), hidden(change.new)] for change in changes if not names_secret(change.key)}


def find_changes(old: Tree, new: Tree) -> list[Change]:
    """By key, in the order of `new`; a value that several sections share is told once, at the top."""
    found = [change for change in _differences(old, new, "") if change.key.rpartition(".")[2] not in UNTOLD]
    shared = {change.key for change in found if change.key.split(".")[0] in SHARED_KEYS}
    return [change for change in found if _below_section(change.key) not in shared]


def _differences(old: Any, new: Any, key: str) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**new, **old}:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new and not _same_path(old, new):
        yield Change(key, old, new)


def _projections(targets: Sequence[str] | Literal["all-linear"]) -> set[str]:
    return set(TARGETS if targets == "all-linear" else targets)


def _model_shape(name: str) -> list[Any] | None:
    """What decides the shapes of a model's weights; None where that cannot be read."""
    try:
        config: Any = json.loads((Path(name) / "config.json").read_text())
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return [*(config[key] for key in SHAPE_KEYS), heads, kv_heads, head_dim]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _below_section(key: str) -> str | None:
    section, _, rest = key.partition(".")
    return rest if section in SECTIONS else None


def _same_path(old: Any, new: Any) -> bool:
    """Whether two texts name one place, from here."""
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    try:
        return Path(old).exists() and Path(old).resolve() == Path(new).resolve()
    except (OSError, ValueError):
        return False


def _keeps_the_schedule(change: Change, old: Tree, new: Tree) -> bool:
    """A run may be made longer or shorter where its learning rate does not depend on the length."""
    return change.key == "max_steps" and not (_scheduler(old).depends_on_length or _scheduler(new).depends_on_length)


def _rate_jump(old: Tree, new: Tree, step: int) -> str:
    """What the changes do to the learning rate, at the next step or at least later."""
    before, after = _rate(old, step), _rate(new, step)
    if before != after:
        return f" (the learning rate of step {step} becomes {after:.4g} instead of {before:.4g})"
    is_stretched = _trainer(old)["max_steps"] != _trainer(new)["max_steps"] and _scheduler(new).depends_on_length
    return f" (the learning rate, scheduler.{_shape(_scheduler(new))}, depends on it)" if is_stretched else ""


def _shape(scheduler: SchedulerConfig) -> str:
    if scheduler.type == "constant":
        return f"warmup_steps = {scheduler.warmup_steps:g}"
    return f"type = {scheduler.type!r}"


def _rate(tree: Tree, step: int) -> float:
    trainer = _trainer(tree)
    return trainer["optimizer"]["lr"] * lr_factor(step, trainer["max_steps"], _scheduler(tree))


def _scheduler(tree: Tree) -> SchedulerConfig:
    return SchedulerConfig.model_validate(_trainer(tree)["scheduler"])


def _trainer(tree: Tree) -> Mapping[str, Any]:
    return tree.get("trainer", tree)


def _read(stored: Path, cls: type[Config]) -> Tree | None:
    """The stored configuration with the defaults of options that have come since; None if there is none to read."""
    try:
        return cls.model_validate(read_json(stored)).model_dump(mode="json")
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{len(error.errors())} keys do not fit" if isinstance(error, ValidationError) else str(error)
        logger.warning("resume: options are not compared with those of the run: %s cannot be read (%s)", stored, reason)
        return None
