"""Staleness: who may start, who is too old, who is taken."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.orchestrator.buffer import GroupBuffer, staleness
from tandem.types.rollout import Completion, Group, Rollout, Task


def num_startable(buffer: GroupBuffer, version: int, step: int = 1) -> int:
    count = 0
    while buffer.can_start(version, step):
        buffer.started()
        count += 1
    return count


def test_staleness_by_hand(make_group) -> None:
    """Step 3 trains version 2: tokens of version 2 are fresh, those of version 0 are two behind."""
    assert staleness(make_group(0, version=2), step=3) == 0
    assert staleness(make_group(0, version=0), step=3) == 2


def test_on_policy_starts_one_batch_a_version() -> None:
    buffer = GroupBuffer(prompts_per_step=4, max_staleness=0)
    assert [num_startable(buffer, version) for version in (0, 0, 1, 2)] == [4, 0, 4, 4]


def test_staleness_of_one_starts_one_batch_ahead() -> None:
    buffer = GroupBuffer(prompts_per_step=4, max_staleness=1)
    assert [num_startable(buffer, version) for version in (0, 1, 2)] == [8, 4, 4]


def test_staleness_of_two_starts_two_batches_ahead() -> None:
    buffer = GroupBuffer(prompts_per_step=3, max_staleness=2)
    assert [num_startable(buffer, version) for version in (0, 1, 3)] == [9, 3, 6]


def test_groups_to_spare_are_started_only_for_a_step_that_can_still_use_them() -> None:
    """On-policy, what starts at version 0 is of use for step 1 only."""
    buffer = GroupBuffer(prompts_per_step=4, max_staleness=0, num_spare=2)
    assert num_startable(buffer, version=0, step=1) == 6
    buffer.give_up()
    assert num_startable(buffer, version=0, step=2) == 0
    assert num_startable(buffer, version=1, step=2) == 5


def test_a_resumed_run_counts_what_was_trained_before() -> None:
    assert num_startable(GroupBuffer(prompts_per_step=4, max_staleness=0, start_step=5), version=5) == 4


def test_a_batch_waits_until_it_is_full(make_group) -> None:
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=0)
    assert buffer.take(1) is None
    buffer.add(make_group(1))
    assert buffer.take(1) is None and len(buffer) == 1
    buffer.add(make_group(0))
    taken = buffer.take(1)
    assert taken is not None and [group.group_id for group in taken] == [0, 1]
    assert len(buffer) == 0


def test_the_oldest_go_first_and_lie_in_the_order_of_their_tasks(make_group) -> None:
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=1)
    for group_id, version in ((5, 1), (1, 1), (9, 0), (7, 1)):
        buffer.add(make_group(group_id, version))
    assert buffer.waiting_group_ids == [1, 5, 7, 9]
    first, second = buffer.take(2), buffer.take(2)
    assert first is not None and [group.group_id for group in first] == [1, 9]
    assert second is not None and [group.group_id for group in second] == [5, 7]


def test_a_group_that_is_too_old_is_dropped_and_gives_its_place_back(make_group) -> None:
    buffer = GroupBuffer(prompts_per_step=1, max_staleness=1)
    assert num_startable(buffer, version=0) == 2
    buffer.add(make_group(0, version=0))
    buffer.add(make_group(1, version=0))
    assert buffer.drop_stale(2) == []
    assert buffer.drop_stale(3) == [0, 1]  # two behind, one is allowed
    assert buffer.take(3) is None
    assert (len(buffer), buffer.num_dropped_stale) == (0, 2)
    assert num_startable(buffer, version=0) == 2


def test_a_group_ages_with_its_oldest_token(make_group) -> None:
    group = make_group(0, version=3)
    group.rollouts[1].completion.versions[0] = 1
    assert staleness(group, step=4) == 2


def test_giving_up_frees_a_place() -> None:
    buffer = GroupBuffer(prompts_per_step=2, max_staleness=0)
    assert num_startable(buffer, 0) == 2
    buffer.give_up()
    assert num_startable(buffer, 0) == 1


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(0, 3), st.data())
def test_any_finishing_order_gives_full_fresh_batches(
    prompts_per_step: int, max_staleness: int, data: st.DataObject
) -> None:
    """The loop in miniature: groups finish and versions arrive in any order. Nothing is lost or used twice."""
    buffer = GroupBuffer(prompts_per_step, max_staleness)
    version, step, next_order = 0, 1, 0
    in_flight: dict[int, int] = {}
    used: list[int] = []
    anew: list[int] = []
    while step <= 5:
        while buffer.can_start(version, version + 1):
            buffer.started()
            if anew:
                in_flight[anew.pop(0)] = version
                continue
            in_flight[next_order] = version
            next_order += 1
        # The trainer makes version n of batch n: there are never more versions than batches.
        moves = [*sorted(in_flight), *(["version"] if version < step - 1 else [])]
        assert moves, "nothing is under way and the batch is not full: the run would stand still"
        move = data.draw(st.sampled_from(moves))
        if move == "version":
            version += 1
        else:
            completion = Completion([1], [0.0], [in_flight.pop(move)], "stop")
            buffer.add(Group(Task(move, [], ""), move, [Rollout([1], completion, "", 0.0)]))
        anew += buffer.drop_stale(step)
        batch = buffer.take(step)
        if batch is not None:
            assert len(batch) == prompts_per_step
            assert all(0 <= staleness(group, step) <= max_staleness for group in batch)
            used += [group.group_id for group in batch]
            step += 1
    assert len(set(used)) == len(used) == 5 * prompts_per_step
    assert next_order == len(used) + len(in_flight) + len(buffer) + len(anew)


def test_one_step_at_a_time_no_more_is_started_than_the_step_needs() -> None:
    buffer = GroupBuffer(2, max_staleness=1, one_step_at_a_time=True)
    for step, expected in ((1, 2), (2, 4), (3, 4)):
        while buffer.can_start(0, step):
            buffer.started()
        assert buffer.num_started == expected
