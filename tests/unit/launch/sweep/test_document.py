"""The experiment file: values with their lines, and what people get wrong in YAML."""

from pathlib import Path

import pytest

from tandem.launch.sweep.document import read_document
from tandem.launch.sweep.layout import check_layout, nearest_of
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
    text = "environment:\n  A: yes\n  B: 007\n  C: [[01, {d: 02}]]\n"
    variables = {key: entry.alternatives[0] for key, entry in read(tmp_path, text).sections["environment"].items()}
    assert variables == {"A": "yes", "B": "007", "C": ["01", {"d": "02"}]}


def test_sections_may_share_values_by_anchors(tmp_path: Path) -> None:
    document = read(tmp_path, "slurm: &base\n  nodes: 1\n  time: 5\nenvironment:\n  <<: *base\n  nodes: 2\n")
    found = {key: (entry.alternatives, entry.line) for key, entry in document.sections["environment"].items()}
    assert found == {"time": (("5",), 3), "nodes": (("2",), 6)}


def test_a_section_may_be_empty(tmp_path: Path) -> None:
    document = read(tmp_path, "a:\nb:\n  c: 1\n")
    assert list(document.sections["a"]) == [] and list(document.entries) == [("b", "c")]
    assert [document.where(*at) for at in (("a",), ("b", "d"), ("b", "c"), ("d", "c"))] == [
        *(f"{document.path}, line {line}" for line in (1, 2, 3)),
        str(document.path),
    ]


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
        ("a:\n  b: 1\n  \tc: 2\n", "line 3: a tab indents this line"),
        ("a:\n  b: ]\n\tc: 2\n", "line 2: this is not YAML: expected the node content, but found ']'"),
        ("a:\n  ? [b, c]\n  : 1\n", "line 2: a key is a list or a table; give a text"),
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
        ("execution:\n  algorithm: dpo\n  output_dir: 3\n", "line 3: output_dir = '3' is relative; give '/"),
        ("execution:\n  algorithm: None\n  output_dir: /a\n", "line 1: execution.algorithm is required"),
        ("execution:\n  algorithm: dpo\n  output_dir: [/a, /b]\n", "line 3: output_dir is a list"),
        (
            "execution:\n  algorithm: dpo\n  output_dir: /dev/null\n",
            "output_dir = '/dev/null' cannot be written: it is a f",
        ),
        (
            "execution:\n  algorithm: dpo\n  output_dir: /dev/null/a/b\n",
            "cannot be written: '/dev/null' is a file; give",
        ),
        (
            "execution:\n  algorithm: dpo\n  output_dir: /a\nevaluation:\n  env: [[a]]\n  seed: [1, 2]\n",
            "line 6: seed is a list; all runs are evaluated alike: give one value",
        ),
        ("execution:\n  algorithm: dpo\n  output_dir: /a\nslrm:\n  a: 1\n", "line 4: unknown section 'slrm'; did you"),
        ("execution:\n  algoritm: dpo\n", "line 2: unknown key 'algoritm' in execution; did you mean 'algorithm'?"),
    ],
)
def test_the_layout_is_checked(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check_layout(read(tmp_path, text))
    assert message in str(error.value)


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"execution:\n  algorithm: dpo\n  output_dir: {tmp_path}"
    assert check_layout(read(tmp_path, f"{text}/a/b")) == tmp_path / "a" / "b"
    monkeypatch.setattr("os.access", lambda place, _: place != tmp_path)
    for path, message in (("", "it may not be written to"), ("/a/b", f"'{tmp_path}' may not be written to")):
        with pytest.raises(UserError, match=f"cannot be written: {message}; give another one"):
            check_layout(read(tmp_path, text + path))


def test_the_nearest_name_is_told_or_all_of_them_where_they_are_few() -> None:
    assert nearest_of("DPPO", ["kto", "DPO"]) == "did you mean 'DPO'?"
    assert nearest_of("x", ["kto", "dpo"]) == "known: dpo, kto"
    many = [f"name{number:02d}" for number in range(40)]
    assert nearest_of("x", many[:39]) == f"known: {', '.join(many[:39])}"
    assert nearest_of("x", many) == "docs/sweeps.md lists what there is"
