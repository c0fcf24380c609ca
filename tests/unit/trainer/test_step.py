"""One optimizer step: however it is cut, whoever the neighbours are."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tandem.data.packing import pack
from tandem.models.attention import PackedAttention
from tandem.trainer.losses.policy import grpo_loss
from tandem.trainer.step import previous_tokens
from tandem.trainer.train_rl import policy_loss


def take_steps(stepper, batches) -> list[dict[str, float]]:
    return [stepper.step(batch, sum(part.num_loss_tokens for part in batch), 0.9) for batch in batches]


def test_the_update_does_not_depend_on_the_number_of_micro_batches(make_stepper, make_samples) -> None:
    samples = [make_samples(seed, num_prompts=3) for seed in (0, 1)]
    results = []
    for bound in (1000, 40, 14):
        stepper = make_stepper()
        # Adam divides by the gradient's own size, which blows rounding up where the gradient is next to nothing.
        stepper.optimizer = torch.optim.SGD(stepper.model.parameters(), lr=0.1)
        batches = [pack(found, bound) for found in samples]
        stats = take_steps(stepper, batches)
        results.append((len(batches[0]), stats, dict(stepper.model.named_parameters())))
    assert results[0][0] == 1 and results[2][0] > results[1][0] > 1
    start = dict(make_stepper().model.named_parameters())
    assert max(float((value - start[name]).detach().abs().max()) for name, value in results[0][2].items()) > 1e-3
    for _, stats, parameters in results[1:]:
        for step, expected in zip(stats, results[0][1], strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, results[0][2][name], atol=1e-6, rtol=0, msg=name)


def test_predictions_do_not_depend_on_the_neighbours_in_the_pack(make_stepper, make_samples) -> None:
    """Log-probs of every sequence packed with others are those of the sequence alone."""
    stepper, samples = make_stepper(), make_samples(3, num_prompts=3)
    together = pack(samples, 1000)
    assert len(together) == 1
    with torch.no_grad():
        packed = stepper.predict(together[0], 0.9).logprobs
        alone = {}
        for sample in samples:
            key = tuple(sample.advantages[-1:])
            alone[key] = stepper.predict(pack([sample], 1000)[0], 0.9).logprobs
    owners = np.array([float(advantage) for advantage in together[0].advantages[together[0].loss_mask]])
    for (advantage,), expected in alone.items():
        found = packed[torch.from_numpy(owners == np.float32(advantage))]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_other_tokens_next_door_change_nothing(make_stepper, make_samples) -> None:
    stepper, samples = make_stepper(), make_samples(4, num_prompts=2)
    first, others = samples[:3], samples[3:]
    changed = [replace(other, token_ids=[6 + token % 7 for token in other.token_ids]) for other in others]
    with torch.no_grad():
        (before,), (after,) = pack([*first, *others], 1000), pack([*first, *changed], 1000)
        logprobs = [stepper.predict(batch, 1.0).logprobs for batch in (before, after)]
    count = sum(sum(sample.loss_mask) for sample in first)
    of_first = [
        np.isin(batch.advantages[batch.loss_mask], np.float32([s.advantages[-1] for s in first]))
        for batch in (before, after)
    ]
    torch.testing.assert_close(
        logprobs[0][torch.from_numpy(of_first[0])], logprobs[1][torch.from_numpy(of_first[1])], atol=1e-6, rtol=0
    )
    assert of_first[0].sum() == count
    assert not torch.allclose(logprobs[0], logprobs[1])


def test_predictions_are_those_of_the_plain_model(make_stepper, make_samples) -> None:
    """Each token is predicted from everything before it in its own sequence, at the given temperature."""
    stepper = make_stepper()
    sample = make_samples(5)[0]
    token_ids = torch.tensor(sample.token_ids)
    with torch.no_grad():
        hidden = stepper.model(token_ids, torch.arange(len(token_ids)), PackedAttention(torch.tensor([len(token_ids)])))
        logits = hidden @ stepper.model.output_weight.T / 0.7
        expected = [
            torch.log_softmax(logits[position - 1], -1)[sample.token_ids[position]]
            for position, learned in enumerate(sample.loss_mask)
            if learned
        ]
        found = stepper.predict(pack([sample], 100)[0], 0.7).logprobs
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=0)


def test_a_shared_beginning_precedes_every_completion(make_samples) -> None:
    """Prompt of p tokens, completions end to end after it: the first of each follows token p - 1."""
    samples = make_samples(6, num_prompts=1, group_size=2)
    (batch,) = pack(samples, 100)
    num_prompt = samples[0].loss_mask.index(1)
    first, second = (sum(sample.loss_mask) for sample in samples)
    previous = previous_tokens(batch).tolist()
    assert previous[:num_prompt] == list(range(-1, num_prompt - 1))
    assert previous[num_prompt : num_prompt + first] == list(range(num_prompt - 1, num_prompt + first - 1))
    start = num_prompt + first
    assert previous[start:] == [num_prompt - 1, *range(start, start + second - 1)]


def test_metrics_are_averages_over_tokens(make_stepper, make_samples) -> None:
    """A random model hardly prefers any of its 102 tokens: the entropy of a token is near ln 102."""
    stepper = make_stepper()
    (stats,) = take_steps(stepper, [pack(make_samples(7), 30)])
    assert stats["entropy"] == pytest.approx(math.log(102), rel=0.02)
    assert 0 <= stats["clip_fraction"] <= 1
    assert stats["grad_norm"] > 0


def test_the_gradient_norm_is_clipped(make_stepper, make_samples) -> None:
    """With plain SGD of rate 1 the update is the gradient: as long as the bound, and no longer."""
    stepper = make_stepper()
    stepper.max_grad_norm = 1e-3
    stepper.optimizer = torch.optim.SGD(stepper.model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in stepper.model.parameters()]
    (stats,) = take_steps(stepper, [pack(make_samples(8), 100)])
    assert stats["grad_norm"] > 1e-3
    moved = sum(
        (new.detach() - old).square().sum() for new, old in zip(stepper.model.parameters(), before, strict=True)
    )
    assert moved.sqrt().item() == pytest.approx(1e-3, rel=1e-2)


def test_bfloat16_compute_stays_near_float32(make_stepper, make_samples) -> None:
    batch = pack(make_samples(5, num_prompts=2), 1000)
    exact, rounded = make_stepper(), make_stepper()
    rounded.compute_dtype = torch.bfloat16
    (expected,), (found,) = take_steps(exact, [batch]), take_steps(rounded, [batch])
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.05)
    assert all(parameter.dtype == torch.float32 for parameter in rounded.model.parameters())


def test_a_rollout_without_signal_leaves_the_update_as_it_is(make_stepper, make_samples) -> None:
    """Policy-gradient with advantages of zero for one sample: computed or left out, the weights are the same."""
    samples = make_samples(6, num_prompts=2)
    silent = replace(samples[0], advantages=[0.0] * len(samples[0].token_ids))
    num_loss_tokens = sum(sum(sample.loss_mask) for sample in samples)
    loss = policy_loss(partial(grpo_loss, clip_low=0.2, clip_high=0.2))
    updated = []
    for kept in ([silent, *samples[1:]], samples[1:]):
        stepper = make_stepper()
        stepper.loss = loss
        stepper.optimizer = torch.optim.SGD(stepper.model.parameters(), lr=0.1)
        stepper.step(pack(kept, 1000), num_loss_tokens)
        updated.append(list(stepper.model.parameters()))
    for computed, left_out in zip(*updated, strict=True):
        torch.testing.assert_close(computed, left_out, atol=1e-7, rtol=0)
