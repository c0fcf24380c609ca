"""What pyproject.toml asks for: all that is imported, bounded on both sides, and what the tests run with between."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

import tandem
from tandem.envs.verifiers import SUPPORTED

ROOT = Path(__file__).parents[2]
COMES_WITH = {"triton": "torch", "_typeshed": "pyright"}  # a build of torch asks for one exact version of triton


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in found if requirement.name != project["name"]]


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def same_name(name: str) -> str:
    return name.lower().replace("_", "-")


def test_what_is_imported_is_declared() -> None:
    """And not only brought by something else, which may stop to do so."""
    sources = Path(tandem.__file__).parent.rglob("*.py")
    found = {name.partition(".")[0] for path in sources for name in imported(path.read_text())}
    assert {"torch", "multidict", "datasets"} < found
    declared = {same_name(requirement.name) for requirement in requirements()}
    distributions = packages_distributions()
    others = found - sys.stdlib_module_names - COMES_WITH.keys() - {tandem.__name__}
    assert [name for name in sorted(others) if same_name(distributions.get(name, [name])[0]) not in declared] == []


def test_every_dependency_has_an_upper_bound() -> None:
    operators = {str(requirement): {part.operator for part in requirement.specifier} for requirement in requirements()}
    assert [name for name, found in operators.items() if not found & {"<", "<=", "==", "~="}] == []


def test_pinned_versions_are_within_the_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.lower().replace("_", "-").split("==") for line in lines if "==" in line)
    asked = [(requirement, pinned.get(requirement.name.lower())) for requirement in requirements()]
    assert [
        str(requirement) for requirement, version in asked if version and version not in requirement.specifier
    ] == []


def test_the_version_of_verifiers_that_users_are_told_to_install_is_the_one_of_the_extra() -> None:
    [verifiers] = [requirement for requirement in requirements() if requirement.name == "verifiers"]
    assert SUPPORTED in verifiers.specifier
