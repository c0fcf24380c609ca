"""Finished groups between generation and training. Owns staleness: which groups may start, which are too old.

With P prompts a step, version v and staleness s: steps up to v + 1 + s may train on rollouts started
now, so (v + 1 + s) * P groups may have been started in all, and `num_spare` more where stragglers are not waited for.
With `one_step_at_a_time`, no more than the step that is collected needs.
Dropped groups give their place back, and the caller samples them again.
"""

from tandem.types.rollout import Group


class GroupBuffer:
    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: int,
        start_step: int = 0,
        num_spare: int = 0,
        *,
        one_step_at_a_time: bool = False,
    ) -> None:
        self.prompts_per_step = prompts_per_step
        self.num_spare = num_spare
        self.max_staleness = max_staleness
        self.one_step_at_a_time = one_step_at_a_time
        self.num_started = start_step * prompts_per_step  # consumed, waiting or in flight; dropped ones leave
        self.num_dropped_stale = 0
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def waiting_group_ids(self) -> list[int]:
        return sorted(group.group_id for group in self._groups)

    def can_start(self, version: int, step: int) -> bool:
        """Whether a group started at `version` is sure to be trained on in time, or is one to spare for `step`."""
        num_spare = 0 if self.is_late(version, step) else self.num_spare
        num_steps = version + 1 + self.max_staleness
        if self.one_step_at_a_time:
            num_steps = min(num_steps, step)
        return self.num_started < num_steps * self.prompts_per_step + num_spare

    def is_late(self, version: int, step: int) -> bool:
        """Whether a group started at `version` is too old for `step`, whenever it finishes."""
        return (step - 1) - version > self.max_staleness

    def started(self) -> None:
        self.num_started += 1

    def give_up(self) -> None:
        """A started group will never arrive; another may take its place."""
        self.num_started -= 1

    def add(self, group: Group) -> None:
        self._groups.append(group)

    def drop_stale(self, step: int) -> list[int]:
        """Drop the groups that are too old for `step`; returns their ids."""
        stale = [group for group in self._groups if staleness(group, step) > self.max_staleness]
        self._groups = [group for group in self._groups if staleness(group, step) <= self.max_staleness]
        self.num_dropped_stale += len(stale)
        self.num_started -= len(stale)
        return sorted(group.group_id for group in stale)

    def take(self, step: int) -> list[Group] | None:
        """The oldest P groups, in the order of their tasks; None if there are too few. None of them may be stale."""
        assert all(staleness(group, step) <= self.max_staleness for group in self._groups)
        if len(self._groups) < self.prompts_per_step:
            return None
        self._groups.sort(key=lambda group: (group.oldest_version, group.group_id))
        taken, self._groups = self._groups[: self.prompts_per_step], self._groups[self.prompts_per_step :]
        return sorted(taken, key=lambda group: group.group_id)


def staleness(group: Group, step: int) -> int:
    """Training step n turns version n-1 into n; a group ages with its oldest token."""
    return (step - 1) - group.oldest_version
