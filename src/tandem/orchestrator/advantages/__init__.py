"""How rewards become advantages: pure functions, chosen by `advantage.type`."""

from collections.abc import Callable

from tandem.config.advantages import AdvantageConfig, AdvantageType
from tandem.orchestrator.advantages.functions import (
    Advantages,
    Groups,
    dr_grpo_advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    reward_advantages,
    rloo_advantages,
    zero_advantages,
)

# The rewards of all groups of a batch to their advantages.
AdvantageFunction = Callable[[Groups], Advantages]

FUNCTIONS: dict[AdvantageType, AdvantageFunction] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
    "reward": reward_advantages,
    "none": zero_advantages,
}


def make_advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    return FUNCTIONS[config.type]
