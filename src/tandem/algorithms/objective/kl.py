"""Estimates of KL(policy || reference) from sampled tokens, and where they go.

With l = log π(token) − log ρ(token), π the policy, ρ the reference model, tokens sampled from π:

    k1 = l                  E[k1] = KL, can be negative
    k2 = l² / 2             E[k2] ≠ KL, near it where the two are near
    k3 = exp(−l) − 1 + l    E[k3] = KL, never negative, varies less than k1

What is learned from is the gradient, and that is another matter. Its mean is, of each token alone,

    in the loss              k1: zero.             k2: that of KL(π || ρ).  k3: that of KL(ρ || π)
    weighted with the ratio  k1: of KL(π || ρ).    k2: of E[k2].            k3: of KL(π || ρ)

and k1 in the reward has that of KL(π || ρ) of whole sequences: a token answers for where it leads, too.
"""

import math
from pathlib import Path
from typing import Literal

from pydantic import Field

from tandem.algorithms.sequences import LARGEST_EXPONENT, bounded_exp
from tandem.algorithms.tensors import Tensor
from tandem.config.base import Config

Estimator = Literal["k1", "k2", "k3"]


class KlConfig(Config):
    """KL penalty: keeps the policy near a reference model. The KL is estimated from the sampled tokens."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the KL. 0: off, and no reference model is loaded."""

    estimator: Estimator = "k3"
    """KL estimator, with l = log(policy / reference). k1: l. k2: l²/2. k3: exp(-l) - 1 + l."""

    place: Literal["loss", "reward"] = "loss"
    """loss: add the KL to each token's loss. reward: subtract it from each token's reward, as a penalty-to-go."""

    weighted: bool = True
    """In the loss, multiply the KL by the token's ratio: k1 and k3 then have the gradient of the KL, off-policy too."""

    model: Path | None = None
    """Directory of the reference model. None: the model that training starts from."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """(tokens,): k1, k2 or k3 of each token."""
    difference = logprobs - reference_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return k3(difference)


def k3(difference: Tensor) -> Tensor:
    """exp(−l) − 1 + l; below l = −20 the tangent there, so that value and gradient stay finite and keep their sign."""
    # Not by clamp, whose gradient at the bound is 1 in PyTorch 2.14 and 0 in 2.15.
    held = (-difference).masked_fill(-difference > LARGEST_EXPONENT, LARGEST_EXPONENT)
    beyond = (-difference - LARGEST_EXPONENT).relu()
    return held.expm1() + math.exp(LARGEST_EXPONENT) * beyond + difference


def kl_losses(
    logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator, *, weighted: bool
) -> Tensor:
    """(tokens,): k, or r k with the ratio r = exp(log-prob − old log-prob), which carries a gradient as well."""
    estimates = kl_estimate(logprobs, reference_logprobs, estimator)
    if not weighted:
        return estimates
    ratios = bounded_exp(logprobs - old_logprobs)
    if estimator != "k3":
        return ratios * estimates
    # The gradient is r (k3 + 1 − exp(−l)), which is r l. Taken term by term, rounding of the exponentials would be more
    # than is left of them.
    slopes = logprobs - reference_logprobs
    return ratios.detach() * (estimates.detach() + slopes * (logprobs - logprobs.detach()))


def kl_rewards(logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator, coef: float) -> Tensor:
    """(tokens,): −coef · k of each token, to be added to its reward. Carries no gradient."""
    return -coef * kl_estimate(logprobs.detach(), reference_logprobs, estimator)
