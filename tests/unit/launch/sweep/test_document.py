"""The experiment file: values with their lines, and what people get wrong in YAML."""

from pathlib import Path

import pytest

from tandem.launch.sweep.document import read_document
from tandem.launch.sweep.layout import check_layout
from tandem.utils.errors import UserError


def read(tmp_path: Path, text: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return read_document(path)


def test_values_lists_and_lists_in_lists(tmp_path: Path) -> None:
    document = read(tmp_path, "rl_config_args:\n  a: 5.0e-6\n  b: [1, 2]\n  c: [[1, 2]]\n  d: None\n  e: no\n")
    values = {key: entry.alternatives for key, entry in document.sections["rl_config_args"].items()}
    assert values == {"a": (5e-6,), "b": (1, 2), "c": ([1, 2],), "d": (None,), "e": (False,)}
    assert document.where("rl_config_args", "c").endswith("c.yaml, line 4")


def test_options_of_sbatch_are_handed_on_as_they_are_written(tmp_path: Path) -> None:
    document = read(tmp_path, "slurm:\n  time: 2:00:00\n  account: 007\n  requeue: true\n  mem: 4G\n")
    values = {key: entry.alternatives[0] for key, entry in document.sections["slurm"].items()}
    assert values == {"time": "2:00:00", "account": "007", "requeue": True, "mem": "4G"}
    variables = read(tmp_path, "environment:\n  A: yes\n  B: 007\n").sections["environment"]
    assert {key: entry.alternatives[0] for key, entry in variables.items()} == {"A": "yes", "B": "007"}


def test_sections_may_share_values_by_anchors(tmp_path: Path) -> None:
    document = read(tmp_path, "slurm: &base\n  nodes: 1\nenvironment:\n  <<: *base\n  nodes: 2\n")
    assert document.sections["environment"]["nodes"].alternatives == ("2",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: 1\n\tc: 2\n", "line 3: a tab indents this line; YAML wants spaces"),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", "line 4: 'b' is given twice (first in line 2); give it once"),
        ("a:\n  b: []\n", "line 2: b is an empty list, which makes no run; give values, or leave it out"),
        ("a:\n  lr: 1e-5\n", "line 2: lr = 1e-5 is text in YAML, not a number; write 1.0e-5"),
        ("a:\n  lr: [1.0e-5, 3E6]\n", "line 2: lr = 3E6 is text in YAML, not a number; write 3.0e+6"),
        (
            "a:\n  b: [1, 2\nc:\n",
            "but got ':' (it belongs to what begins in line 2)",
        ),
        ("a:\n  b:\t1\n", "line 2: there is a tab in this line; YAML wants spaces"),
        ("a:\n  a: 0\n  b:1\n  c: 2\n", "line 3: 'b:1' is not `key: value`, with a colon and a space"),
        ("a:\n  b: 1\n   c: 2\n", "line 3: this is not YAML: mapping values are not allowed here"),
        ("a:\n  b: [1]\n    c: 2\n", "line 3: this line is indented otherwise than those that it belongs to"),
        ("a:\n  b: \x00\n", "line 2: the character '\\x00' has no place in YAML"),
        ("a:\n  b: &b [*b]\n", "a value contains itself"),
        ("a: 3\n", "line 1: a must be a table of keys and values"),
        ("- a\n", "an experiment file is a table of sections"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("execution:\n  algorithm: dpo\n", "execution.output_dir is required"),
        ("execution:\n  algorithm: dpo\n  output_dir: runs\n", "line 3: output_dir = 'runs' is relative; give '/"),
        ("execution:\n  algorithm: dpo\n  output_dir: [/a, /b]\n", "line 3: output_dir is a list"),
        ("execution:\n  algorithm: dpo\n  output_dir: /a\nslrm:\n  a: 1\n", "line 4: unknown section 'slrm'; did you"),
        ("execution:\n  algoritm: dpo\n", "line 2: unknown key 'algoritm' in execution; did you mean 'algorithm'?"),
    ],
)
def test_the_layout_is_checked(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_layout(read(tmp_path, text))
    assert message in str(error.value)
