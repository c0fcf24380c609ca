"""What pyproject.toml asks for: bounded on both sides, and what the tests run with lies between."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tandem.envs.verifiers import SUPPORTED

ROOT = Path(__file__).parents[2]


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in found if requirement.name != project["name"]]


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
