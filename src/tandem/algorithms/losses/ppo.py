"""PPO: the clipped ratio with a critic. Advantages from values (https://arxiv.org/abs/1506.02438), and the loss of
values (https://arxiv.org/abs/1707.06347). Pure functions of per-token streams.

rewards  0 0 0 R  (− coef · k of each token, where the KL is in the reward)
values   v₁ v₂ v₃ v₄     v_t is the critic's estimate of the reward-to-go of token t, before it is sampled
"""

from pydantic import Field

from tandem.algorithms.losses.clipping import ClipOptions, clipped_tokens
from tandem.algorithms.losses.kind import LossOutput, PolicyLoss
from tandem.algorithms.metrics import loss_part, mean_of
from tandem.algorithms.objective.kl import KlConfig, kl_rewards
from tandem.algorithms.sequences import discounted_sums, is_last_token
from tandem.algorithms.tensors import Tensor
from tandem.config.base import Config

EPSILON = 1e-8


class PpoConfig(Config):
    """The critic of loss.type = "ppo"."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount factor per token."""

    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of generalized advantage estimation. 1: full returns. Lower λ bootstraps more from the critic; while that is
    untrained, early tokens are biased."""

    value_clip: float | None = Field(default=0.2, gt=0)
    """Clip values to within this of their values before the batch. None: no clipping."""

    value_coef: float = Field(default=0.1, gt=0)
    """Weight of the critic's loss."""

    critic_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the value head. None: optimizer.lr."""

    whiten: bool = True
    """Normalize the advantages of a step to mean 0 and variance 1."""


def gae(rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """δ_t = r_t + γ v_(t+1) − v_t; A_t = δ_t + γ λ A_(t+1); returns A_t + v_t. Nothing follows the last token.

    All of it (tokens,), without gradient; a sequence that was cut short counts as ended.
    """
    values = values.detach()
    next_values = values.roll(-1).masked_fill(is_last_token(sequences), 0)
    errors = rewards + gamma * next_values - values
    advantages = discounted_sums(errors, sequences, gamma * lam)
    return advantages, advantages + values


def token_rewards(
    rewards: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor | None, sequences: Tensor, kl: KlConfig
) -> Tensor:
    """The reward of a sequence at its last token (`rewards` has it at each), and of every token what the KL takes."""
    at_end = rewards.masked_fill(~is_last_token(sequences), 0)
    if kl.coef == 0 or kl.place != "reward":
        return at_end
    assert reference_logprobs is not None
    return at_end + kl_rewards(old_logprobs, reference_logprobs, kl.estimator, kl.coef)


def moment_sums(values: Tensor) -> Tensor:
    """(3,), float64: count, sum and sum of squares; those of ranks are added before `whiten`."""
    values = values.double()
    sums = values.new_zeros(3)
    sums[0], sums[1], sums[2] = len(values), values.sum(), values.square().sum()
    return sums


def whiten(values: Tensor, sums: Tensor) -> Tensor:
    """(v − mean) / (std + ε), with the mean and the population standard deviation of all that `sums` counts."""
    count, total, squares = sums
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    return ((values - mean) / (std + EPSILON)).to(values.dtype)


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """½ max((v − R)², (clip(v, v_old ± clip) − R)²) of each token, and where the second one counts."""
    errors = (values - returns).square()
    if clip is None:
        return errors / 2, errors < 0
    held = values.minimum(old_values + clip).maximum(old_values - clip)
    held_errors = (held - returns).square()
    return errors.maximum(held_errors) / 2, held_errors > errors


def critic_loss(values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, config: PpoConfig) -> LossOutput:
    """Weighted sum over tokens, to be added to the policy's and divided like it."""
    losses, is_clipped = value_losses(values, old_values, returns, config.value_clip)
    loss = config.value_coef * (losses * weights).sum()
    metrics = {
        "loss/value": loss_part(loss),
        "value": mean_of(values),
        "value_error": mean_of((values - returns).square()),
        "value_clip_fraction": mean_of(is_clipped),
        "return": mean_of(returns),
    }
    return LossOutput(loss, metrics)


PPO = PolicyLoss("ppo", "grpo with a critic", clipped_tokens, ClipOptions, has_critic=True)
