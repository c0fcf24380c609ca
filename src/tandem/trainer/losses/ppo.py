"""PPO's critic: advantages from values, the loss of values. Pure functions of per-token streams.

rewards  0 0 0 R  (− coef · k of each token, where the KL is in the reward)
values   v₁ v₂ v₃ v₄     v_t is the critic's estimate of the reward-to-go of token t, before it is sampled
"""

import torch
from torch import Tensor

from tandem.algorithms.objective.policy import LossConfig, PpoConfig
from tandem.trainer.losses.kl import kl_rewards
from tandem.trainer.losses.metrics import loss_part, mean_of
from tandem.trainer.losses.sequences import discounted_sums, is_last_token
from tandem.trainer.losses.types import LossOutput

EPSILON = 1e-8


def gae(rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """δ_t = r_t + γ v_(t+1) − v_t; A_t = δ_t + γ λ A_(t+1); returns A_t + v_t. Nothing follows the last token.

    All of it (tokens,), without gradient; a sequence that was cut short counts as ended.
    """
    values = values.detach()
    next_values = torch.where(is_last_token(sequences), 0, values.roll(-1))
    errors = rewards + gamma * next_values - values
    advantages = discounted_sums(errors, sequences, gamma * lam)
    return advantages, advantages + values


def token_rewards(
    rewards: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor | None, sequences: Tensor, config: LossConfig
) -> Tensor:
    """The reward of a sequence at its last token (`rewards` has it at each), and of every token what the KL takes."""
    at_end = torch.where(is_last_token(sequences), rewards, 0)
    if config.kl.coef == 0 or config.kl.place != "reward":
        return at_end
    assert reference_logprobs is not None
    return at_end + kl_rewards(old_logprobs, reference_logprobs, config.kl.estimator, config.kl.coef)


def moment_sums(values: Tensor) -> Tensor:
    """(3,), float64: count, sum and sum of squares; those of ranks are added before `whiten`."""
    values = values.double()
    return torch.stack([values.new_tensor(len(values)), values.sum(), values.square().sum()])


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
        return errors / 2, torch.zeros_like(errors, dtype=torch.bool)
    held = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    held_errors = (held - returns).square()
    return torch.maximum(errors, held_errors) / 2, held_errors > errors


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
