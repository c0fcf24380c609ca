"""A loss that a user brings as one file: it trains as the built-in one of the same formula does, to the bit."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.algorithms.objective.policy import LossConfig
from tandem.commands.trainer import TrainerConfig
from tandem.data.batch_files import RolloutWriter
from tandem.data.packing import pack
from tandem.trainer.losses import ignores_zero_advantages
from tandem.trainer.losses.trial import try_policy_loss
from tandem.trainer.rl.train import train_rl
from tandem.types.rollout import TrainBatch
from tandem.utils.errors import OutOfMemory, UserError
from tandem.utils.files import read_json_lines

OWN_LOSS = """\
import threading

import torch

from tandem.trainer.losses import Losses, PolicyStreams, maximum_of, mean_of


def clipped(streams: PolicyStreams, *, clip: float = 0.2) -> Losses:
    ratios = (streams.logprobs - streams.old_logprobs).exp()
    gains = torch.minimum(ratios * streams.advantages, ratios.clamp(1 - clip, 1 + clip) * streams.advantages)
    return Losses(-gains, {"own/ratio": mean_of(ratios), "own/largest": maximum_of(ratios)})


def nothing(streams: PolicyStreams) -> None:
    return None


def summed(streams: PolicyStreams) -> Losses:
    return Losses(streams.logprobs.sum())


def constant(streams: PolicyStreams) -> Losses:
    return Losses(-streams.advantages)


def undefined(streams: PolicyStreams) -> Losses:
    return Losses(streams.logprobs * float("nan"))


def plain_metric(streams: PolicyStreams) -> Losses:
    return Losses(-streams.logprobs, {"own/mean": float(streams.logprobs.detach().mean())})


def taken_metric(streams: PolicyStreams) -> Losses:
    return Losses(-streams.logprobs, {"loss": mean_of(streams.logprobs)})


def listed(streams: PolicyStreams) -> Losses:
    return Losses([0.0] * len(streams.logprobs))


def listed_metrics(streams: PolicyStreams) -> Losses:
    return Losses(-streams.logprobs, [mean_of(streams.logprobs)])


def compares(streams: PolicyStreams) -> Losses:
    return Losses(streams.logprobs - streams.reference_logprobs)


def changes_what_is_needed(streams: PolicyStreams) -> Losses:
    gains = streams.logprobs.exp()
    gains *= 2
    return Losses(-gains)


def moves(streams: PolicyStreams) -> Losses:
    return Losses(-streams.logprobs.to("cuda:99"))


def launches(streams: PolicyStreams) -> Losses:
    import triton

    @triton.jit
    def kernel(x):
        pass

    kernel[(1,)](streams.logprobs)
    return Losses(-streams.logprobs)


def needs_tokens(streams: PolicyStreams) -> Losses:
    return Losses(-streams.logprobs * streams.advantages / streams.advantages.abs().max())


def measures_tokens(streams: PolicyStreams) -> Losses:
    return Losses(-streams.logprobs, {"own/mean": mean_of(streams.logprobs)} if len(streams.logprobs) else {})


def raises_later(streams: PolicyStreams) -> Losses:
    if streams.old_logprobs.max() == streams.old_logprobs.min():
        return Losses(-streams.logprobs)
    return Losses(-streams.logprobs[{"a": 1}["b"]])


def fills_the_gpu(streams: PolicyStreams) -> Losses:
    raise torch.OutOfMemoryError("CUDA out of memory")


LET_GO = threading.Event()


def hangs(streams: PolicyStreams) -> Losses:
    LET_GO.wait()
    return Losses(-streams.logprobs)
