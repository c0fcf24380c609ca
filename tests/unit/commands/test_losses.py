"""Options of objectives and advantages: usual values by type, and combinations that are refused."""

from pathlib import Path

import pytest

from tandem.algorithms.objective.policy import LossConfig
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.rl import RLConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import load_config

MODEL = ("--model.name", "m")
REVERSE_TEXT = Path(__file__).parents[3] / "examples" / "reverse_text"


def test_clips_have_usual_values_by_type() -> None:
    assert LossConfig().arguments == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert LossConfig(type="gspo").arguments == {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}
    assert LossConfig(type="cispo").arguments == {"clip_high": 4.0}
    assert LossConfig(clip_high=0.28).arguments["clip_high"] == 0.28 and LossConfig(type="reinforce").arguments == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss.type cispo --loss.clip-low 0.1", "clip_low = 0.1 has no effect with type = 'cispo'; leave it out"),
        ("--loss.type reinforce --loss.clip-high 0.1", "clip_high = 0.1 has no effect with type = 'reinforce'"),
        ("--loss.type cispo --loss.dual-clip 3", "dual_clip = 3.0 has no effect with type = 'cispo'"),
        ("--loss.clip-high 0.5 --loss.dual-clip 1.4", "dual_clip = 1.4 must be above 1 + clip_high = 1.5"),
        ("--loss.normalize constant", 'normalize = "constant" needs constant_length'),
        ("--loss.constant-length 8", "constant_length = 8 has no effect with normalize = 'tokens'"),
        ("--loss.type rloo", "normalize = 'tokens' with type = \"rloo\""),
        ("--loss.correction.type truncate", 'would correct twice; set old_logprobs = "recomputed"'),
        ("--loss.type reinforce --loss.old-logprobs recomputed", "which has no ratio"),
        ("--loss.correction.low 3 --loss.correction.high 2", "low = 3.0 and high = 2.0 leave no range"),
        ("--loss.teacher.coef 1", "coef = 1.0 needs a teacher"),
        ("--loss.teacher.model m", "model = 'm' is not used with coef = 0"),
        ("--loss.kl.estimator k4", "loss.kl.estimator = 'k4' is not valid; one of: k1, k2, k3"),
        ("--loss.kl.coef -1", "loss.kl.coef = '-1' is not valid"),
        ("--loss.type grop", "loss.type = 'grop' is not valid; did you mean 'grpo'?"),
        (
            "--loss.type my.losses:mine --loss.clip-low 0.1",
            "clip_low = 0.1 has no effect with type = 'my.losses:mine'",
        ),
        ('--loss.options {"clip":0.1}', "options = {'clip': 0.1} has no effect with type = 'grpo'"),
    ],
)
def test_losses_that_are_refused(refusal, flags: str, message: str) -> None:
    assert message in refusal(*MODEL, *flags.split(), cls=TrainerConfig)


def test_a_loss_of_the_users_own() -> None:
    flags = ["--loss.type", "./mine.py:loss", "--loss.options", '{"clip": 0.1}', "--loss.kl.coef", "0.1"]
    loss = load_config(TrainerConfig, [*MODEL, *flags]).loss
    assert loss.is_custom and loss.options == loss.arguments == {"clip": 0.1}
    assert LossConfig.model_validate(loss.model_dump(mode="json")) == loss
    assert not LossConfig().is_custom


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--group-size 1", "group_size = 1 with advantage.type = 'grpo'"),
        ("--group-size 1 --advantage.type rloo", "set group_size to 2 or more"),
        ("--overlong.buffer-tokens 200", "overlong.buffer_tokens = 200 is more than sampling.max_tokens = 128"),
        ("--advantage.type grp", "did you mean 'grpo'?"),
        (
            "--advantage.type reward --group-size 1 --filters.equal-rewards",
            "filters.equal_rewards = true with group_size = 1: the rewards of a group of one are always equal",
        ),
    ],
)
def test_advantages_that_are_refused(refusal, flags: str, message: str) -> None:
    assert message in refusal(*MODEL, *flags.split(), cls=OrchestratorConfig)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trainer.loss.type ppo", 'set orchestrator.advantage.type = "reward"'),
        ("--orchestrator.advantage.type none", "without a teacher model leaves nothing to learn from"),
    ],
)
def test_advantages_that_do_not_fit_the_loss(refusal, rl_toml: str, flags: str, message: str) -> None:
    assert message in refusal("@", rl_toml, *flags.split())


@pytest.mark.parametrize("type", ["reinforce_pp", "reward", "none"])
def test_groups_of_one_where_nothing_is_relative_to_the_group(type: str) -> None:
    config = OrchestratorConfig.model_validate({"model": {"name": "m"}, "group_size": 1, "advantage": {"type": type}})
    assert config.group_size == 1


def test_a_resolved_configuration_is_accepted_again() -> None:
    """What `rl` writes for its processes says every value, the usual ones included."""
    for type in ("grpo", "cispo", "reinforce", "ppo"):
        config = LossConfig.model_validate({"type": type})
        assert LossConfig.model_validate(config.model_dump(mode="json")) == config


def num_rollouts(config: RLConfig) -> int:
    return config.orchestrator.prompts_per_step * config.orchestrator.group_size


@pytest.mark.parametrize(
    "name",
    ["cispo", "dapo", "distillation", "dr_grpo", "gspo", "off_policy", "ppo", "reinforce_pp", "rloo"],
)
def test_every_shipped_algorithm_parses_on_top_of_its_base(name: str) -> None:
    base, run = ["@", str(REVERSE_TEXT / "rl.toml")], ["--output-dir", "run"]
    config = load_config(RLConfig, [*base, "@", str(REVERSE_TEXT / "algorithms" / f"{name}.toml"), *run])
    plain = load_config(RLConfig, [*base, *run])
    sections = (config.trainer, config.orchestrator)
    assert sections != (plain.trainer, plain.orchestrator), "a layer that changes nothing"
    assert num_rollouts(config) == num_rollouts(plain)
    assert config.trainer.loss.type == (name if name in ("cispo", "gspo", "ppo", "rloo") else "grpo")


def test_the_list_of_algorithms_is_complete() -> None:
    assert len(list((REVERSE_TEXT / "algorithms").glob("*.toml"))) == 9
