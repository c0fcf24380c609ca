"""With top_p, top_k or min_p, rollouts come from a truncated policy. All completions of a small one are enumerated: the
expected gradient of the loss is that of the expected reward if the trainer knows the kept tokens, else it is biased."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tandem.algorithms.objective.policy import LossConfig
from tandem.data.packing import pack
from tandem.engine.sampler import SamplingRows, sample
from tandem.orchestrator.batches import make_samples
from tandem.trainer.losses import make_policy_loss
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.trainer.model.step import Predictions
from tandem.trainer.rl.learner import micro_batch_loss
from tandem.types.rollout import Completion, Kept, Rollout

VOCAB, START, TEMPERATURE = 5, 0, 0.8
CPU = torch.device("cpu")


class Bigrams(nn.Module):
    """The next token depends on the last one only: its logits are a row of a table."""

    exact = False

    def __init__(self) -> None:
        super().__init__()
        self.output_weight = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)))

    def forward(self, token_ids: Tensor, positions: Tensor, attention: object) -> Tensor:
        return nn.functional.one_hot(token_ids, VOCAB).float()

    def logits(self, token: int) -> Tensor:
        return self.output_weight[:, token]


def engine_says(policy: Bigrams, token: int, options: Mapping[str, float]) -> dict[int, float]:
    """What the engine draws after a token: log-probs among what is left, by token, from many draws."""
    count = 200
    asked = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **options}
    settings = SamplingRows(
        temperature=np.full(count, TEMPERATURE, np.float32),
        top_p=np.full(count, asked["top_p"], np.float32),
        top_k=np.full(count, asked["top_k"], np.int64),
        min_p=np.full(count, asked["min_p"], np.float32),
        raw_logprobs=np.zeros(count, np.bool_),
        num_top=np.zeros(count, np.int64),
        wants_kept=np.ones(count, np.bool_),
        seed=np.full(count, 3, np.uint64),
        sample_index=np.arange(count).astype(np.uint64),
        position=np.zeros(count, np.int64),
    )
    drawn = sample(policy.logits(token).detach().repeat(count, 1), settings)
    found = {token: kept.logprob for token, kept in zip(drawn.tokens.tolist(), drawn.kept, strict=True) if kept}
    assert all(kept is not None and kept.token_ids.tolist() == sorted(found) for kept in drawn.kept)
    return found


def reward_of(tokens: Sequence[int]) -> float:
    return math.sin(3 * tokens[0] + 5 * tokens[1]) + 0.3 * tokens[1]


def gradient_of_expected_reward(policy: Bigrams, left: Mapping[int, dict[int, float]]) -> Tensor:
    """Of sum over all pairs of q(pair) R(pair), by autograd."""

    def log_q(before: int, token: int) -> Tensor:
        logits = policy.logits(before) / TEMPERATURE
        return logits[token] - logits[list(left[before])].logsumexp(0)

    pairs = [(a, b) for a in left[START] for b in left[a]]
    expected = sum((log_q(START, a) + log_q(a, b)).exp() * reward_of((a, b)) for a, b in pairs)
    (gradient,) = torch.autograd.grad(expected, policy.output_weight)  # type: ignore[arg-type]
    return gradient


def expected_gradient_of_the_loss(
    policy: Bigrams, left: Mapping[int, dict[int, float]], config: LossConfig, *, knows: bool
) -> Tensor:
    """Over all that the engine can draw, each rollout by itself, through packing, the model and the objective."""
    model = LanguageModel(policy)
    total = torch.zeros_like(policy.output_weight)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        if a not in left[START] or b not in left[a]:
            continue
        among = [left[START][a], left[a][b]]
        full = [policy.logits(s).detach().div(TEMPERATURE).log_softmax(0)[t].item() for s, t in ((START, a), (a, b))]
        kept = Kept([sorted(left[START]), sorted(left[a])], among)
        completion = Completion([a, b], full, [0, 0], "length", kept=kept if knows else None)
        rollout = Rollout([START], completion, "", reward_of((a, b)))
        part = pack(make_samples(rollout, rollout.reward, rollout.reward))
        predictions = Predictions(*model(Inputs.of(part, CPU), TEMPERATURE), values=None)
        loss = micro_batch_loss(config, make_policy_loss(config))(part, predictions).loss
        (gradient,) = torch.autograd.grad(loss, policy.output_weight)
        total += math.exp(sum(among)) * -gradient
    return total


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.8}])
@pytest.mark.parametrize("loss", ["reinforce", "grpo"])
def test_the_gradient_is_unbiased_if_the_trainer_knows_the_kept_tokens(loss: str, options: dict[str, float]) -> None:
    policy, config = Bigrams(), LossConfig(type=loss)  # type: ignore[arg-type]
    left = {token: engine_says(policy, token, options) for token in range(VOCAB)}
    assert all(len(tokens) < VOCAB for tokens in left.values())
    wanted = gradient_of_expected_reward(policy, left)
    corrected = expected_gradient_of_the_loss(policy, left, config, knows=True)
    torch.testing.assert_close(corrected, wanted, atol=1e-6, rtol=1e-5)
    without = expected_gradient_of_the_loss(policy, left, config, knows=False)
    assert (without - wanted).norm() > 0.1 * wanted.norm()


def test_equal_completions_are_computed_once_only_if_their_kept_tokens_are_equal() -> None:
    kept = Kept([[1, 2], [3, 4]], [-0.5, -0.5])
    one = Rollout([START], Completion([1, 3], [-1.0, -1.0], [0, 0], "stop", kept=kept), "", 1.0)
    other = replace(one, completion=replace(one.completion, kept=Kept([[1, 2], [3]], [-0.5, 0.0])))
    none = replace(one, completion=replace(one.completion, kept=None))
    rollouts = (one, one, other, none)
    batch = pack([sample for rollout in rollouts for sample in make_samples(rollout, 1.0, 1.0)])
    assert batch.num_tokens == 1 + 3 * 2  # the prompt, and each of the three once
    policy = LanguageModel(Bigrams())
    together = policy(Inputs.of(batch, CPU), 1.0)[0].view(4, 2)
    for rollout, logprobs in zip(rollouts, together, strict=True):
        alone = policy(Inputs.of(pack(make_samples(rollout, 1.0, 1.0)), CPU), 1.0)[0]
        torch.testing.assert_close(alone, logprobs)
    assert together[2, 1].item() == pytest.approx(0, abs=1e-6) and together[0, 1].item() < -0.01