"""

UNLEARNABLE = [
    ({"type": "own_loss_of_a_test:nothing"}, r"loss\.type = '.*:nothing' returned NoneType; return .*Losses"),
    ({"type": "own_loss_of_a_test:summed"}, r"loss\.type = '.*:summed' returned losses of shape \(\); return one"),
    ({"type": "own_loss_of_a_test:constant"}, r"loss\.type = '.*:constant' returned losses without a gradient"),
    ({"type": "own_loss_of_a_test:undefined"}, r"'.*:undefined' returned \d+ of \d+ losses that are not finite"),
    ({"type": "own_loss_of_a_test:plain_metric"}, r"returned metrics\['own/mean'\] as float; make it with mean_of"),
    ({"type": "own_loss_of_a_test:taken_metric"}, r"returned a metric called 'loss', which is taken"),
    ({"type": "own_loss_of_a_test:listed"}, r"returned losses as list; return a tensor, one loss per token"),
    ({"type": "own_loss_of_a_test:listed_metrics"}, r"returned metrics as list; return a dict of them by name"),
    (
        {"type": "own_loss_of_a_test:clipped", "options": {"clib": 0.1}},
        r"loss\.options = \{'clib': 0\.1\} does not suit loss\.type = '.*:clipped': .*'clib'",
    ),
    ({"type": "own_loss_of_a_test:clippd"}, r"loss\.type = '.*:clippd' .*did you mean 'clipped'\?"),
]


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_loss_of_a_test.py").write_text(OWN_LOSS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    sys.modules.pop("own_loss_of_a_test", None)


@pytest.fixture
def train(tiny_model: Path, make_samples, tmp_path: Path):
    def run(name: str, loss: dict[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Two steps of two updates each, so that ratios leave 1; weights and metrics."""
        from safetensors.torch import load_file

        root = tmp_path / name
        root.mkdir()
        writer = RolloutWriter(root / "rollouts", keep=10)
        for step in (1, 2):
            writer.write(TrainBatch(step, 1.0, pack(make_samples(step, num_prompts=4))))
        tree: dict[str, Any] = {"model": {"name": tiny_model}, "output_dir": root, "device": "cpu", "threads": 1}
        tree |= {"deterministic": True, "optimizer": {"lr": 1e-3}, "rollout_timeout_s": 60}
        tree |= {"seq_len": 30, "tokens_per_microbatch": 30, "max_steps": 2, "updates_per_batch": 2, "loss": loss}
        train_rl(TrainerConfig.model_validate(tree))
        return load_file(root / "weights" / "latest" / "model.safetensors"), read_json_lines(root / "metrics.jsonl")

    return run


@pytest.mark.parametrize("extra", [{}, {"normalize": "sequences", "entropy_coef": 0.01}])
def test_the_same_formula_gives_the_same_bits(train, extra: dict[str, Any]) -> None:
    shared = {"old_logprobs": "recomputed"} | extra
    ours, our_metrics = train("ours", {"type": "grpo", "clip_low": 0.1, "clip_high": 0.1} | shared)
    own = {"type": "./own_loss_of_a_test.py:clipped", "options": {"clip": 0.1}}
    theirs, their_metrics = train("theirs", own | shared)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for line, other in zip(our_metrics, their_metrics, strict=True):
        names = ("loss", "loss/policy", "entropy", "ratio", "mismatch_kl", "max/logprob_difference", "grad_norm", "lr")
        assert {name: line[name] for name in names} == {name: other[name] for name in names}
        assert other["own/ratio"] == pytest.approx(line["ratio"]) and other["own/largest"] > 1


def test_its_options_reach_it(train) -> None:
    own = {"type": "own_loss_of_a_test:clipped", "old_logprobs": "recomputed"}
    tight, _ = train("tight", own | {"options": {"clip": 1e-4}})
    wide, _ = train("wide", own | {"options": {"clip": 0.9}})
    assert any(not torch.equal(tight[name], wide[name]) for name in tight)


