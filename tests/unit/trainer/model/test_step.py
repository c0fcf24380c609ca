"""One optimizer step: however it is cut, whoever the neighbours are."""

import math
from dataclasses import replace

import pytest
import torch

from tandem.algorithms.objective.policy import LossConfig
from tandem.data.packing import divide, pack
from tandem.models.attention import PackedAttention
from tandem.trainer.losses import make_policy_loss
from tandem.trainer.model.language_model import previous_tokens
from tandem.trainer.rl.learner import micro_batch_loss


def plain_sgd(stepper, lr: float) -> None:
    """Adam divides by the gradient's own size, which blows rounding up where the gradient is next to nothing."""
    stepper.optimizer = torch.optim.SGD(stepper.model.parameters(), lr=lr)


def test_the_update_does_not_depend_on_the_number_of_micro_batches(make_stepper, make_samples, take_step) -> None:
    samples = [make_samples(seed, num_prompts=3) for seed in (0, 1)]
    counts = [len(divide(pack(samples[0]), 0, 1, bound)) for bound in (1000, 40, 14)]
    assert counts[0] == 1 and counts[2] > counts[1] > 1
    results = []
    for bound in (1000, 40, 14):
        stepper = make_stepper()
        plain_sgd(stepper, 0.1)
        stats = [take_step(stepper, found, bound, 0.9) for found in samples]
        results.append((stats, dict(stepper.model.named_parameters())))
    start = dict(make_stepper().model.named_parameters())
    assert max(float((value - start[name]).detach().abs().max()) for name, value in results[0][1].items()) > 1e-3
    for stats, parameters in results[1:]:
        for step, expected in zip(stats, results[0][0], strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, results[0][1][name], atol=1e-6, rtol=0, msg=name)


def test_identical_completions_computed_once_give_the_update_of_both(make_stepper, make_samples, take_step) -> None:
    """The same completion twice, with other advantages, against a copy told apart by a packing that cannot share."""
    first, second, *others = make_samples(2)
    twin = replace(second, token_ids=first.token_ids, loss_mask=first.loss_mask, streams=first.streams)
    advantages = [0.5 * value for value in first.streams["advantages"]]
    twin = replace(twin, streams={**twin.streams, "advantages": advantages})
    shared = pack([first, twin, *others])
    assert shared.num_tokens == pack([first, *others]).num_tokens
    updated = []
    for parts in ([[first, twin, *others]], [[first, *others], [twin]]):
        stepper = make_stepper()
        plain_sgd(stepper, 0.1)
        # One micro-batch for each part: what is in different ones is computed separately.
        loss = micro_batch_loss(LossConfig(), make_policy_loss(LossConfig()))
        stepper.step([pack(part) for part in parts], loss, shared.num_loss_tokens)
        updated.append(list(stepper.model.parameters()))
    for once, twice in zip(*updated, strict=True):
        torch.testing.assert_close(once, twice, atol=1e-7, rtol=0)


def test_predictions_do_not_depend_on_the_neighbours_in_the_pack(make_stepper, make_samples) -> None:
    """Log-probs of every sequence packed with others are those of the sequence alone."""
    stepper, samples = make_stepper(), make_samples(3, num_prompts=3)
    together = pack(samples)
    with torch.no_grad():
        packed = stepper.predict(together, 0.9).logprobs
        for number, sample in enumerate(samples):
            expected = stepper.predict(pack([sample]), 0.9).logprobs
            found = packed[torch.from_numpy(together.sequences == number)]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_other_tokens_next_door_change_nothing(make_stepper, make_samples) -> None:
    stepper, samples = make_stepper(), make_samples(4, num_prompts=2)
    first, others = samples[:3], samples[3:]
    changed = [replace(other, token_ids=[6 + token % 7 for token in other.token_ids]) for other in others]
    with torch.no_grad():
        before, after = (stepper.predict(pack([*first, *rest]), 1.0).logprobs for rest in (others, changed))
    count = sum(sum(sample.loss_mask) for sample in first)
    torch.testing.assert_close(before[:count], after[:count], atol=1e-6, rtol=0)
    assert not torch.allclose(before, after)


