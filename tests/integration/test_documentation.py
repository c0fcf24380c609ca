"""Every command that README and docs show works as it stands after `make demo`: flags, files and output directories
of all of them are checked by a dry run, and those that take seconds are run."""

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.documentation import PAGES, ROOT, Command, all_commands, commands_of, dead_links, stray_commands
from tests.integration.processes import ENVIRONMENT, Starter, children_of, command, is_alive, wait_until
from tests.integration.servers import wait_until_healthy
from tests.patience import PATIENCE
from tests.ports import free_port

from tandem.commands.align import AlignConfig
from tandem.commands.evaluate import EvaluateConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import load_config
from tandem.config.inference import InferenceConfig
from tandem.config.short_names import INFERENCE, ORCHESTRATOR, RL, spell_out
from tandem.config.vllm import take_vllm_flags
from tandem.entrypoints.sweep import read_command_line
from tandem.launch import preflight
from tandem.launch.ray import placement
from tandem.launch.ray.nodes import Node
from tandem.launch.sweep.document import read_document
from tandem.launch.sweep.expand import expand
from tandem.launch.sweep.resolve import Resolver
from tandem.trainer.checkpoints.history import newest_checkpoint
from tandem.utils.run_dir import RunDir

CONFIGS = {"rl": RLConfig, "sft": SFTConfig, "align": AlignConfig, "trainer": TrainerConfig}
# What `make demo` leaves; a command that starts a run there would be refused.
OF_THE_DEMO = {"outputs/reverse_text_sft", "outputs/reverse_text"}
NUM_STEPS = 20  # of the run that is stopped
NUM_ROWS = 600  # enough for what the examples hold out


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, warm_model: Path) -> Iterator[Path]:
    """A directory in which `make demo` has run, in fewer steps and with fewer rows; it is the current one."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(tiny_model, folder / "models" / "reverse_text")
    shutil.copytree(warm_model.parents[1], folder / "outputs" / "reverse_text_sft", symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for script, target in (
            ("reverse_text", "reverse_text_sft.jsonl"),
            ("preference", "preference"),
            ("calculator", "calculator_sft.jsonl"),
        ):
            run_script(f"examples/{script}/make_data.py", f"models/{target}")
        run_script("examples/calculator/make_model.py", "models/calculator")
        for name in ("calculator", "mixed"):  # what their warm-up would leave
            weights = Path(f"outputs/{name}_sft/weights")
            shutil.copytree("models/calculator", weights / "step_000001")
            (weights / "latest").symlink_to("step_000001")
        for path in (folder / "models").rglob("*.jsonl"):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:NUM_ROWS]))
        yield folder


@pytest.fixture(scope="module")
def trained(after_demo: Path) -> Path:
    """The run of the demo, shorter, and stopped on its way."""
    run_dir = RunDir(Path("outputs") / "reverse_text")
    steps = ("--checkpoint.every", "2", "--max-steps", str(NUM_STEPS), "--inference.server.port", str(free_port()))
    starter = Starter()
    process = starter.start("rl", "@", "examples/reverse_text/rl.toml", *steps)
    wait_until(lambda: process.poll() is not None or newest_checkpoint(run_dir) is not None, 120, "a checkpoint")
    children = children_of(process.pid)
    assert process.poll() is None, process.communicate()[0]
    starter.end_all()
    wait_until(lambda: not any(is_alive(pid) for pid in children.values()), 20, "its processes to end")
    return run_dir.root


@pytest.fixture
def reward_trained(after_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same directory, after `align @ examples/preference/reward.toml`."""
    (tmp_path / "outputs").mkdir()
    for name in ("examples", "models", "outputs/reverse_text_sft"):
        (tmp_path / name).symlink_to(after_demo / name)
    monkeypatch.chdir(tmp_path)
    finish(command("align", "@", "examples/preference/reward.toml", "--max-steps", "2"))


def run_script(*arguments: str) -> None:
    finish([sys.executable, *arguments])


