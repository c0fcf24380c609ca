"""Options of what a training batch is made of, for the orchestrator and for the loop of the Python API."""

from pydantic import Field

from tandem.algorithms.filters import FilterConfig
from tandem.algorithms.length_penalties import LengthPenaltyConfig, OverlongConfig
from tandem.config.base import Config
from tandem.config.shared import MetricsConfig


class BatchOptions(Config):
    """How many rollouts a batch has, what becomes of their rewards, and what is left out."""

    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts (groups) in a training batch."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts of each prompt. prompts_per_step x group_size = rollouts per step."""

    overlong: OverlongConfig | None = None
    """Penalize long completions. Left out: no penalty."""

    length_penalty: LengthPenaltyConfig | None = None
    """Prefer short completions. Left out: no preference."""

    solved_reward: float = 1.0
    """A rollout with at least this reward counts as solved: in the curriculum, in length_penalty and in pass@k."""

    filters: FilterConfig = FilterConfig()

    metrics: MetricsConfig = MetricsConfig()

    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """End the run when more than this share of the rollouts of 64 groups failed. 0: at the first failure. 1: never."""
