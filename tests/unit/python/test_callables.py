"""Functions and classes as options: named by their module, or written to a file that other processes can import."""

import json
import math as maths
import operator
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.algorithms.advantages.grpo import grpo_advantages
from tandem.python.callables import import_path, replace_callables
from tandem.utils.errors import UserError
from tandem.utils.imports import load_object

# A notebook, as a script that runs: what it defines is in no module that other processes could import.
NOTEBOOK = """\
import dataclasses, functools, json, math as maths, re, sys
from collections import Counter
from pathlib import Path
from typing import Any
from tandem.python.callables import import_path

SCALE, NAMES = 0.5, {"a": [1, None], "b": ("c", True)}
WORD = re.compile(r"\\w+", re.I)

def words(text: str, *rest: Any) -> list[str]:
    # A comment, and a name that is found in itself only.
    local = [word for word in WORD.findall(text)]
    return local if len(text) < 1000 else words(text[:999])

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + 1000
    return wrapper

@logged
def reward(completion: str, answer: str = "x") -> float:
    return SCALE * len(words(completion)) + maths.sqrt(4) + Counter(answer)["x"] + len(NAMES["a"])

def scaled(factor):
    offset = 1

    def score(completion, answer):
        return factor * len(words(completion)) + offset

    return score

class Base:
    kind = "base"

    def greet(self):
        return f"{self.kind} {SCALE}"

class Env(Base):
    kind = "env"

    def __init__(self, size=int(SCALE * 8)):
        super().__init__()
        self.size = size

    @property
    def twice(self):
        return helper(self.size)

@dataclasses.dataclass
class Point:
    x: int = 3

    def double(self):
        return 2 * self.x

def helper(size):
    return 2 * size

brief = lambda completion, answer: -len(completion) * SCALE

async def slow(completion, answer):
    return 1.0
"""


@pytest.fixture
def in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The import path of an expression of the notebook; or what it is refused with."""
    monkeypatch.chdir(tmp_path)

    def run(expression: str, key: str = "env.reward") -> str:
        script = tmp_path / "notebook.py"
        ending = f"""
try:
    print(import_path({expression}, Path("run"), {key!r}))
except ValueError as error:
    print("refused:", error)
"""
        script.write_text(NOTEBOOK + ending)
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return run


@pytest.mark.parametrize(
    ("expression", "use", "expected"),
    [
        ("reward", "found('two words', 'xx')", 1000 + 0.5 * 2 + 2 + 2 + 2),
        ("scaled(7)", "found('two words', '')", 15),
        ("brief", "found('four', '')", -2.0),
        ("lambda completion, answer: len(words(completion))", "found('two words', '')", 2),
        ("Env", "(found().greet(), found().twice, found(1).size)", ("env 0.5", 8, 1)),
        ("Point", "(found().double(), found(x=1).double())", (6, 2)),
        ("slow", "__import__('asyncio').run(found('', ''))", 1.0),
    ],
)
def test_what_a_notebook_defines_works_in_another_process(
    in_a_notebook: Callable[[str], str], expression: str, use: str, expected: Any
) -> None:
    path = in_a_notebook(expression)
    assert path.startswith("run/functions/"), path
    code = f"from tandem.utils.imports import load_object\nfound = load_object({path!r}, 'k')\nprint(repr({use}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == repr(expected)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("(lambda: (lambda table: (lambda c, a: table[c]))(sys.stdin))()", "stands in one line with others"),
        ("scaled(sys.stdin)", "uses 'factor', a value of type TextIOWrapper, which has no source"),
        ("scaled(float('nan'))", "uses 'factor', a value of type float, which has no source"),
        ("scaled(Point())", "uses 'factor', a value of type Point, which has no source"),
        ("functools.partial(reward, answer='y')", "is an object of type partial, not a function or a class"),
        ("Env().greet", "uses 'greet', a value of type method, which has no source"),
        ("functools.cache(helper)", "needs 'helper' with another decorator than its source has"),
        ("eval('lambda c, a: 1.0')", "has no source that could be found"),
        ("type('Made', (), {})", "has no source that could be found"),
    ],
)
def test_what_has_no_source_is_refused(in_a_notebook: Callable[[str], str], expression: str, told: str) -> None:
    message = in_a_notebook(expression)
    assert message.startswith("refused: env.reward = ") and told in message
    assert "the processes of the run need it in a file of its own: env.reward = './my_file.py:" in message


def test_a_function_of_a_module_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def path(value: Any) -> str:
        return import_path(value, tmp_path / "run", "k")

    assert path(grpo_advantages) == "tandem.algorithms.advantages.grpo:grpo_advantages"
    assert (path(Counter), path(maths.sqrt), path(operator.eq)) == ("collections:Counter", "math:sqrt", "_operator:eq")
    # A module that only this program finds is named by its file.
    (tmp_path / "beside_it.py").write_text("def score(completion, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside_it  # pyright: ignore[reportMissingImports]

    assert path(beside_it.score) == f"{tmp_path / 'beside_it.py'}:score"
    assert load_object(path(beside_it.score), "k") is beside_it.score
    monkeypatch.delitem(sys.modules, "beside_it")
    assert not (tmp_path / "run").exists()


def test_a_package_that_others_do_not_find_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hidden_package"
    package.mkdir()
    (package / "words.py").write_text("def count(text):\n    return len(text.split())\n")
    (package / "rewards.py").write_text(
        "from hidden_package import words\nfrom hidden_package.words import count\n\n\n"
        "def score(completion, answer):\n    return count(completion)\n\n\n"
        "def other(completion, answer):\n    return words.count(completion)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from hidden_package import rewards  # pyright: ignore[reportMissingImports]

    path = import_path(rewards.score, tmp_path, "k")  # with the source of `count`
    assert path.startswith(str(tmp_path / "functions")) and load_object(path, "k")("two words", "") == 2
    with pytest.raises(UserError, match=r"uses 'words' of a module that is not on PYTHONPATH, 'hidden_package.words'"):
        import_path(rewards.other, tmp_path, "k")
    for name in ("hidden_package", "hidden_package.rewards", "hidden_package.words"):
        monkeypatch.delitem(sys.modules, name)


def test_callables_of_a_table_are_replaced_wherever_they_stand() -> None:
    table = {"a": {"b": [len, {"c": re.sub}], "d": 3}, "e": "text", "f": (json.dumps,)}
    seen = replace_callables(table, lambda value, key: f"{value.__name__} at {key}")
    assert seen == {"a": {"b": ["len at a.b.0", {"c": "sub at a.b.1.c"}], "d": 3}, "e": "text", "f": ["dumps at f.0"]}
