"""Learning with the models that a loss asks, against the same objective computed plainly, sequence by sequence.

All at a temperature other than 1, with policy, reference and teacher that differ, in several micro-batches.
"""

import math
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.algorithms.objective.policy import LossConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.batch_files import RolloutWriter
from tandem.data.packing import divide, pack
from tandem.models.attention import PackedAttention
from tandem.models.hf import load_decoder
from tandem.trainer.build import TrainState, load_trained
from tandem.trainer.model.frozen import FrozenModel
from tandem.trainer.model.totals import StepMetrics
from tandem.trainer.offline.sft import sft_loss
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl.learner import Learner, frozen_model_paths
from tandem.trainer.rl.train import train_rl
from tandem.types.rollout import TrainBatch, TrainingSequence
from tandem.utils.errors import Diverged
from tandem.utils.files import read_json_lines

CPU = torch.device("cpu")
ALONE = Ranks.single(CPU)
TEMPERATURE = 0.6
LR = 0.1


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policy, reference and teacher: the tiny model with weights moved in three ways."""
    found = {}
    for seed, name in enumerate(("policy", "reference", "teacher")):
        found[name] = tmp_path_factory.mktemp("models") / name
        shutil.copytree(tiny_model, found[name])
        generator = torch.Generator().manual_seed(seed)
        weights = load_file(tiny_model / "model.safetensors")
        moved = {key: value + 0.05 * torch.randn(value.shape, generator=generator) for key, value in weights.items()}
        save_file(moved, found[name] / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.fixture
def samples(make_samples) -> list[TrainingSequence]:
    """Four groups. What stands beside tokens that are not learned is nonsense, and must not matter."""
    found = make_samples(3, num_prompts=4)
    return [
        replace(
            sample,
            streams={
                name: [value if learned else 50.0 for value, learned in zip(values, sample.loss_mask, strict=True)]
                for name, values in sample.streams.items()
            },
        )
        for sample in found
    ]


def settings(models: dict[str, Path], loss: dict[str, Any], **options: Any) -> TrainerConfig:
    tree = {"model": {"name": models["policy"]}, "seq_len": 20, "tokens_per_microbatch": 24, "loss": loss}
    return TrainerConfig.model_validate(tree | {"parallel": {"strategy": "ddp"}} | options)


def load(config: TrainerConfig, ranks: Ranks = ALONE) -> tuple[TrainState, Learner]:
    """As the trainer does, but with plain SGD and no bound on the gradient."""
    optimizer = OptimizerConfig(max_grad_norm=1e9)
    critic = config.loss.ppo if config.loss.type == "ppo" else None
    trained = load_trained(config.model, optimizer, config.parallel, ranks, lora=config.lora, critic=critic)
    if critic is not None:
        assert trained.model.value_head is not None
        torch.nn.init.normal_(trained.model.value_head.weight, generator=torch.Generator().manual_seed(9))
        torch.nn.init.constant_(trained.model.value_head.bias, 0.3)
    trained.stepper.optimizer = torch.optim.SGD(trained.model.parameters(), lr=LR)
    frozen_models = {
        stream: FrozenModel(ModelConfig(name=path), config.parallel, ranks)
        for stream, path in frozen_model_paths(config.loss, config.model.name).items()
    }
    return trained, Learner(config, trained.stepper, frozen_models)


def train_batch(samples: Sequence[TrainingSequence], step: int = 1) -> TrainBatch:
    batch = pack(samples)
    assert len(divide(batch, 0, 1, 24)) > 2
    return TrainBatch(step, TEMPERATURE, batch)


@dataclass(frozen=True)
class Plain:
    """What a decoder says of the learned tokens of one sequence that it reads by itself."""

    logprobs: Tensor  # (learned,)
    hidden: Tensor  # (learned, hidden): where each is predicted from


def read_plainly(decoder: Any, sample: TrainingSequence) -> Plain:
    token_ids = torch.tensor(sample.token_ids)
    hidden = decoder(token_ids, torch.arange(len(token_ids)), PackedAttention(torch.tensor([len(token_ids)])))
    learned = torch.tensor(sample.loss_mask).nonzero().flatten()
    distribution = (hidden[learned - 1] @ decoder.output_weight.T / TEMPERATURE).log_softmax(-1)
    return Plain(distribution.gather(-1, token_ids[learned][:, None]).squeeze(-1), hidden[learned - 1])


def plain_logprobs(model: Path | Any, samples: Sequence[TrainingSequence]) -> Tensor:
    decoder = load_decoder(model, torch.float32, CPU) if isinstance(model, Path) else model
    return torch.cat([read_plainly(decoder, sample).logprobs for sample in samples])


def learned_stream(samples: Sequence[TrainingSequence], name: str) -> Tensor:
    pairs = (pair for s in samples for pair in zip(s.streams[name], s.loss_mask, strict=True))
    return torch.tensor([value for value, learned in pairs if learned])


def whitened_plainly(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std(unbiased=False)


PPO = {
    "type": "ppo",
    "kl": {"coef": 0.05, "estimator": "k1", "place": "reward"},
    "ppo": {"gamma": 0.95, "lam": 0.9, "value_coef": 0.5},
}


def gae_plainly(config: LossConfig, plain: Plain, reference: Tensor, values: Tensor, reward: float) -> Tensor:
    """Backwards, token by token: δ = r + γ v' − v, A = δ + γ λ A'."""
    taken = config.kl.coef * (plain.logprobs - reference)
    advantages, following_value, following = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        given = (reward if t == len(values) - 1 else 0.0) - taken[t].item()
        error = given + config.ppo.gamma * following_value - values[t].item()
        following = error + config.ppo.gamma * config.ppo.lam * following
        following_value = values[t].item()
        advantages.append(following)
    return torch.tensor(advantages[::-1])


def test_ppo_with_its_critic(models, samples) -> None:
    config = settings(models, PPO)
    trained, learner = load(config)
    head = trained.model.value_head
    assert head is not None
    reference = load_decoder(models["policy"], torch.float32, CPU)
    # The reference is where training starts from; the policy has moved since.
    with torch.no_grad():
        for parameter in trained.decoder.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
        said = [read_plainly(trained.decoder, sample) for sample in samples]
        before = [read_plainly(reference, sample).logprobs for sample in samples]
        values = [head(plain.hidden).squeeze(-1) for plain in said]
    rewards = [sample.streams["rewards"][-1] for sample in samples]
    advantages = [gae_plainly(config.loss, *row) for row in zip(said, before, values, rewards, strict=True)]
    returns = torch.cat([a + v for a, v in zip(advantages, values, strict=True)])
    value, logprobs = torch.cat(values), torch.cat([plain.logprobs for plain in said])
    signal = whitened_plainly(torch.cat(advantages))
    ratios = (logprobs - learned_stream(samples, "logprobs")).exp()
    policy = -torch.minimum(ratios * signal, ratios.clamp(0.8, 1.2) * signal).mean()
    critic = 0.5 * (value - returns).square().mean() / 2
    expected = {
        "loss/policy": policy.item(),
        "loss/value": critic.item(),
        "loss": (policy + critic).item(),
        "value": value.mean().item(),
        "return": returns.mean().item(),
        "value_error": (value - returns).square().mean().item(),
        "reference_kl": (logprobs - torch.cat(before)).mean().item(),
    }
    stats = learner.learn(train_batch(samples))
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    # d/d bias of ½ · ½ mean (v − R)² is ½ mean (v − R), and nothing but the critic's loss pulls at it.
    assert head.bias.item() == pytest.approx(0.3 - LR * 0.5 * (value - returns).mean().item(), abs=1e-6)


def test_values_are_held_near_those_before_the_batch(models, samples) -> None:
    """From the second update on, the critic moves, and may do so only within ± value_clip."""
    config = settings(models, PPO | {"ppo": {"value_clip": 1e-3, "value_coef": 0.5}}, epochs_per_batch=2)
    _, learner = load(config)
    assert learner.learn(train_batch(samples))["value_clip_fraction"] > 0.1
    once = settings(models, PPO | {"ppo": {"value_clip": 1e-3, "value_coef": 0.5}})
    assert load(once)[1].learn(train_batch(samples))["value_clip_fraction"] == 0.0


@dataclass
class Meeting:
    """Where ranks that are threads exchange values."""

    size: int
    barrier: threading.Barrier = field(init=False)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=120)

    def exchange(self, rank: int, values: Tensor) -> list[Tensor]:
        self.values[rank] = values.clone()
        self.barrier.wait()
        found = [self.values[other] for other in range(self.size)]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    meeting: Meeting = field(kw_only=True)

    def all_sum(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self.meeting.exchange(self.rank, values)).sum(0))

    def all_max(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(self.meeting.exchange(self.rank, values)).amax(0))


def on_ranks(size: int, run: Callable[[Ranks], Any]) -> list[Any]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: run(ThreadRanks(rank, size, CPU, meeting=meeting)), range(size)))


def test_two_ranks_whiten_over_both(models, samples) -> None:
    """Each has groups of other rewards: whitened by itself, neither would learn what one rank learns from all."""
    shifts = [1.0, 1.0, 1.0, -4.0, -4.0, -4.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0]
    shifted = [
        replace(sample, streams={**sample.streams, "rewards": [v + by for v in sample.streams["rewards"]]})
        for sample, by in zip(samples, shifts, strict=True)
    ]
    config = settings(models, PPO)

    def learn(ranks: Ranks) -> tuple[dict[str, float], list[Tensor]]:
        trained, learner = load(config, ranks)
        stats = learner.learn(train_batch(shifted))
        return stats, [parameter.detach() for parameter in trained.model.parameters()]

    stats, parameters = learn(ALONE)
    for other_stats, other_parameters in on_ranks(2, learn):
        assert other_stats == pytest.approx(stats, rel=1e-4, abs=1e-6)
        for one, other in zip(parameters, other_parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_reference_and_teacher(models, samples) -> None:
    """Loss and update are those of −(A + ½ (log τ − log π)) log π + 0.2 · ½ (log π − log ρ)²."""
    loss = {
        "type": "reinforce",
        "kl": {"coef": 0.2, "estimator": "k2", "weighted": False, "model": models["reference"]},
        "teacher": {"coef": 0.5, "model": models["teacher"]},
    }
    trained, learner = load(settings(models, loss))
    policy = load_decoder(models["policy"], torch.float32, CPU)
    logprobs = plain_logprobs(policy, samples)
    reference, teacher = (plain_logprobs(models[name], samples).detach() for name in ("reference", "teacher"))
    advantages = learned_stream(samples, "advantages") + 0.5 * (teacher - logprobs.detach())
    squares = (logprobs - reference).square() / 2
    objective = (-advantages * logprobs + 0.2 * squares).mean()
    objective.backward()
    expected = {
        "loss": objective.item(),
        "loss/kl": 0.2 * squares.mean().item(),
        "reference_kl": squares.mean().item(),
        "teacher_kl": (logprobs - teacher).mean().item(),
    }
    stats = learner.learn(train_batch(samples))
    assert {name: stats[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    for (name, plain), ours in zip(policy.named_parameters(), trained.decoder.parameters(), strict=True):
        assert plain.grad is not None
        torch.testing.assert_close(ours.detach(), plain.detach() - LR * plain.grad, rtol=0, atol=1e-5, msg=name)


def test_who_is_asked() -> None:
    start, other, third = Path("start"), Path("other"), Path("third")
    asked = {
        "no": ({}, {}),
        "the start": ({"kl": {"coef": 0.1}}, {"reference_logprobs": start}),
        "another": ({"kl": {"coef": 0.1, "model": other}}, {"reference_logprobs": other}),
        "teacher": ({"teacher": {"coef": 1.0, "model": third}}, {"teacher_logprobs": third}),
        "both": (
            {"kl": {"coef": 0.1, "model": other}, "teacher": {"coef": 1.0, "model": third}},
            {"reference_logprobs": other, "teacher_logprobs": third},
        ),
    }
    for name, (loss, expected) in asked.items():
        assert frozen_model_paths(LossConfig.model_validate(loss), start) == expected, name


def test_the_trainer_asks_the_models_that_the_loss_names(models, samples, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    RolloutWriter(tmp_path / "rollouts", keep=10).write(train_batch(samples))
    loss = {"kl": {"coef": 0.1, "estimator": "k2", "model": models["reference"]}}
    loss |= {"teacher": {"coef": 0.1, "model": models["teacher"]}}
    options = {"output_dir": tmp_path, "max_steps": 1, "rollout_timeout_s": 60, "device": "cpu", "threads": threads}
    train_rl(settings(models, loss, **options))
    (line,) = [line for line in read_json_lines(tmp_path / "metrics.jsonl") if "teacher_kl" in line]
    policy, reference, teacher = (plain_logprobs(models[name], samples) for name in models)
    assert line["reference_kl"] == pytest.approx(((policy - reference).square() / 2).mean().item(), rel=1e-4)
    assert line["teacher_kl"] == pytest.approx((policy - teacher).mean().item(), rel=1e-4)


def test_recomputed_log_probs_are_those_before_the_first_update(models, samples) -> None:
    """Two epochs: ratios are 1, then those of the policy after one update to the policy before; the distance to the
    engine is that of the policy before, both times."""
    loss = {"type": "grpo", "old_logprobs": "recomputed", "clip_low": 0.9, "clip_high": 9.0}
    once, learner = load(settings(models, loss))
    learner.learn(train_batch(samples))
    before = plain_logprobs(models["policy"], samples)
    ratios = (plain_logprobs(once.decoder, samples) - before).exp()
    assert float((ratios - 1).abs().mean().detach()) > 0.01
    _, learner = load(settings(models, loss, epochs_per_batch=2))
    stats = learner.learn(train_batch(samples))
    assert stats["ratio"] == pytest.approx((1 + ratios.mean().item()) / 2, rel=1e-5)
    to_engine = before - learned_stream(samples, "logprobs")
    assert stats["mismatch_kl"] == pytest.approx((to_engine.exp() - 1 - to_engine).mean().item(), rel=1e-4)


def test_without_it_ratios_are_to_the_engine(models, samples) -> None:
    _, learner = load(settings(models, {"type": "grpo"}))
    ratios = (plain_logprobs(models["policy"], samples) - learned_stream(samples, "logprobs")).exp()
    assert learner.learn(train_batch(samples))["ratio"] == pytest.approx(ratios.mean().item(), rel=1e-4)


def test_there_is_dropout_in_learning_only(models, samples) -> None:
    """An adapter of zeros changes nothing, dropout or not; so it is moved away from zero and the exact log-probs are
    those of the same adapter without dropout."""
    lora = LoRAConfig(rank=4, dropout=0.5)
    loss = {"type": "grpo", "old_logprobs": "recomputed"}

    def begin(dropout: float) -> tuple[TrainState, Learner]:
        options = {"lora": lora.model_copy(update={"dropout": dropout}), "epochs_per_batch": 2}
        trained, learner = load(settings(models, loss, **options))
        generator = torch.Generator().manual_seed(4)
        for name, parameter in trained.decoder.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=generator)
        trained.stepper.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.0)
        return trained, learner

    batch = pack(samples)
    exact = begin(0.0)[0].stepper.infer(batch, TEMPERATURE).logprobs
    trained, learner = begin(0.5)
    stepper = trained.stepper
    assert torch.equal(stepper.infer(batch, TEMPERATURE).logprobs, exact)
    evaluated = stepper.evaluate([batch], sft_loss, batch.num_loss_tokens)["loss"]
    assert evaluated == begin(0.0)[0].stepper.evaluate([batch], sft_loss, batch.num_loss_tokens)["loss"]
    drawn = [stepper.predict(batch, TEMPERATURE).logprobs for _ in range(2)]
    assert not torch.equal(*drawn) and not torch.equal(drawn[0], exact), "there is no dropout in learning"
    told = replace(batch, streams={**batch.streams, "logprobs": exact.numpy()})
    stats = learner.learn(TrainBatch(1, TEMPERATURE, told))
    assert stats["max/logprob_difference"] < 1e-5, "log-probs were recomputed with dropout"
    assert abs(stats["ratio"] - 1) > 1e-4, "there was no dropout in the updates"


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_are_not_finite_end_the_step(models, samples, value: float) -> None:
    """Before anything has moved: neither weights nor the optimizer's state."""
    trained, learner = load(settings(models, {"type": "grpo"}))
    parameters = list(trained.model.parameters())
    trained.stepper.optimizer = torch.optim.AdamW(parameters, lr=0.1)
    parameters[-1].register_hook(lambda gradient: gradient * value)
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(Diverged, match=r"gradient norm is (inf|nan), and nothing was updated: .* Lower optimizer\.lr"):
        learner.learn(train_batch(samples))
    assert not trained.stepper.optimizer.state
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))


