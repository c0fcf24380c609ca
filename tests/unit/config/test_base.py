"""Files and flags in, one frozen config out, or one message."""

import json
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.commands.align import AlignConfig
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import load_config, parse
from tandem.config.inference import InferenceConfig
from tandem.config.reward_server import RewardServerConfig


def test_defaults_then_files_then_flags(rl_toml: str, tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("max_steps: 70\ntrainer:\n  keep_weights: 9\n")
    config = load_config(RLConfig, ["@", rl_toml, "@", str(more), "--seed", "5"])
    assert (config.seq_len, config.max_steps, config.trainer.keep_weights, config.seed) == (64, 70, 9, 5)
    assert config.orchestrator.group_size == 8
    assert load_config(RLConfig, ["--max-steps", "80", "@", rl_toml, "@", str(more)]).max_steps == 80


def test_section_files_of_several_kinds_apply_from_left_to_right(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('keep_weights = 5\nrollout_timeout_s = 7.0\n[model]\nname = "m"\n')
    (tmp_path / "b.json").write_text(json.dumps({"keep_weights": 6}))
    (tmp_path / "o.yaml").write_text("group_size: 4\n")
    arguments = ["--trainer", "@", f"{tmp_path}/a.toml", "--trainer", "@", f"{tmp_path}/b.json"]
    config = load_config(RLConfig, [*arguments, "--orchestrator", "@", f"{tmp_path}/o.yaml"])
    assert (config.trainer.keep_weights, config.trainer.rollout_timeout_s) == (6, 7.0)
    assert config.orchestrator.group_size == 4
    assert config.inference is None


def test_dotted_kebab_case_flags_reach_nested_options(rl_toml: str) -> None:
    flags = ["--orchestrator.client.base-url", "http://127.0.0.1:9000", "--inference.server.port", "9000"]
    config = load_config(RLConfig, ["@", rl_toml, *flags, "--trainer.optimizer.lr", "3e-4"])
    assert config.orchestrator.client.base_url == "http://127.0.0.1:9000"
    assert config.inference is not None and config.inference.server.port == 9000
    assert config.trainer.optimizer.lr == 3e-4


def test_a_value_may_follow_an_equals_sign(rl_toml: str) -> None:
    """Also of keys that no option names, and in sections that may be left out."""
    flags = ["--slurm.time=2:00:00", "--slurm.nodes=2", "--slurm.export=A=1", "--dry-run=true"]
    flags += ["--inference.engine=vllm", "--inference.vllm.flags.tensor-parallel-size=2"]
    config = load_config(RLConfig, ["@", rl_toml, *flags])
    assert config.slurm is not None and config.inference is not None and config.dry_run
    assert config.slurm.sbatch == {"nodes": 2, "time": "2:00:00", "export": "A=1"}
    assert config.inference.vllm.flags == {"tensor-parallel-size": 2}


def test_json_is_read_below_a_table_with_keys_of_any_name(rl_toml: str, tmp_path: Path) -> None:
    more = tmp_path / "more.toml"
    more.write_text("[orchestrator.env.args]\nfrom_file = '[0]'\n")
    values = {
        "config": '{"max_terms": 3}',
        "data-sets": '[{"name": "a"}]',
        "pattern": "[0-9]+",
        "size": "-3",
        "a.b": "2",
    }
    flags = [part for name, value in values.items() for part in (f"--orchestrator.env.args.{name}", value)]
    flags += ["--orchestrator.env.args", '{"typed": "[1]"}']
    assert load_config(RLConfig, ["@", rl_toml, "@", str(more), *flags]).orchestrator.env.args == {
        "from_file": "[0]",
        "config": {"max_terms": 3},
        "data_sets": [{"name": "a"}],
        "pattern": "[0-9]+",
        "size": -3,
        "a": {"b": 2},
        "typed": "[1]",
    }


def test_boolean_flags_need_no_value(rl_toml: str) -> None:
    config = load_config(RLConfig, ["@", rl_toml, "--dry-run", "--no-clean"])
    assert (config.dry_run, config.clean) == (True, False)


def test_a_boolean_flag_may_stand_before_the_file(rl_toml: str) -> None:
    config = load_config(RLConfig, ["--dry-run", "@", rl_toml])
    assert config.dry_run and config.max_steps == 60


def test_none_as_text_is_none(rl_toml: str, tmp_path: Path) -> None:
    more = tmp_path / "more.toml"
    more.write_text("[checkpoint]\nevery = 5\n[trainer]\nthreads = 3\n")
    files = ["@", rl_toml, "@", str(more)]
    assert load_config(RLConfig, files).trainer.threads == 3
    config = load_config(RLConfig, [*files, "--trainer.threads", "None", "--checkpoint.every", "None"])
    assert config.trainer.threads is None
    assert config.checkpoint.every is config.trainer.checkpoint.every is None


def test_a_section_may_be_none(rl_toml: str) -> None:
    config = load_config(RLConfig, ["@", rl_toml, "--inference", "None"])
    assert config.inference is None and config.trainer.max_steps == 60


def test_configs_are_frozen(rl_toml: str) -> None:
    config = load_config(RLConfig, ["@", rl_toml])
    for owner, name in ((config, "max_steps"), (config.trainer.optimizer, "lr"), (config.orchestrator.env, "id")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(owner, name, 1)


def test_parse_prints_one_message_and_exits_with_2(rl_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(RLConfig, "rl", "", ["@", rl_toml, "--max-step", "3"])
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "rl: unknown key 'max_step' (value '3'); did you mean 'max_steps'?\n"


def test_parse_reads_the_command_line(rl_toml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rl", "@", rl_toml, "--max-steps", "7"])
    assert parse(RLConfig, "rl", "").max_steps == 7


EXAMPLES = Path(__file__).parents[3] / "examples"
CLASSES = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "reward_server": RewardServerConfig,
}


def test_there_are_examples_to_parse() -> None:
    assert len(list(EXAMPLES.rglob("*.toml"))) >= 2


# Layers say what differs from the file they go on top of; test_losses parses them so.
WHOLE = sorted(path for path in EXAMPLES.rglob("*.toml") if path.parent.name != "algorithms")


def test_every_example_has_an_output_directory_of_its_own() -> None:
    """So that none is in the way of another; a run in three files has one, and a reward server none."""
    folders = [
        tomllib.loads(path.read_text()).get("output_dir")
        for path in EXAMPLES.rglob("*.toml")
        if path.parent.name != "three_files" or path.stem == "orchestrator"
        if not path.stem.startswith("reward_server")
    ]
    assert None not in folders and len(folders) == len(set(folders)) > 10


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_toml_parses(path: Path) -> None:
    """By itself, also a section of a run that is given in three files."""
    named = next((cls for name, cls in CLASSES.items() if path.name.startswith(name)), None)
    cls = AlignConfig if path.parent.name == "preference" else named
    assert cls is not None, f"{path}: its name does not say which config it is"
    config = load_config(cls, ["@", str(path)])
    assert config.model is None or str(config.model.name) not in ("", ".")


def test_runs_given_in_three_files_parse_together() -> None:
    for folder in {path.parent for path in EXAMPLES.rglob("trainer*.toml")}:
        names = ("trainer", "orchestrator", "inference")
        arguments = [part for name in names for part in (f"--{name}", "@", f"{folder}/{name}.toml")]
        assert load_config(RLConfig, arguments).inference is not None
