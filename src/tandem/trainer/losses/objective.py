"""The whole objective of a policy: its term, the correction, the regularizers, in the shares the options give."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tandem.config.losses import LossConfig
from tandem.trainer.losses.correction import correction_weights
from tandem.trainer.losses.kl import k3, kl_estimate, kl_losses, kl_rewards
from tandem.trainer.losses.metrics import Metric, loss_part, maximum_of, mean_of
from tandem.trainer.losses.normalization import token_weights
from tandem.trainer.losses.policy import PolicyTerm, cispo_term, clipped_term, reinforce_term
from tandem.trainer.losses.ratios import bounded_exp, sequence_log_ratios
from tandem.trainer.losses.sequences import discounted_sums
from tandem.trainer.losses.types import LossOutput, PolicyStreams

PolicyLoss = Callable[[PolicyStreams], LossOutput]


def make_policy_loss(config: LossConfig) -> PolicyLoss:
    return partial(policy_loss, config=config)


def needs_reference(config: LossConfig) -> bool:
    return config.kl.coef > 0


def needs_teacher(config: LossConfig) -> bool:
    return config.teacher.coef > 0


def needs_entropy_gradient(config: LossConfig) -> bool:
    return config.entropy_coef > 0


def ignores_zero_advantages(config: LossConfig) -> bool:
    """Whether a token whose advantage is zero has no gradient, so that it need not be computed."""
    regularized = needs_reference(config) or needs_teacher(config) or needs_entropy_gradient(config)
    return not regularized and config.type != "ppo"


def policy_loss(streams: PolicyStreams, config: LossConfig) -> LossOutput:
    """Σ weight · (correction · policy term + kl.coef · KL − entropy_coef · entropy) over tokens."""
    log_ratios = streams.logprobs - streams.old_logprobs
    term = policy_term(streams, log_ratios, config)
    parts = {"policy": term.losses}
    metrics = mismatch_metrics(_trainer_log_ratios(streams, config)) | ratio_metrics(log_ratios, term)
    if config.correction.type != "none":
        correction = _correction(streams, config)
        parts["policy"] = correction * term.losses
        metrics |= {"correction": mean_of(correction), "masked_fraction": mean_of((correction == 0).float())}
    if config.kl.coef > 0:
        assert streams.reference_logprobs is not None
        kl = kl_estimate(streams.logprobs.detach(), streams.reference_logprobs, config.kl.estimator)
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
    return LossOutput(torch.stack(list(sums.values())).sum(), metrics)


def token_advantages(streams: PolicyStreams, config: LossConfig) -> Tensor:
    """A_t − kl.coef · Σ_(i ≥ t) k_i, where the KL is in the reward, + teacher.coef · (log-prob of the teacher − own).

    With a critic the KL has been in the rewards that the advantages were estimated from.
    """
    advantages, logprobs = streams.advantages, streams.logprobs.detach()
    if config.kl.coef > 0 and config.kl.place == "reward" and config.type != "ppo":
        assert streams.reference_logprobs is not None
        rewards = kl_rewards(logprobs, streams.reference_logprobs, config.kl.estimator, config.kl.coef)
        advantages = advantages + discounted_sums(rewards, streams.sequences, 1.0)
    if config.teacher.coef > 0:
        assert streams.teacher_logprobs is not None
        advantages = advantages + config.teacher.coef * (streams.teacher_logprobs - logprobs)
    return advantages


def policy_term(streams: PolicyStreams, log_ratios: Tensor, config: LossConfig) -> PolicyTerm:
    advantages = token_advantages(streams, config)
    clip_low, clip_high = config.clips
    if config.type == "reinforce":
        return reinforce_term(streams.logprobs, advantages)
    assert clip_high is not None
    if config.type == "cispo":
        return cispo_term(streams.logprobs, log_ratios, advantages, clip_high)
    assert clip_low is not None
    if config.type in ("gspo", "rloo"):
        kind = "geometric" if config.type == "gspo" else "product"
        log_ratios = sequence_log_ratios(log_ratios, streams.sequences, streams.num_sequences, kind)
    return clipped_term(log_ratios, advantages, clip_low, clip_high, config.dual_clip)


def _correction(streams: PolicyStreams, config: LossConfig) -> Tensor:
    return correction_weights(
        _trainer_log_ratios(streams, config),
        streams.sequences,
        streams.num_sequences,
        config.correction,
        is_weighted=config.old_logprobs == "recomputed" or config.type == "reinforce",
    )


def _trainer_log_ratios(streams: PolicyStreams, config: LossConfig) -> Tensor:
    """Trainer to engine: before the batch where that was computed, else as the policy is now, staleness included."""
    trainer_logprobs = streams.old_logprobs if config.old_logprobs == "recomputed" else streams.logprobs.detach()
    return trainer_logprobs - streams.sampled_logprobs


@torch.no_grad()
def ratio_metrics(log_ratios: Tensor, term: PolicyTerm) -> dict[str, Metric]:
    return {
        "ratio": mean_of(bounded_exp(log_ratios)),
        "clip_fraction": mean_of((term.is_clipped_low | term.is_clipped_high).float()),
        "clip_fraction_low": mean_of(term.is_clipped_low.float()),
        "clip_fraction_high": mean_of(term.is_clipped_high.float()),
    }


def mismatch_metrics(log_ratios: Tensor) -> dict[str, Metric]:
    """How far trainer and engine are apart on the sampled tokens."""
    return {
        "mismatch_kl": mean_of(k3(-log_ratios)),  # of KL(engine || trainer)
        "max/logprob_difference": maximum_of(log_ratios.abs()),
    }
