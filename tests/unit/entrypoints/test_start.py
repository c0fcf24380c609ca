"""What happens to a command in its first seconds, whichever it is."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.patience import PATIENCE

from tandem.utils.processes import COMMANDS

ROOT = Path(__file__).parents[3]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
# As pip writes it.
SCRIPT = "import sys\nfrom {module} import main\nsys.exit(main())\n"
# In place of a library that is slow to import: somebody presses Ctrl-C meanwhile.
SLOW = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n"


def run(command: list[str], folder: Path) -> tuple[int, str, str]:
    """With the modules of a folder in front of all others: exit code and output."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT / 'src'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60 * PATIENCE)
    return done.returncode, done.stdout, done.stderr


def test_all_commands_are_known() -> None:
    assert sorted(COMMANDS) == sorted(SCRIPTS)


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
def test_ctrl_c_while_a_command_is_imported_is_one_line(name: str, as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(SLOW)
    script = tmp_path / name
    module = SCRIPTS[name].removesuffix(":main")
    script.write_text(SCRIPT.format(module=module))
    command = ["-m", module] if as_module else [str(script)]
    assert run([sys.executable, *command], tmp_path) == (130, "", "stopped by Ctrl-C\n")


def test_ctrl_c_while_the_configuration_is_read_is_one_line(tmp_path: Path) -> None:
    slow = "".join(f"    {line}\n" for line in SLOW.splitlines())
    text = f"import tomllib\ndef load(*_):\n{slow}tomllib.load = tomllib.loads = load\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    (tmp_path / "rl.toml").touch()
    command = [sys.executable, "-m", "tandem.entrypoints.rl", "@", str(tmp_path / "rl.toml")]
    assert run(command, tmp_path) == (130, "", "stopped by Ctrl-C\n")


def test_a_closed_terminal_is_sigterm_unless_nohup_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nprint('goes on', flush=True)\nos._exit(0)\n"
    )
    command = [sys.executable, "-m", "tandem.entrypoints.rl"]
    assert run(command, tmp_path) == (-signal.SIGTERM, "", "")
    assert run(["nohup", *command], tmp_path)[:2] == (0, "goes on\n")


def test_a_program_that_imports_a_command_keeps_its_signals_and_its_output() -> None:
    script = (
        "import signal, sys\nbefore = sys.stdout\nimport tandem.entrypoints.rl\nassert sys.stdout is before\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
