"""What an evaluation says of a model: mean rewards and pass@k over tasks, with confidence intervals. Pure functions."""

import math
import statistics
from collections.abc import Sequence

Z95 = 1.96  # 95 % of a normal distribution lie within so many standard deviations


def summarize(groups: Sequence[Sequence[float]], solved_reward: float) -> dict[str, float]:
    """Of the rewards of each task's samples: the mean (avg@k, with k samples) and pass@1, pass@2, pass@4 … up to the
    number of samples. `…_ci95` is half the width of the 95 % confidence interval, over tasks."""
    num_samples = min(len(rewards) for rewards in groups)
    columns = {"reward": [statistics.fmean(rewards) for rewards in groups]}
    for k in passes(num_samples):
        columns[f"pass@{k}"] = [pass_at(k, rewards, solved_reward) for rewards in groups]
    return {
        name: value
        for column, values in columns.items()
        for name, value in ((column, statistics.fmean(values)), (f"{column}_ci95", confidence(values)))
    }


def passes(num_samples: int) -> list[int]:
    """1, 2, 4 … and the number of samples itself."""
    powers = [2**power for power in range(num_samples.bit_length())]
    return sorted({*powers, num_samples})


def pass_at(k: int, rewards: Sequence[float], solved_reward: float) -> float:
    """The probability that of k samples, drawn from these without putting back, at least one is solved."""
    num_failed = sum(reward < solved_reward for reward in rewards)
    return 1 - math.comb(num_failed, k) / math.comb(len(rewards), k)


def confidence(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of a mean, by the normal approximation; of one value, nan."""
    return Z95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
