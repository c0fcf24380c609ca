"""One run for every combination of values, and names that tell them apart."""

from pathlib import Path

import pytest

from tandem.launch.sweep.document import read_document
from tandem.launch.sweep.expand import MAX_NAME, Variant, expand
from tandem.utils.errors import UserError


def variants(folder: Path, *arguments: str, algorithm: str = "dpo") -> list[Variant]:
    path = folder / "experiment.yaml"
    lines = "".join(f"  {line}\n" for line in arguments)
    path.write_text(f"execution:\n  algorithm: {algorithm}\n  output_dir: /sweep\nrl_config_args:\n{lines}")
    return expand(read_document(path))


def names(folder: Path, *arguments: str, algorithm: str = "dpo") -> list[str]:
    return [variant.name for variant in variants(folder, *arguments, algorithm=algorithm)]


def test_what_stands_first_changes_slowest(tmp_path: Path) -> None:
    runs = variants(tmp_path, "beta: [0.1, 0.2]", "seed: 3", "max_steps: [5, 6]", algorithm="[dpo, kto]")
    settings = ["beta0.1-steps5", "beta0.1-steps6", "beta0.2-steps5", "beta0.2-steps6"]
    assert [run.name for run in runs] == [f"{algorithm}-{rest}" for algorithm in ("dpo", "kto") for rest in settings]
    assert runs[3].varied == {"algorithm": "dpo", "beta": 0.2, "max_steps": 6}
    assert runs[3].section("rl_config_args") == {"beta": 0.2, "seed": 3, "max_steps": 6}


def test_a_run_alone_is_named_by_its_algorithm(tmp_path: Path) -> None:
    assert names(tmp_path, "beta: 0.1") == ["dpo"] and names(tmp_path, algorithm="3") == ["3"]


def test_a_long_name_is_shortened_and_stays_one_of_its_own(tmp_path: Path) -> None:
    """It names a folder, and a job. The same file gives the same names."""

    def named(length: int) -> list[str]:
        """Four runs, that differ in the last letter of their names or in the first."""
        key = "k" * (length - len("dpo-a"))
        return names(tmp_path, f"{key}: [a, b]", algorithm="[dpo, kto]")

    assert named(MAX_NAME)[0] == f"dpo-{'k' * (MAX_NAME - 5)}a"
    shortened = named(MAX_NAME + 1)
    assert {len(name) for name in shortened} == {MAX_NAME} == {100} and len(set(shortened)) == 4
    assert [name[:50] for name in shortened] == [name[:50] for name in named(MAX_NAME)]
    assert named(MAX_NAME + 1) == shortened


def test_labels_that_are_alike_are_told_apart(tmp_path: Path) -> None:
    """A name keeps what a file name may have of a value; where two values have the same left, a hash of each tells."""
    found = names(tmp_path, "dataset_name: [/data/a/rows, /data/b/rows, /data/c/other]")
    assert found[2] == "other" and len(set(found)) == 3
    assert all(name.startswith("rows.") and len(name) == len("rows.") + 8 for name in found[:2])
    assert names(tmp_path, 'env: ["a b", "/", c]') == ["a_b", "value", "c"]


def test_the_same_value_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 5: beta has 0\.1 twice, which would be the same run"):
        names(tmp_path, "beta: [0.1, 0.2, 0.1]")
    with pytest.raises(UserError, match=r"line 5: beta has 1 twice"):
        names(tmp_path, 'beta: [1, "1"]')