def test_predictions_are_those_of_the_plain_model(make_stepper, make_samples) -> None:
    """Each token is predicted from everything before it in its own sequence, at the given temperature."""
    stepper = make_stepper()
    decoder = stepper.model.decoder
    sample = make_samples(5)[0]
    token_ids = torch.tensor(sample.token_ids)
    with torch.no_grad():
        hidden = decoder(token_ids, torch.arange(len(token_ids)), PackedAttention(torch.tensor([len(token_ids)])))
        logits = hidden @ decoder.output_weight.T / 0.7
        expected = [
            torch.log_softmax(logits[position - 1], -1)[sample.token_ids[position]]
            for position, learned in enumerate(sample.loss_mask)
            if learned
        ]
        found = stepper.predict(pack([sample]), 0.7).logprobs
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=0)


def test_a_shared_beginning_precedes_every_completion(make_samples) -> None:
    """Prompt of p tokens, completions end to end after it: the first of each follows token p - 1."""
    samples = make_samples(6, num_prompts=1, group_size=2)
    num_prompt = samples[0].num_context_tokens
    first, second = (sum(sample.loss_mask) for sample in samples)
    previous = previous_tokens(pack(samples)).tolist()
    assert previous[:num_prompt] == list(range(-1, num_prompt - 1))
    assert previous[num_prompt : num_prompt + first] == list(range(num_prompt - 1, num_prompt + first - 1))
    start = num_prompt + first
    assert previous[start:] == [num_prompt - 1, *range(start, start + second - 1)]


def test_metrics_are_averages_over_tokens(make_stepper, make_samples, take_step) -> None:
    """A random model hardly prefers any of its 102 tokens: the entropy of a token is near ln 102."""
    stats = take_step(make_stepper(), make_samples(7), bound=30)
    assert stats["entropy"] == pytest.approx(math.log(102), rel=0.02)
    assert 0 <= stats["clip_fraction"] <= 1
    assert stats["grad_norm"] > 0


def test_the_entropy_is_that_of_a_token_whatever_the_loss_is_divided_by(make_stepper, make_samples) -> None:
    """Losses are divided by tokens, sequences or a constant, and rollouts without advantage are not computed."""
    stepper, batch = make_stepper(), pack(make_samples(7))
    loss = micro_batch_loss(LossConfig(), make_policy_loss(LossConfig()))
    stats = stepper.step([batch], loss, denominator=10.0 * batch.num_loss_tokens)
    assert stats["entropy"] == pytest.approx(math.log(102), rel=0.02)


def test_a_step_learns_from_its_own_batch_only(make_stepper, make_samples, take_step) -> None:
    """What was computed before, here without moving the model, leaves nothing in the gradient."""
    stepper = make_stepper()
    plain_sgd(stepper, 0.0)
    take_step(stepper, make_samples(8))
    again = take_step(stepper, make_samples(9))["grad_norm"]
    assert again == pytest.approx(take_step(make_stepper(), make_samples(9))["grad_norm"], rel=1e-5)


def test_the_gradient_norm_is_clipped(make_stepper, make_samples, take_step) -> None:
    """With plain SGD of rate 1 the update is the gradient: as long as the bound, and no longer."""
    stepper = make_stepper()
    stepper.max_grad_norm = 1e-3
    plain_sgd(stepper, 1.0)
    before = [parameter.detach().clone() for parameter in stepper.model.parameters()]
    assert take_step(stepper, make_samples(8))["grad_norm"] > 1e-3
    moved = sum(
        (new.detach() - old).square().sum() for new, old in zip(stepper.model.parameters(), before, strict=True)
    )
    assert float(moved) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


def test_bfloat16_compute_stays_near_float32(make_stepper, make_samples, take_step) -> None:
    exact, rounded = make_stepper(), make_stepper()
    rounded.model.decoder.compute_dtype = torch.bfloat16
    expected, found = (take_step(stepper, make_samples(5)) for stepper in (exact, rounded))
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.05)
    assert all(parameter.dtype == torch.float32 for parameter in rounded.model.parameters())
