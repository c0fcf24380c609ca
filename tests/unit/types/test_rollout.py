"""What a conversation, and a group of them, say of all of their turns."""

from dataclasses import replace

import pytest

from tandem.types.rollout import Completion, Group, Rollout, Task, Turn, require_logprobs


def turn(*versions: int, reason: str = "stop", begins: bool = False) -> Turn:
    """As many tokens as versions."""
    completion = Completion([7] * len(versions), [-0.5] * len(versions), list(versions), reason)
    return Turn([1, 2], completion, begins_sequence=begins)


def conversation(first: Turn, *later: Turn) -> Rollout:
    return Rollout([1, 2], first.completion, "text", 0.5, later=later)


TALK = conversation(turn(4), turn(3, 3, 4), turn(4, 5))


def test_tokens_are_those_of_all_turns_and_the_longest_is_one_of_them() -> None:
    assert (TALK.num_sampled, TALK.longest_turn) == (6, 3)
    assert (conversation(turn(4)).num_sampled, conversation(turn(4)).longest_turn) == (1, 1)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    assert TALK.oldest_version == 3
    rollouts = [conversation(turn(4)), TALK, conversation(turn(5), turn(6))]
    assert Group(Task(0, [], ""), 0, rollouts).oldest_version == 3


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_turn_that_was_cut_off_is_enough(place: int) -> None:
    turns = [turn(1), turn(1), turn(1)]
    assert not conversation(*turns).is_truncated
    turns[place] = turn(1, reason="length")
    assert conversation(*turns).is_truncated


def test_a_sequence_goes_on_until_a_turn_begins_another() -> None:
    again, last = turn(1, begins=True), turn(2)
    talk = conversation(turn(4), turn(3), again, last)
    first, second = talk.sequences
    assert [len(first), len(second)] == [2, 2] and second == [again, last]
    assert talk.turns == [*first, *second] and first[0].begins_sequence


def test_without_rewards_of_turns_nothing_was_earned_before_the_end() -> None:
    assert TALK.earned == [0.0, 0.0, 0.0]
    assert replace(TALK, earned_before=[0.0, 0.25, 0.25]).earned == [0.0, 0.25, 0.25]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 0.5, None])
def test_a_logprob_that_no_token_can_have_is_refused_with_its_place(bad: float | None) -> None:
    require_logprobs([-0.5, 0.0], "here")
    with pytest.raises(ValueError, match=r"here: the log-prob of a sampled token must be .*; token 1 of 3 has"):
        require_logprobs([-0.5, bad, 0.0], "here")
