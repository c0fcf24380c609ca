"""`--help all` of every command: complete, and without torch. `--help`: what people change, on a page."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, Field, create_model

from tandem.commands.align import AlignConfig
from tandem.commands.evaluate import EvaluateConfig
from tandem.commands.export import ExportConfig
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.commands.sweep import SweepConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import Config, parse
from tandem.config.help import render_help
from tandem.config.inference import InferenceConfig
from tandem.config.overview import COMMON, asked_topic, common_options, render_overview, tell
from tandem.config.reward_server import RewardServerConfig
from tandem.config.shared import OptimizerConfig
from tandem.config.short_names import EVALUATE, INFERENCE, MODEL, ORCHESTRATOR, RL, TRAINER
from tandem.entrypoints import evaluate, export, rl, sweep

COMMANDS: dict[str, type[BaseModel]] = {
    "rl": RLConfig,
    "inference": InferenceConfig,
    "orchestrator": OrchestratorConfig,
    "trainer": TrainerConfig,
    "sft": SFTConfig,
    "align": AlignConfig,
    "reward_server": RewardServerConfig,
    "export": ExportConfig,
}
OVERVIEWS: dict[str, tuple[type[Config], dict[str, str], str]] = {
    "rl": (RLConfig, MODEL | RL, rl.DESCRIPTION),
    "inference": (InferenceConfig, MODEL | INFERENCE, ""),
    "orchestrator": (OrchestratorConfig, MODEL | ORCHESTRATOR, ""),
    "trainer": (TrainerConfig, MODEL | TRAINER, ""),
    "sft": (SFTConfig, MODEL, ""),
    "align": (AlignConfig, MODEL | TRAINER, ""),
    "evaluate": (EvaluateConfig, EVALUATE, evaluate.DESCRIPTION),
    "reward-server": (RewardServerConfig, MODEL | INFERENCE, ""),
    "export-model": (ExportConfig, {}, export.DESCRIPTION),
    "sweep": (SweepConfig, {}, sweep.DESCRIPTION),
}
# Runs the command as a user would, then says on standard error whether torch came along.
PROBE = """\
import runpy, sys
sys.argv = [sys.argv[1], "--help", "all"]
try:
    runpy.run_module("tandem.entrypoints." + sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def options(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The flag of every option, however deep."""
    for name, field in cls.model_fields.items():
        inner = [
            part
            for part in (field.annotation, *get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        flag = prefix + name.replace("_", "-")
        if inner:
            each = "[*]." if get_origin(field.annotation) is list else "."
            yield from options(inner[0], flag + each)
        else:
            yield f"--{flag}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_needs_no_torch(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE, command],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "300"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "False\n"
    flags = list(options(COMMANDS[command]))
    assert len(flags) > (4 if command in ("export", "reward_server") else 15)
    for flag in flags:
        assert is_described(flag, result.stdout), f"{flag} is missing or not described"


@pytest.mark.parametrize("command", [*COMMANDS, "evaluate", "sweep"])
def test_help_has_room_in_a_usual_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit):
        import_module(f"tandem.entrypoints.{command}").main()
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def is_described(flag: str, help_text: str) -> bool:
    """Flag, kind of value, two spaces or a new line, and a sentence before "(default: …)" or "(required)"."""
    return re.search(rf" {re.escape(flag)} \S[^│]*?(  +|│\n│ {{3,}})[^\s(│]", help_text) is not None


def test_an_option_without_description_would_be_noticed() -> None:
    after = "│ --other INT    Something else. (default: 3)    │"
    assert not is_described("--model.name", f"│ --model.name PATH     (required)     │\n{after}")
    assert is_described("--model.name", f"│ --model.name PATH     Where it lies. (required)     │\n{after}")


def test_importing_the_command_modules_brings_no_torch() -> None:
    modules = ", ".join(f"tandem.entrypoints.{name}" for name in COMMANDS)
    probe = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=300).returncode == 0


@pytest.mark.parametrize("prog", OVERVIEWS)
def test_the_overview_is_a_page_of_options_as_they_are(prog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cls, names, description = OVERVIEWS[prog]
    shown = render_overview(cls, prog, description, names)
    assert COMMON.keys() < OVERVIEWS.keys()
    assert max(map(len, shown.splitlines())) <= 80 and shown.count("\n") <= 62
    everything = render_help(cls, prog, "")
    told = common_options(cls, prog, names)
    assert 4 <= len(told) <= 34 and len({option.path for option in told}) == len(told)
    for option in told:
        flag = option.path.replace("_", "-")
        assert f"│ --{flag} " in everything, f"{prog}: {option.flag} is no option"
        assert f"  --{option.flag}" in shown


def test_values_of_the_overview_are_those_of_the_configuration() -> None:
    told = {option.flag: option for option in common_options(RLConfig, "rl", MODEL | RL)}
    assert told["optimizer.lr"].default == str(OptimizerConfig().lr)
    assert told["model"].path == "model.name" and told["model"].default == "PATH"
    assert (told["seq-len"].default, told["resume"].default, told["env.args"].default) == ("2048", "", "DICT")
    assert told["max-steps"].meaning == "Training steps of the run."
    # A section that is off has no defaults until something of it is given.
    assert told["lora.rank"].default == "INT"
    assert told["lora.rank"].meaning == "Train a LoRA adapter. Rank of the adapter of each projection."


def help_of(topic: str, cls: type[Config] = RLConfig) -> str:
    return tell(cls, "rl", "", topic, {})


def test_help_of_a_section_an_option_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    section = help_of("trainer.optimizer")
    assert section.count("╭") == 1 and "--trainer.optimizer.weight-decay FLOAT" in section
    assert help_of("optimizer") == section
    option = help_of("--max_steps")
    assert option.count("│ --") == 1 and "--max-steps INT" in option
    outer = help_of("trainer.loss")
    assert "trainer.loss.kl" in outer.partition("Sections within")[2] and "--trainer.loss.kl.coef" not in outer
    assert "of type {judge}" in help_of("env.rewards")
    assert "--checkpoint.every" in help_of("every") and "--orchestrator.eval.every" in help_of("every")
    assert "--trainer.checkpoint.every" not in help_of("every")
    assert help_of("all") == render_help(RLConfig, "rl", "")


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("trainer.optimiser", "did you mean 'trainer.optimizer'?"),
        ("optimiser", "did you mean 'trainer.optimizer'?"),
        ("max-stps", "did you mean 'max-steps'?"),
        ("zzz", "`--help all` has all of them"),
    ],
)
def test_help_of_what_is_not_there(topic: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(RLConfig, "rl", "", ["--help", topic])
    assert left.value.code == 2
    assert capsys.readouterr().err == f"rl: --help {topic}: there is no such section or option; {hint}\n"


def test_where_help_is_asked_for() -> None:
    assert asked_topic(["@", "rl.toml", "--max-steps", "3"]) is None
    for words in (
        ["--help"],
        ["rl.toml", "-h"],
        ["--help", "@", "rl.toml"],
        ["--help", "rl.toml"],
        ["-h", "--lr", "1"],
    ):
        assert asked_topic(words) == "", words
    for words in (["--help", "loss"], ["@", "rl.toml", "-h", "loss"], ["--help=loss"]):
        assert asked_topic(words) == "loss", words


class Inner(Config):
    """What lies deeper."""

    weight: float = 1.5
    """How much."""


class Outer(Config):
    """A command."""

    name: str
    """What it
    is called."""

    kinds: list[Literal["a", "b"]] = []
    """Which."""

    maybe: Inner | None = None
    many: list[Inner] = []
    """Several."""


class Heir(Outer):
    """Another command."""

    size: int | None = None
    """How large."""


def test_options_are_shown_with_kind_description_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert (
        render_help(Heir, "try", "Tries it.")
        == """\
usage: try [-h [TOPIC]] [@ FILE] [OPTIONS]

Tries it.

╭─ options ────────────────────────────────────────────────╮
│ -h, --help             an overview; --help SECTION,      │
│                        --help OPTION, --help all: more   │
│ --name STR             What it is called. (required)     │
│ --kinds [{a,b} [...]]  Which. (default: [])              │
│ --many list[{weight}]  Several. (default: [])            │
│ --size INT|None        How large. (default: None)        │
╰──────────────────────────────────────────────────────────╯

╭─ maybe: What lies deeper. (optional, default: None) ─────╮
│ --maybe.weight FLOAT  How much. (default: 1.5)           │
╰──────────────────────────────────────────────────────────╯

╭─ many[*]: Several. (list item, via @ file or JSON) ──────╮
│ --many[*].weight FLOAT  How much. (default: 1.5)         │
╰──────────────────────────────────────────────────────────╯
"""
    )


def test_a_long_flag_stands_on_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    kinds = Literal["a kind with a long name", "another kind with a long name", "and a third"]
    cls = create_model("Wide", kind=(kinds, "and a third"), x=(int, 1), __module__=__name__)
    *_, flag, more, default, x, _ = render_help(cls, "try", "").splitlines()
    assert "--kind {a kind with a long name,another kind" in flag and "a third}" in more
    assert default.strip("│ ") == "(default: and a third)"
    assert x.startswith("│ --x INT     (default: 1)")


class Limited(Config):
    """A command with a limit."""

    limit: Literal["auto"] | Annotated[int, Field(ge=1)] | None = None
    """How many."""


def test_an_annotated_type_is_shown_as_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert "--limit {auto}|INT|None  How many. (default: None)" in render_help(Limited, "try", "")


def test_a_terminal_without_our_characters_gets_help_too() -> None:
    command = [sys.executable, "-m", "tandem.entrypoints.rl", "--help", "all"]
    told = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=True)
    assert b"--max-steps" in told.stdout and told.stderr == b""
