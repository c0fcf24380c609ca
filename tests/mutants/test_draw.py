"""What can be drawn: mistakes of each kind, each in a program that is still one, and none in text for people."""

import ast

import pytest
from tests.mutants.draw import PACKAGE, UNIT, draw, files_in_scope, find_tests, mutations_of, read_equivalent


def mistakes(source: str) -> set[str]:
    content = source.encode()
    return {mutation.apply(content).decode() for mutation in mutations_of(content, "some/file.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b"}),
        ("a is None", {"a is not None"}),
        ("a and b", {"a or b"}),
        ("not a", {"a"}),
        ("-a", {"a"}),
        ("a - b", {"a + b"}),
        ("x = 3", {"x = 4"}),
        ("x = True", {"x = False"}),
        ("x = a if b else c", {"x = a if not b else c"}),
        ("close(a)", {"pass"}),
        ("await close(a)", {"pass", "await a"}),
        ("a.close()", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass"}),
        ("x = call(a, b)", {"x = call(b, a)"}),
        ("x = max(a)", {"x = min(a)", "x = a"}),
        ("x = t.minimum(a)", {"x = t.maximum(a)", "x = a"}),
        ("x = repr(a)", {"x = a"}),
        ("x = a.clone()", {"x = a"}),
        ("x = await shield(a)", {"x = await a"}),
        ("x = call(a or b) is c", {"x = call(a or b) is not c", "x = call(a and b) is c", "x = (a or b) is c"}),
        ("ü = 'ü', 1", {"ü = 'ü', 2"}),
    ],
)
def test_kinds_of_mistakes(source: str, expected: set[str]) -> None:
    assert mistakes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "raise ValueError(f'{a + 1}')",
        "assert a < b",
        "logger.info('%d', a + 1)",
        "logger = logging.getLogger(__name__)",
        "x: Literal[1]",
        "T = TypeVar('T')",
        "def f(a: A[1]) -> B[2]: ...",
        "@cached(1)\nclass A: ...",
        "POLL_S = 0.5",
        "x = f'{a + 1}'",
        "x = a + 'text'",
        "x = isinstance(a, b)",
        "x = call(a, a)",
        "x = call(*a)",
        "x = call(a, key=b)",
        "x = a.call(key=b)",
        "x = call()",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert mistakes(source) == set()


def test_every_mistake_is_another_program() -> None:
    """Of one file in thirty: all take half a minute."""
    for file in files_in_scope()[::30]:
        source = (PACKAGE / file).read_bytes()
        parsed = ast.dump(ast.parse(source))
        for mutation in mutations_of(source, file):
            assert ast.dump(ast.parse(mutation.apply(source))) != parsed


def test_a_seed_draws_the_same_again() -> None:
    drawn = draw(20, 1, ["objective/kl"])
    assert len(set(drawn)) == 20 and {mutation.file for mutation in drawn} == {"algorithms/objective/kl.py"}
    assert draw(20, 1, ["objective/kl"]) == drawn != draw(20, 2, ["objective/kl"])


def test_every_file_has_tests_and_its_own_come_first() -> None:
    for file in files_in_scope():
        assert find_tests(file), file
    assert find_tests("algorithms/objective/kl.py")[0] == "algorithms/objective/test_kl.py"
    first, *others = find_tests("orchestrator/advantages.py")
    assert first == "orchestrator/test_advantages.py" and "orchestrator/test_loop.py" in others
    assert all((UNIT / test).is_file() for test in find_tests("orchestrator/loop.py"))


def test_a_package_with_code_of_its_own_is_in_scope() -> None:
    files = files_in_scope()
    assert {"algorithms/advantages/__init__.py", "trainer/losses/__init__.py"} <= set(files)
    assert "rewards/__init__.py" not in files
    (mutation,) = draw(1, 1, ["filters/__init__"])
    assert mutation.file == "algorithms/filters/__init__.py"


def test_what_is_called_equivalent_is_still_there() -> None:
    for file, original, _ in read_equivalent():
        assert original in (PACKAGE / file).read_text(), (file, original)
