"""Groups made by hand."""

from collections.abc import Callable

import pytest

from tandem.types.rollout import Completion, Group, Rollout, Task

MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group() -> MakeGroup:
    def make(group_id: int, version: int = 0, rewards: tuple[float, ...] = (1.0, 0.0)) -> Group:
        """Completions of 1, 2, … tokens after a prompt of two."""
        rollouts = [
            Rollout(
                prompt_ids=[10, 11],
                completion=Completion(
                    token_ids=[20 + index] * (index + 1),
                    logprobs=[-0.5] * (index + 1),
                    versions=[version] * (index + 1),
                    finish_reason="stop",
                ),
                text="x" * (index + 1),
                reward=reward,
            )
            for index, reward in enumerate(rewards)
        ]
        return Group(Task(group_id, [{"role": "user", "content": "x"}], "y"), group_id, rollouts)

    return make
