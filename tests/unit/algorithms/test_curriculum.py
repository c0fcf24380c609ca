"""Difficulty pools: who goes where, what is skipped, and that a resumed run skips the same."""

from collections.abc import Callable

import pytest

from tandem.algorithms.curriculum import Curriculum, CurriculumConfig
from tandem.types.rollout import Group

MakeGroup = Callable[..., Group]
CONFIG = CurriculumConfig(easy_above=0.5, easy_share=0.2, hard_below=0.25, hard_share=0.6)


def make(easy: tuple[int, ...] = (), hard: tuple[int, ...] = (), seed: int = 3) -> Curriculum:
    return Curriculum(CONFIG, solved_reward=0.9, seed=seed, easy=easy, hard=hard)


def test_tasks_go_to_the_pool_of_their_latest_group(make_group: MakeGroup) -> None:
    curriculum = make(easy=(0,), hard=(1,))
    for group_id, rewards in enumerate([(1.0, 0.0), (0.9, 1.0), (0.5, 0.8)]):
        curriculum.count(make_group(group_id, rewards=rewards), place=group_id)
    assert (curriculum.easy, curriculum.hard) == ({0}, {1}), "nothing changes within a batch"
    curriculum.update()
    assert (curriculum.easy, curriculum.hard) == ({1}, {2})
    assert curriculum.metrics() == {"curriculum/easy": 1.0, "curriculum/hard": 1.0}


def test_a_solve_rate_at_a_bound_is_between_the_pools(make_group: MakeGroup) -> None:
    curriculum = make(easy=(0,), hard=(1,))
    curriculum.count(make_group(0, rewards=(1.0, 0.0)), place=0)
    curriculum.count(make_group(1, rewards=(1.0, 0.0, 0.0, 0.0)), place=1)
    curriculum.update()
    assert (curriculum.easy, curriculum.hard) == (set(), set())


def test_a_group_counts_for_one_batch(make_group: MakeGroup) -> None:
    """An order is counted again where a run is resumed, and a group is made again that was too stale."""
    curriculum = make()
    curriculum.count(make_group(7, rewards=(1.0, 1.0)), place=0)
    curriculum.update()
    curriculum.count(make_group(3, rewards=(0.0, 0.0)), place=0)
    curriculum.update()
    assert (curriculum.easy, curriculum.hard) == (set(), {0})


def test_of_two_groups_of_a_task_the_later_order_decides_whichever_finished_first(make_group: MakeGroup) -> None:
    curriculum = make()
    curriculum.count(make_group(14, rewards=(1.0, 1.0)), place=4)
    curriculum.count(make_group(4, rewards=(0.0, 0.0)), place=4)
    curriculum.update()
    assert (curriculum.easy, curriculum.hard) == ({4}, set())


@pytest.mark.parametrize(("place", "share"), [(0, 0.2), (1, 0.6), (2, 1.0)])
def test_the_share_of_visits_that_take_place(place: int, share: float) -> None:
    curriculum = make(easy=(0,), hard=(1,))
    visits = [not curriculum.skips(group_id, place) for group_id in range(2000)]
    assert sum(visits) / 2000 == pytest.approx(share, abs=0.03)


def test_what_is_skipped_depends_on_seed_order_and_pool_alone() -> None:
    first, again, other = make(easy=(0,)), make(easy=(0,)), make(easy=(0,), seed=4)
    group_ids = range(200)
    assert [first.skips(group_id, 0) for group_id in group_ids] == [
        again.skips(group_id, 0) for group_id in reversed(group_ids)
    ][::-1]
    assert [first.skips(group_id, 0) for group_id in group_ids] != [other.skips(group_id, 0) for group_id in group_ids]


def test_without_a_configuration_nothing_is_skipped_or_counted(make_group: MakeGroup) -> None:
    curriculum = Curriculum(None, solved_reward=1.0, seed=0)
    curriculum.count(make_group(0, rewards=(1.0, 1.0)), place=0)
    curriculum.update()
    assert not curriculum.easy and not curriculum.skips(0, 0) and curriculum.metrics() == {}


def test_pools_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="both pools"):
        CurriculumConfig(easy_above=0.3, hard_below=0.4)
