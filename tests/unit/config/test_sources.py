"""Config files on the command line, merged from left to right."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.sources import extract_files, merge, nest, read_config_file, split_values
from tandem.utils.errors import UserError

keys = st.sampled_from(["a", "b", "c", "d"])
values = st.integers(0, 3) | st.text("xyz", max_size=2) | st.lists(st.integers(0, 3), max_size=2) | st.none()
trees = st.recursive(
    st.dictionaries(keys, values, max_size=4),
    lambda inner: st.dictionaries(keys, values | inner, max_size=4),
    max_leaves=12,
)


def leaves(tree: dict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    found: dict[tuple[str, ...], object] = {}
    for key, value in tree.items():
        found |= leaves(value, (*path, key)) if isinstance(value, dict) and value else {(*path, key): value}
    return found


def test_merge_by_hand() -> None:
    base = {"a": {"x": 1, "y": 2}, "b": 1, "c": {"z": 1}}
    override = {"a": {"y": 3}, "b": {"w": 1}, "c": 4}
    assert merge(base, override) == {"a": {"x": 1, "y": 3}, "b": {"w": 1}, "c": 4}


@given(trees, trees)
def test_the_right_side_wins_and_what_only_the_left_has_stays(left: dict, right: dict) -> None:
    merged = leaves(merge(left, right))
    right_leaves = leaves(right)
    for path, value in right_leaves.items():
        if value != {}:  # an empty table adds nothing to a full one
            assert merged[path] == value
    for path, value in leaves(left).items():
        hidden = any(
            path[: len(other)] == other or other[: len(path)] == path for other in right_leaves if other != path
        )
        if path not in right_leaves and not hidden:
            assert merged[path] == value


@given(trees, trees)
def test_merge_leaves_its_inputs_alone(left: dict, right: dict) -> None:
    before = copy.deepcopy((left, right))
    merge(left, right)
    assert (left, right) == before


def tables_agree(*given_trees: dict) -> bool:
    """Whether no key is a table in one tree and a value in another."""
    kinds: dict[str, set[bool]] = {}
    below: dict[str, list[dict]] = {}
    for tree in given_trees:
        for key, value in tree.items():
            kinds.setdefault(key, set()).add(isinstance(value, dict))
            if isinstance(value, dict):
                below.setdefault(key, []).append(value)
    return all(len(kind) == 1 for kind in kinds.values()) and all(tables_agree(*inner) for inner in below.values())


@given(trees, trees, trees)
def test_merge_is_associative(first: dict, second: dict, third: dict) -> None:
    # A value between two tables cuts the first off from the last; config files that agree on their shape have none.
    if tables_agree(first, second, third):
        assert merge(merge(first, second), third) == merge(first, merge(second, third))


@given(trees)
def test_merging_with_nothing_or_with_itself_changes_nothing(tree: dict) -> None:
    assert merge(tree, {}) == merge({}, tree) == merge(tree, tree) == tree


def test_nest() -> None:
    assert nest(["a", "b"], {"c": 1}) == {"a": {"b": {"c": 1}}}
    assert nest([], {"c": 1}) == {"c": 1}


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_files_apply_from_left_to_right(tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", "a = 1\nb = 1\n[t]\nx = 1\ny = 1")
    two = write(tmp_path / "two.toml", "b = 2\n[t]\ny = 2")
    assert extract_files(["@", one, "@", two])[0] == {"a": 1, "b": 2, "t": {"x": 1, "y": 2}}
    assert extract_files(["@", two, f"@{one}"])[0] == {"a": 1, "b": 1, "t": {"x": 1, "y": 1}}


def test_section_files_land_in_their_section_and_flags_are_left(tmp_path: Path) -> None:
    one = write(tmp_path / "one.toml", "a = 1\nb = 1")
    two = write(tmp_path / "two.toml", "b = 2")
    arguments = ["--trainer", "@", one, "--trainer", "@", two, "--trainer.loss-part", f"@{two}", "--steps", "3"]
    tree, flags = extract_files(arguments)
    assert tree == {"trainer": {"a": 1, "b": 2, "loss_part": {"b": 2}}}
    assert flags == ["--steps", "3"]


def test_toml_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    tree = {"a": 1, "b": "two", "c": {"d": [1, 2], "e": True, "f": 0.5}}
    files = {
        "c.json": json.dumps(tree),
        "c.yaml": yaml.safe_dump(tree),
        "c.yml": yaml.safe_dump(tree),
        "c.toml": 'a = 1\nb = "two"\n[c]\nd = [1, 2]\ne = true\nf = 0.5\n',
    }
    for name, text in files.items():
        assert read_config_file(Path(write(tmp_path / name, text))) == tree, name


def test_an_empty_yaml_file_says_nothing(tmp_path: Path) -> None:
    assert read_config_file(Path(write(tmp_path / "c.yaml", "# nothing\n"))) == {}


def test_a_missing_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path / "rl.toml", "")
    write(tmp_path / "zebra.toml", "")
    with pytest.raises(UserError, match=r"rk\.toml' does not exist; did you mean '.*/rl\.toml'\?"):
        read_config_file(tmp_path / "rk.toml")
    with pytest.raises(UserError, match=r"does not exist; there is no directory '.*/nowhere'"):
        read_config_file(tmp_path / "nowhere" / "rl.toml")


def test_a_missing_file_in_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl\.toml' does not exist$"):
        read_config_file(tmp_path / "rl.toml")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"c\.ini' must end in one of: \.toml, \.yaml, \.yml, \.json"):
        read_config_file(Path(write(tmp_path / "c.ini", "a=1")))


@pytest.mark.parametrize(("name", "text"), [("c.toml", "a = "), ("c.json", "{"), ("c.yaml", "a: [1")])
def test_a_malformed_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UserError, match=rf"{name}' cannot be read: "):
        read_config_file(Path(write(tmp_path / name, text)))


def test_times_and_dates_of_yaml_are_texts(tmp_path: Path) -> None:
    text = "slurm: {time: 2:00:00, begin: 2024-01-01, nodes: 2}\nlr: 1.0e-5\nport: [8000, 0x10]\n"
    slurm = {"time": "2:00:00", "begin": "2024-01-01", "nodes": 2}
    expected = {"slurm": slurm, "lr": 1e-5, "port": [8000, 16]}
    assert read_config_file(Path(write(tmp_path / "c.yaml", text))) == expected


@pytest.mark.parametrize(("name", "text"), [("c.json", "[1, 2]"), ("c.yaml", "- 1\n- 2\n")])
def test_a_list_at_the_top_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UserError, match="must hold a table of keys, not a list"):
        read_config_file(Path(write(tmp_path / name, text)))


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("c.toml", "a: 1\nb:\n  c: 2\n", "YAML: rename it to 'c.yaml'"),
        ("c.toml", '{"a": 1}', "JSON: rename it to 'c.json'"),
        ("c.yaml", "a = 1\n[b]\nc = 2\n", "TOML: rename it to 'c.toml'"),
        ("c.yml", "a = 1\n", "TOML: rename it to 'c.toml'"),
        ("c.json", "a = 1\n", "TOML: rename it to 'c.toml'"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, name: str, text: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config_file(Path(write(tmp_path / name, text)))
    assert str(caught.value).endswith(f"; it holds {what}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"c\.toml' cannot be read: 'utf-8' codec"):
        read_config_file(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", "[a]\nb = 1\nb = 2\n"),
        ("c.json", '{"a": {"b": 1, "b": 2}}'),
        ("c.yaml", "a:\n  b: 1\n  c: 3\n  b: 2\n"),
        ("c.yml", "a: {b: 1, b: 2}\n"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(UserError, match=rf"{name}' cannot be read: ('b' is given twice|Cannot overwrite)"):
        read_config_file(Path(write(tmp_path / name, text)))


def test_merge_keys_of_yaml_are_no_repetition(tmp_path: Path) -> None:
    text = "x: &x {a: 1, b: 1}\ny: &y\n  <<: *x\n  a: 2\nz:\n  <<: *y\n  b: 3\n"
    read = read_config_file(Path(write(tmp_path / "c.yaml", text)))
    assert (read["y"], read["z"]) == ({"a": 2, "b": 1}, {"a": 2, "b": 3})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.toml", "[a.b]\nc = 2024-01-01\n", "a.b.c = 2024-01-01 is a date, which no option takes; put it in quotes"),
        ("c.toml", "a = [{ b = 07:30:00 }]\n", "a.0.b = 07:30:00 is a time, which no option takes; put it in quotes"),
        ("c.yaml", "a:\n- {b: !!binary aGk=}\n", "a.0.b = b'hi' is a bytes, which no option takes; put it in quotes"),
        ("c.yaml", "a: {!!binary aGk=: 1}\n", "the key \"b'hi'\" of a is a bytes; put it in quotes"),
    ],
)
def test_what_json_cannot_say_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config_file(Path(write(tmp_path / name, text)))
    assert str(caught.value).endswith(f"{name}': {reason}")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("c.yaml", "a: &a\n  b: *a\n", "a value contains itself"),
        ("c.yaml", "a: &a [*a]\n", "a value contains itself"),
        ("c.json", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "it is nested too deeply"),
    ],
)
def test_values_without_an_end_are_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"cannot be read: {reason}"):
        read_config_file(Path(write(tmp_path / name, text)))


@pytest.mark.parametrize(("name", "text"), [("c.toml", "a = 1\n"), ("c.json", '{"a": 1}'), ("c.yaml", "a: 1\n")])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_config_file(tmp_path / name) == {"a": 1}


SWITCHES, SECTIONS = ("--clean", "--no-clean"), ("--trainer", "--trainer.loss")


@pytest.mark.parametrize(
    "arguments",
    [
        ["{one}", "--steps", "3"],
        ["--steps", "3", "{one}"],
        ["--steps=3", "{one}"],
        ["--config", "{one}", "--steps", "3"],
        ["--config", "@", "{one}", "--steps", "3"],
        ["--config={one}", "--steps", "3"],
        ["-c", "{one}", "--steps", "3"],
        ["--steps", "3", "@", "{one}"],
    ],
)
def test_a_file_without_a_sign_is_a_file(tmp_path: Path, arguments: list[str]) -> None:
    one = write(tmp_path / "one.toml", "a = 1")
    arguments = [argument.format(one=one) for argument in arguments]
    tree, flags = extract_files(arguments, SWITCHES, SECTIONS)
    assert tree == {"a": 1} and " ".join(flags).replace("=", " ") == "--steps 3"


def test_files_without_a_sign_after_switches_and_sections(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one.toml", "a = 1"), write(tmp_path / "two.yaml", "b: 2")
    tree, flags = extract_files(["--clean", one, "--trainer", two, "--trainer.loss", one], SWITCHES, SECTIONS)
    assert tree == {"a": 1, "trainer": {"b": 2, "loss": {"a": 1}}} and flags == ["--clean"]


def test_a_file_that_is_the_value_of_an_option_stays_one(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.json", "[]")
    assert extract_files(["--data.path", rows, f"--data.eval-path={rows}"], SWITCHES, SECTIONS) == (
        {},
        ["--data.path", rows, f"--data.eval-path={rows}"],
    )


def test_a_file_without_a_sign_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config file '.*my\.toml' does not exist"):
        extract_files([str(tmp_path / "my.toml")])
    with pytest.raises(UserError, match="--config is followed by nothing"):
        extract_files(["--config"])


def test_an_at_sign_at_the_end_is_refused() -> None:
    with pytest.raises(UserError, match="'@' is followed by nothing; give a config file"):
        extract_files(["--steps", "3", "@"])


def test_values_behind_an_equals_sign_become_words_of_their_own() -> None:
    assert split_values(["--a.b=1=2", "--c", "d=3", "--e="]) == ["--a.b", "1=2", "--c", "d=3", "--e", ""]
    assert split_values(["--a=--b", "--c=@d", "-e=1"]) == ["--a=--b", "--c=@d", "-e=1"]
