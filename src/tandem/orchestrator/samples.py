"""samples/*.jsonl: every rollout as people read it."""

from collections.abc import Sequence
from pathlib import Path

import orjson

from tandem.types.rollout import Group


def write_samples(path: Path, groups: Sequence[Group], advantages: Sequence[list[float]] | None) -> None:
    """One line a rollout. Written aside and renamed, so that a reader never sees half of it."""
    lines = []
    for number, group in enumerate(groups):
        for index, rollout in enumerate(group.rollouts):
            line = {
                "task": group.task.index,
                "messages": group.task.messages,
                "answer": group.task.answer,
                "completion": rollout.text,
                "reward": rollout.reward,
                "finish_reason": rollout.completion.finish_reason,
                "num_tokens": len(rollout.completion.token_ids),
                "oldest_version": rollout.oldest_version,
            }
            if advantages is not None:
                line["advantage"] = advantages[number][index]
            lines.append(orjson.dumps(line))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(b"\n".join(lines) + b"\n")
    temporary.replace(path)