def finish(words: list[str]) -> str:
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=240 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_training(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a dry run checks: flags, files, the model, rows and prompts, the output directory."""
    asks_a_server = any("reward_url" in word or "steering" in word for word in shown.words)
    untried = ["--no-orchestrator.env.check"] if asks_a_server else []
    for setting in shown.environment:
        monkeypatch.setenv(*setting.split("=", 1))
    monkeypatch.setattr("sys.argv", [shown.program, *shown.arguments, "--dry-run", *untried])
    monkeypatch.setattr(preflight, "_check_server", lambda config: None)  # of another process, or of vLLM
    nodes = [Node(name, f"10.0.0.{number}", 8) for number, name in enumerate(("node1", "node2"), 1)]
    monkeypatch.setattr(placement, "ask_nodes", lambda address: nodes)
    importlib.import_module(f"tandem.entrypoints.{shown.program}").main()


def check_server(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = take_vllm_flags(InferenceConfig, spell_out(shown.arguments, INFERENCE))
    config = load_config(InferenceConfig, arguments)
    assert config.engine == "sglang" or config.model.name.is_dir(), f"{shown}: no such model"
    assert not config.vllm.flags or config.engine == "vllm"


def check_evaluation(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(EvaluateConfig, spell_out(shown.arguments, ORCHESTRATOR))
    folder = config.model or config.run
    assert folder is not None and folder.is_dir(), f"{shown}: there is no such folder after the demo"


def check_sweep(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver(read_document(read_command_line(shown.arguments).file))
    assert len(resolver.resolve_all(expand(resolver.document))) == 12


def check_python(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *_ = shown.arguments
    assert script == "-m" or (ROOT / script).is_file(), f"{shown}: no such script"


def check_script(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/integration/test_tmux.py runs it."""
    assert (ROOT / shown.words[1]).is_file(), f"{shown}: no such script"


def check_torchrun(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shown.arguments
    module = words[words.index("-m") + 1]
    load_config(CONFIGS[module.removeprefix("tandem.entrypoints.")], words[words.index("-m") + 2 :])


def check_make(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()]
    assert set(shown.arguments) <= {*targets}, f"{shown}: no such target"


def leave_unchecked(shown: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs something, changes the shell, or is run below."""


CHECKS: dict[str, Callable[[Command, pytest.MonkeyPatch], None]] = {
    "rl": check_training,
    "sft": check_training,
    "align": check_training,
    "sweep": check_sweep,
    "inference": check_server,
    "python": check_python,
    "torchrun": check_torchrun,
    "make": check_make,
    "evaluate": check_evaluation,
    "reward-server": leave_unchecked,
    "export-model": leave_unchecked,
    "uvicorn": leave_unchecked,
    "bash": check_script,
    "export": leave_unchecked,
    "curl": leave_unchecked,
    "pip": leave_unchecked,
    ".": leave_unchecked,
}


def test_there_are_commands_and_all_of_them_are_in_bash_blocks() -> None:
    assert len(all_commands()) > 40
    assert {shown.program for shown in all_commands()} == CHECKS.keys()
    for page in PAGES:
        assert stray_commands(page) == [], f"{page}: put it in a bash block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    assert dead_links(page) == []


def test_the_flags_that_set_ports_are_those_of_the_commands() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    table = text.partition("| port |")[2].partition("\n\n")[0]
    flags = {word.strip("`,") for word in table.split() if word.startswith("`--")}
    assert "--rdzv-endpoint" in flags
    assert flags <= {word for shown in all_commands() for word in shown.words}


OF_ANOTHER_RUN = {"--help", "--resume", "--stop", "--status"}
SHOWN = [shown for shown in all_commands() if not OF_ANOTHER_RUN & set(shown.words)]


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_a_command_is_right(shown: Command, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CHECKS[shown.program](shown, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_of_a_page_is_in_the_way_of_another(page: Path, after_demo: Path) -> None:
    taken = set(OF_THE_DEMO)
    for shown in commands_of(page):
        if shown.program not in ("rl", "sft", "align") or OF_ANOTHER_RUN & set(shown.words):
            continue
        config = load_config(CONFIGS[shown.program], spell_out(shown.arguments, RL if shown.program == "rl" else {}))
        assert config.clean or str(config.output_dir) not in taken, f"{shown}: {config.output_dir} holds another run"
        taken |= set() if config.dry_run else {str(config.output_dir)}


def test_a_run_is_resumed_as_shown(trained: Path) -> None:
    shown = Command("docs/configuration.md", ("rl", "--resume", "outputs/reverse_text"))
    assert shown in commands_of(ROOT / "docs" / "configuration.md")
    assert "resuming after step" in finish(command("rl", *shown.arguments))
    assert newest_checkpoint(RunDir(trained)) == NUM_STEPS


def test_a_checkpoint_is_exported_as_shown(trained: Path) -> None:
    exports = [shown for shown in commands_of(ROOT / "docs" / "reliability.md") if shown.program == "export-model"]
    assert len(exports) == 2
    for shown in exports:
        newest = str(newest_checkpoint(RunDir(trained)))
        arguments = [argument if argument != "100" else newest for argument in shown.arguments]
        assert "the model of step" in finish(command("export", *arguments))


def test_a_run_is_evaluated_as_shown(trained: Path) -> None:
    [shown] = [shown for shown in commands_of(ROOT / "docs" / "environments.md") if "--run" in shown.words]
    output = finish(command("evaluate", *shown.arguments, "--num-prompts", "2", "--threads", "1"))
    assert "weights/step_" in output.replace("\n", "") and "results and samples are in" in output


def ask(curl: Command, port: int) -> httpx.Response:
    """What curl sends: the address, one header and the body."""
    url, body = next(word for word in curl.words if word.startswith("localhost:")), curl.words[-1]
    assert curl.words[-2] == "-d" and "content-type: application/json" in curl.words
    path = url.partition("/")[2]
    headers = {"content-type": "application/json"}
    return httpx.post(f"http://127.0.0.1:{port}/{path}", content=body, headers=headers, timeout=60, trust_env=False)


def test_a_model_is_served_as_shown(trained: Path, starter: Starter) -> None:
    check_answer(starter, "README.md", "inference", "choices")


def test_a_reward_model_is_served_as_shown(reward_trained: None, starter: Starter) -> None:
    check_answer(starter, "docs/alignment.md", "reward-server", "scores")


def test_goals_are_served_as_shown(after_demo: Path, starter: Starter) -> None:
    check_answer(starter, "docs/rewards.md", "reward-server", "reading_difficulty")


def check_answer(starter: Starter, page: str, server: str, expected: str) -> None:
    (shown,) = [shown for shown in commands_of(ROOT / page) if shown.program == server]
    (curl,) = [shown for shown in commands_of(ROOT / page) if shown.program == "curl"]
    port = free_port()
    arguments = shown.arguments[: shown.arguments.index("--port")] if "--port" in shown.words else shown.arguments
    process = starter.start(server.replace("-", "_"), *arguments, "--port", str(port))
    wait_until_healthy(process, f"http://127.0.0.1:{port}")
    answer = ask(curl, port)
    assert answer.status_code == 200 and expected in answer.json(), answer.text