@pytest.mark.parametrize(("loss", "message"), UNLEARNABLE)
def test_what_cannot_be_learned_from_is_a_mistake_of_one_line(train, loss: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train("refused", loss)
    assert "\n" not in str(caught.value)


def test_a_function_that_raises_in_the_middle_of_a_run_is_told_by_the_users_lines_alone(train) -> None:
    place = r"\(own_loss_of_a_test\.py:\d+ in raises_later\)"
    with pytest.raises(UserError, match=rf"^loss\.type = '.*:raises_later' failed: KeyError: 'b' {place}\n") as caught:
        train("raises", {"type": "own_loss_of_a_test:raises_later"})
    assert str(caught.value).count("  File ") == 1 and '{"a": 1}["b"]' in str(caught.value)


def test_a_full_gpu_is_no_mistake_of_the_function(train) -> None:
    with pytest.raises(OutOfMemory, match="lower seq_len"):
        train("full", {"type": "own_loss_of_a_test:fills_the_gpu"})


@pytest.mark.parametrize(("loss", "message"), UNLEARNABLE)
def test_the_same_is_said_before_anything_starts(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        try_policy_loss(LossConfig.model_validate(loss))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("compares", r"failed on a tiny example: TypeError: .*NoneType.* \(own_loss_of_a_test\.py:\d+ in compares\)\n"),
        ("changes_what_is_needed", r"failed on a tiny example: RuntimeError: .*modified by an inplace operation"),
        ("hangs", r"cannot be used: it took longer than 0\.2 s .* \(own_loss_of_a_test\.py:\d+ in hangs\)"),
    ],
)
def test_a_function_that_fails_or_hangs_is_refused_before_anything_starts(name: str, message: str) -> None:
    config = LossConfig(type=f"own_loss_of_a_test:{name}")
    with pytest.raises(UserError, match=rf"^trainer\.loss\.type = 'own_loss_of_a_test:{name}' {message}") as caught:
        try_policy_loss(config, "trainer.loss", timeout_s=0.2 if name == "hangs" else 60)
    assert name == "hangs" or "concurrent" not in str(caught.value), "frames that are not the user's"
    sys.modules["own_loss_of_a_test"].LET_GO.set()


@pytest.mark.parametrize(
    "loss",
    [
        {"type": "own_loss_of_a_test:clipped", "options": {"clip": 0.1}},
        {"type": "own_loss_of_a_test:clipped", "normalize": "sequences", "correction": {"type": "mask"}},
        {"type": "own_loss_of_a_test:constant", "entropy_coef": 0.01},
        {"type": "own_loss_of_a_test:compares", "kl": {"coef": 0.1, "place": "reward"}},
        {"type": "own_loss_of_a_test:clipped", "teacher": {"coef": 0.1, "model": "a"}},
    ],
)
def test_a_function_that_can_be_used_passes_before_the_start(loss: dict[str, Any]) -> None:
    try_policy_loss(LossConfig.model_validate(loss))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs_tokens", r"failed on a micro-batch without tokens, which ranks with too few sequences get: Runtime"),
        ("measures_tokens", r"returned the metrics \[.*'own/mean'.*\], but \[.*\] for a micro-batch without tokens"),
    ],
)
def test_with_several_ranks_a_function_is_tried_without_tokens(name: str, message: str) -> None:
    config = LossConfig(type=f"own_loss_of_a_test:{name}")
    try_policy_loss(config)
    with pytest.raises(UserError, match=rf"^loss\.type = 'own_loss_of_a_test:{name}' {message}"):
        try_policy_loss(config, num_ranks=2)
    try_policy_loss(LossConfig(type="own_loss_of_a_test:clipped"), num_ranks=2)


@pytest.mark.parametrize("name", ["moves", "launches"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_function_for_gpus_alone_is_let_through(name: str, num_ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    if name == "launches":
        pytest.importorskip("triton", reason="pip install triton")
    try_policy_loss(LossConfig(type=f"own_loss_of_a_test:{name}"), num_ranks=num_ranks)
    assert f"'own_loss_of_a_test:{name}' could not be tried" in caplog.text


def test_another_term_may_bring_the_gradient(train) -> None:
    _, metrics = train("entropy", {"type": "own_loss_of_a_test:constant", "entropy_coef": 0.01})
    assert all(line["grad_norm"] > 0 for line in metrics)


def test_tokens_without_advantage_are_computed(tiny_model: Path) -> None:
    """Only its author knows whether they have a gradient."""
    config = TrainerConfig.model_validate({"model": {"name": tiny_model}, "loss": {"type": "a.b:c"}})
    assert not ignores_zero_advantages(config.loss)
