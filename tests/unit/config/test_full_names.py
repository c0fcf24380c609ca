"""Options by the end of their name."""

from pathlib import Path

import pytest

from tandem.commands.align import AlignConfig
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import Config, load_config
from tandem.config.explain import option_paths
from tandem.config.full_names import find_place, place_flags
from tandem.config.hints import FOREIGN
from tandem.config.inference import InferenceConfig
from tandem.config.vllm import take_vllm_flags

ALL = (RLConfig, SFTConfig, AlignConfig, InferenceConfig, OrchestratorConfig, TrainerConfig)


@pytest.mark.parametrize(
    ("flag", "full"),
    [
        ("--metrics.report-to", "--orchestrator.metrics.report-to"),
        ("--report-to", "--orchestrator.metrics.report-to"),
        ("--optimizer.lr", "--trainer.optimizer.lr"),
        ("--lr", "--trainer.optimizer.lr"),
        ("--env.reward", "--orchestrator.env.reward"),
        ("--env.args.min-length", "--orchestrator.env.args.min-length"),
        ("--no-prefix-caching", "--no-inference.prefix-caching"),
        ("--server.port", "--inference.server.port"),
        ("--lora.rank", "--trainer.lora.rank"),
        ("--dtype", "--model.dtype"),  # of the model that all processes share
        ("--eval.every", "--orchestrator.eval.every"),
        ("--optimizer.lrr", "--trainer.optimizer.lrr"),  # so that the refusal knows what is there
        # Left as they are: known at the top, meant by several, or by nobody; or they would switch on a section.
        ("--max-steps", "--max-steps"),
        ("--no-resume", "--no-resume"),
        ("--device", "--device"),
        ("--every", "--every"),
        ("--colour", "--colour"),
        ("--rank", "--rank"),
        ("--nodes", "--nodes"),
        ("--envs.weight", "--orchestrator.envs.weight"),
    ],
)
def test_where_a_flag_leads(flag: str, full: str) -> None:
    assert place_flags(RLConfig, [flag, "3"]) == [full, "3"]
    assert place_flags(RLConfig, [f"{flag}=--lr"]) == [f"{full}=--lr"]


def test_flags_and_files_reach_their_option(rl_toml: str, tmp_path: Path) -> None:
    more = tmp_path / "more.toml"
    more.write_text('sampling = {top_k = 5}\n[metrics]\nreport_to = ["wandb"]\n[env.args]\nsize = 3\n')
    env = tmp_path / "env.toml"
    env.write_text('id = "arithmetic"\n')
    flags = [
        "--metrics.report-to",
        "tensorboard",
        "wandb",
        "--no-prefix-caching",
        "--port",
        "81",
        "--env",
        "@",
        str(env),
    ]
    config = load_config(RLConfig, ["@", rl_toml, "@", str(more), *flags])
    assert config.orchestrator.metrics.report_to == ["tensorboard", "wandb"]
    assert (config.orchestrator.sampling.top_k, config.orchestrator.sampling.max_tokens) == (5, 16)
    assert (config.orchestrator.env.id, config.orchestrator.env.args) == ("arithmetic", {"size": 3})
    assert config.inference is not None
    assert (config.inference.prefix_caching, config.inference.server.port) == (False, 81)
    from_python = RLConfig.from_layers({"model": {"name": "m"}}, {"lr": 0.5, "metrics": {"project": "p"}})
    assert (from_python.trainer.optimizer.lr, from_python.orchestrator.metrics.project) == (0.5, "p")


def test_two_names_of_one_option(refusal, rl_toml: str, tmp_path: Path) -> None:
    twice = refusal("@", rl_toml, "--lr", "1", "--trainer.optimizer.lr", "1")
    assert twice == "--lr and --trainer.optimizer.lr say the same thing; give one of them"
    more = tmp_path / "more.toml"
    more.write_text("lr = 1e-3\n[trainer.optimizer]\nlr = 1e-3\n")
    told = refusal("@", rl_toml, "@", str(more))
    assert told == "trainer.optimizer.lr is also given as 'lr' at the top; give it once"
    # A flag wins over a file, whichever name each of them uses.
    assert load_config(RLConfig, ["@", rl_toml, "--lr", "2", "--trainer.optimizer.eps", "1"]).trainer.optimizer.lr == 2


def test_what_could_be_several_is_refused_with_all_of_them(refusal, rl_toml: str) -> None:
    message = refusal("@", rl_toml, "--every", "3")
    assert message == "unknown key 'every' (value '3'); did you mean 'checkpoint.every' or 'orchestrator.eval.every'?"
    message = refusal("@", rl_toml, "--type", "linear")
    for option in ("trainer.loss.type", "trainer.scheduler.type", "orchestrator.advantage.type"):
        assert repr(option) in message


def test_vllms_server_takes_them_too() -> None:
    taken, _ = take_vllm_flags(
        InferenceConfig, ["--engine", "vllm", "--weight-roots", "a", "--tensor-parallel-size", "2"]
    )
    config = load_config(InferenceConfig, ["--model.name", "m", *taken])
    assert config.server.weight_roots == [Path("a")] and config.vllm.flags == {"tensor-parallel-size": 2}


@pytest.mark.parametrize("cls", ALL)
def test_a_name_of_others_is_not_taken_for_another_option(cls: type[Config]) -> None:
    """TRL's `temperature` is the one of training, not that of some section that happens to have one."""
    paths = set(option_paths(cls))
    for name, ours in FOREIGN.items():
        place = find_place(cls, name, [""])
        meant = [path for path in paths for option in ours if path == option or path.endswith(f".{option}")]
        assert place == name or not meant or place in meant, f"{cls.__name__}: {name} → {place}, not {meant}"
