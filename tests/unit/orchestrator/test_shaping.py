"""The penalty on long completions, by hand and against TRL's."""

import pytest

from tandem.config.advantages import OverlongConfig
from tandem.orchestrator.shaping import overlong_penalty, shape_rewards, shaping_metrics


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, 0.1), (90, 1.0), (95, 1.5), (100, 2.0), (120, 2.0)],
)
def test_the_penalty_grows_over_the_buffer(num_tokens: int, penalty: float) -> None:
    """At most 100 tokens, a buffer of 20, a penalty of 2: a tenth for each token beyond 80."""
    assert overlong_penalty(num_tokens, max_tokens=100, buffer_tokens=20, penalty=2.0) == pytest.approx(penalty)


@pytest.mark.filterwarnings("ignore")
def test_it_is_the_penalty_of_trl() -> None:
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)
    lengths = range(1, 13)
    ours = [-overlong_penalty(length, max_tokens=10, buffer_tokens=4, penalty=1.0) for length in lengths]
    assert ours == pytest.approx(theirs([[0] * length for length in lengths]))


def test_rewards_of_groups(make_group) -> None:
    """Completions of one, two and three tokens; the buffer is the last two of three."""
    groups = [make_group(0, rewards=(1.0, 1.0, 1.0)), make_group(1, rewards=(0.0, 0.5))]
    overlong = OverlongConfig(buffer_tokens=2, penalty=0.5)
    assert shape_rewards(groups, 3, overlong) == [[1.0, 0.75, 0.5], [0.0, 0.25]]
    assert shaping_metrics(groups, 3, overlong) == pytest.approx(
        {"reward/shaped_mean": 0.5, "completions/overlong": 0.6}
    )


def test_without_the_option_rewards_stay_as_they_are(make_group) -> None:
    groups = [make_group(0, rewards=(1.0, 0.0))]
    assert shape_rewards(groups, 3, None) == [[1.0, 0.0]]
    assert shaping_metrics(groups, 3, None) == {}
