"""samples/*.jsonl: every rollout as people read it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.orchestrator.batches import Advantage
from tandem.types.rollout import Group, Rollout
from tandem.utils.files import json_bytes, write_atomic


def write_samples(path: Path, groups: Sequence[Group], advantages: Sequence[Sequence[Advantage]] | None) -> None:
    """One line a rollout."""
    lines = []
    for number, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            line = {
                **group.task.identity,
                "messages": group.task.messages,
                "answer": group.task.answer,
                "completion": rollout.text,
                "reward": rollout.reward,
                "finish_reason": rollout.turns[-1].completion.finish_reason,
                "num_tokens": rollout.num_sampled,
                "oldest_version": rollout.oldest_version,
            }
            line |= _of_conversations(rollout)
            if advantages is not None:
                line["advantage"] = advantages[number][index]
            lines.append(json_bytes(line))
    write_atomic(path, b"\n".join(lines) + b"\n", flush=False)


def _of_conversations(rollout: Rollout) -> dict[str, Any]:
    """What only some rollouts have: rewards by name, and how a conversation went."""
    found = {"rewards": rollout.rewards, "metrics": rollout.metrics, "ended": rollout.ended, "turns": rollout.messages}
    return {name: value for name, value in found.items() if value}
