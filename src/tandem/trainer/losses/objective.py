"""The whole objective of a policy: its term, the correction, the regularizers, in the shares the options give."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.algorithms.losses.kind import Losses, LossOutput, PolicyStreams
from tandem.algorithms.metrics import Metric, loss_part, maximum_of, mean_of
from tandem.algorithms.objective.correction import correction_weights
from tandem.algorithms.objective.kl import k3, kl_estimate, kl_losses, kl_rewards
from tandem.algorithms.objective.policy import LossConfig
from tandem.algorithms.sequences import bounded_exp, discounted_sums
from tandem.trainer.losses.custom import compute_custom, require_gradient
from tandem.trainer.losses.normalization import token_weights
from tandem.utils.registry import load_function

PolicyLoss = Callable[[PolicyStreams], LossOutput]
# A loss function: what `loss.type` names.
TokenLoss = Callable[[PolicyStreams], Losses]


def make_policy_loss(config: LossConfig) -> PolicyLoss:
    return partial(policy_loss, config=config, token_loss=find_token_loss(config))


def find_token_loss(config: LossConfig) -> TokenLoss:
    """One of ours, or a custom one, with its options."""
    if config.is_custom:
        return partial(checked_losses, load_function(config.type, config.options, "loss"), config.type)
    assert config.algorithm is not None
    return partial(config.algorithm.compute, **config.arguments)


def checked_losses(function: TokenLoss, name: str, streams: PolicyStreams) -> Losses:
    return compute_custom(function, streams, len(streams.logprobs), name, "token")


def needs_reference(config: LossConfig) -> bool:
    return config.kl.coef > 0


def needs_teacher(config: LossConfig) -> bool:
    return config.teacher.coef > 0


def needs_entropy_gradient(config: LossConfig) -> bool:
    return config.entropy_coef > 0


def ignores_zero_advantages(config: LossConfig) -> bool:
    """Whether a token whose advantage is zero has no gradient, so that it need not be computed."""
    regularized = needs_reference(config) or needs_teacher(config) or needs_entropy_gradient(config)
    return not regularized and not config.has_critic and not config.is_custom


def policy_loss(streams: PolicyStreams, config: LossConfig, token_loss: TokenLoss) -> LossOutput:
    """Σ weight · (correction · token loss + kl.coef · KL − entropy_coef · entropy) over tokens."""
    term = token_loss(replace(streams, advantages=token_advantages(streams, config)))
    parts = {"policy": term.losses}
    metrics = mismatch_metrics(_trainer_log_ratios(streams, config))
    metrics |= {"ratio": mean_of(bounded_exp(streams.log_ratios))} | term.metrics
    if config.correction.type != "none":
        correction = _correction(streams, config)
        parts["policy"] = correction * term.losses
        metrics |= {"correction": mean_of(correction), "masked_fraction": mean_of(correction == 0)}
    if config.kl.coef > 0:
        assert streams.reference_logprobs is not None
        kl = kl_estimate(streams.logprobs, streams.reference_logprobs, config.kl.estimator)
        metrics["reference_kl"] = mean_of(kl)
        if config.kl.place == "loss":
            parts["kl"] = config.kl.coef * kl_losses(
                streams.logprobs,
                streams.old_logprobs,
                streams.reference_logprobs,
                config.kl.estimator,
                weighted=config.kl.weighted,
            )
    if config.teacher.coef > 0:
        assert streams.teacher_logprobs is not None
        metrics["teacher_kl"] = mean_of(streams.logprobs - streams.teacher_logprobs)
    if config.entropy_coef > 0:
        parts["entropy"] = -config.entropy_coef * streams.entropy
    weights = token_weights(config, streams.sequences, streams.num_sequences, streams.logprobs.dtype)
    sums = {name: (weights * losses).sum() for name, losses in parts.items()}
    metrics |= {f"loss/{name}": loss_part(part) for name, part in sums.items()}
    loss = torch.stack(list(sums.values())).sum()
    if config.is_custom:
        require_gradient(loss, config.type)
    return LossOutput(loss, metrics)


def token_advantages(streams: PolicyStreams, config: LossConfig) -> Tensor:
    """A_t − penalty-to-go, where the KL is in the reward, + teacher.coef · (log-prob of the teacher model − own).

    The penalty-to-go is kl.coef · Σ_(i ≥ t) k_i. With a critic, it is in the rewards that advantages come from.
    """
    advantages, logprobs = streams.advantages, streams.logprobs.detach()
    if config.kl.coef > 0 and config.kl.place == "reward" and not config.has_critic:
        assert streams.reference_logprobs is not None
        penalties = kl_rewards(logprobs, streams.reference_logprobs, config.kl.estimator, config.kl.coef)
        penalty_to_go = discounted_sums(penalties, streams.sequences, 1.0)
        advantages = advantages + penalty_to_go
    if config.teacher.coef > 0:
        assert streams.teacher_logprobs is not None
        advantages = advantages + config.teacher.coef * (streams.teacher_logprobs - logprobs)
    return advantages


def _correction(streams: PolicyStreams, config: LossConfig) -> Tensor:
    return correction_weights(
        _trainer_log_ratios(streams, config),
        streams.sequences,
        streams.num_sequences,
        config.correction,
        is_weighted=config.old_logprobs == "recomputed" or not config.has_ratio,
    )


def _trainer_log_ratios(streams: PolicyStreams, config: LossConfig) -> Tensor:
    """Trainer to engine: before the batch where that was computed, else as the policy is now, staleness included."""
    trainer_logprobs = streams.old_logprobs if config.old_logprobs == "recomputed" else streams.logprobs
    return trainer_logprobs - streams.sampled_logprobs


def mismatch_metrics(differences: Tensor) -> dict[str, Metric]:
    """How far trainer and engine are apart on the sampled tokens."""
    return {
        "mismatch_kl": mean_of(k3(-differences)),  # of KL(engine || trainer)
        "logprob_difference": mean_of(differences.abs()),
        "max/logprob_difference": maximum_of(differences.abs()),
    }