@dataclass
class RecordingStepper:
    """Notes the completions of each update."""

    ranks: Ranks = ALONE
    updates: list[list[int]] = field(default_factory=list)

    def step(self, micro_batches: Sequence[Any], loss: Any, denominator: float, temperature: float) -> StepMetrics:
        self.updates.append(sorted(token for part in micro_batches for token in part.token_ids.tolist()))
        return StepMetrics({"loss": 0.0})


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_rollout_without_advantage_is_computed_where_the_loss_learns_from_it(models, samples, kl_coef: float) -> None:
    """Its policy gradient is zero; a KL term pulls at it all the same."""

    def computed(samples: list[TrainingSequence]) -> list[list[int]]:
        stepper = RecordingStepper()
        learner = Learner(settings(models, {"kl": {"coef": kl_coef}}), stepper, {})  # type: ignore[arg-type]
        learner.learn(train_batch(samples))
        return stepper.updates

    first, *others = samples
    silent = replace(first, streams={**first.streams, "advantages": [0.0] * len(first.token_ids)})
    assert computed([silent, *others]) == computed(samples if kl_coef else others)


def test_a_batch_is_cut_into_updates_by_its_step(models, samples) -> None:
    """Alike when the step is repeated, otherwise in the next one."""
    config = settings(models, {"type": "reinforce"}, updates_per_batch=2)

    def cut(step: int) -> list[list[int]]:
        stepper = RecordingStepper()
        Learner(config, stepper, {}).learn(train_batch(samples, step))  # type: ignore[arg-type]
        return stepper.updates

    cuts = {step: cut(step) for step in range(1, 6)}
    assert all(len(updates) == 2 for updates in cuts.values())
    assert all(cut(step) == updates for step, updates in cuts.items())
    assert len({str(updates) for updates in cuts.values()}) > 1
    assert len({str(sorted(chain(*updates))) for updates in cuts.values()}) == 1, "something was lost, or came twice"
