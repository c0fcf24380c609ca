"""Small mistakes drawn at random from the sources: which there could be, and which tests have to notice each.

A mutation replaces one expression or statement. Kinds: a comparison, a sign, a constant, `and` and `or`, a negated
condition, a call (within an expression, too) or assignment that is left out, swapped arguments, the opposite function
(min and max, any and all). Text for people (messages of errors, logs, docstrings), annotations, assertions and lengths
of waits are left alone: no test should depend on them.
"""

import ast
import copy
import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tandem"
UNIT = ROOT / "tests" / "unit"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
SCOPE = (
    *(
        "weights",
        "utils/manifest.py",
        "data/batch_files.py",
        "orchestrator",
        "rewards",
        "algorithms",
        "serving/rewards",
        "trainer/losses",
        "trainer/checkpoints",
        "launch/sweep",
    ),
    *("engine/scheduler.py", "engine/sampler.py", "utils/server_pool.py"),
)
OPERATORS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)),
)
OPPOSITE_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.FloorDiv: ast.Mult,
    **{operator: other for pair in OPERATORS for operator, other in (pair, pair[::-1])},
}
PAIRS = (("min", "max"), ("any", "all"), ("minimum", "maximum"))
OPPOSITE_NAMES = {name: other for pair in PAIRS for name, other in (pair, pair[::-1])}
TAKE_TOO_LONG = ("test_cuda_kernels.py",)  # compiles every kernel, in processes that know nothing of a mutant
FOR_PEOPLE = ("logger", "say", "warn", "warning", "error", "info", "debug", "print", "event", "getLogger")
FOR_TYPE_CHECKERS = ("TypeVar", "ParamSpec")
OF_UNLIKE_ARGUMENTS = ("isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast", "fromkeys")  # fail at once
TIMES = ("_S", "_s")
BINDS_LOOSELY = (
    *(ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp),
    *(ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom),
)


@dataclass(frozen=True)
class Mutation:
    file: str  # below src/tandem
    line: int
    start: int  # in bytes of the file, as `end`
    end: int
    original: str
    replacement: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.original!r} -> {self.replacement!r}"

    @property
    def tests(self) -> list[str]:
        return find_tests(self.file)


def draw(count: int, seed: int, words: Sequence[str] = ()) -> list[Mutation]:
    """Of all that could be made in files whose path holds one of the words, or in all."""
    files = [file for file in files_in_scope() if not words or any(word in file for word in words)]
    equivalent = read_equivalent()
    possible = [
        mutation
        for file in files
        for mutation in mutations_of((PACKAGE / file).read_bytes(), file)
        if (mutation.file, mutation.original, mutation.replacement) not in equivalent
    ]
    return random.Random(seed).sample(possible, min(count, len(possible)))


def files_in_scope() -> list[str]:
    found: list[Path] = []
    for part in SCOPE:
        found += [PACKAGE / part] if part.endswith(".py") else walk(PACKAGE / part)
    return [path.relative_to(PACKAGE).as_posix() for path in found]


def walk(folder: Path) -> list[Path]:
    """The modules with code; an `__init__.py` may be one."""
    return sorted(path for path in folder.rglob("*.py") if path.read_text().strip())


def read_equivalent() -> dict[tuple[str, str, str], str]:
    """What changes nothing that a test could see, with the reason: (file, original, replacement) → why."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutation", [])
    return {(entry["file"], entry["original"], entry["replacement"]): entry["why"] for entry in entries}


def find_tests(file: str) -> list[str]:
    """Below tests/unit: the file that mirrors this one, those that import it, and the others in the mirrored folder, or
    in the nearest there is above it."""
    path = Path(file)
    named = path.parent if path.name == "__init__.py" else path.with_suffix("")
    module = "tandem." + ".".join(named.parts)
    mirrored = UNIT / named.parent / f"test_{named.name}.py"
    importing = [test for test, source in unit_tests() if f"{module} import" in source]
    folder = next(UNIT / parent for parent in path.parents if (UNIT / parent).is_dir())
    neighbours = sorted(folder.glob("test_*.py"))
    own = [mirrored] if mirrored.exists() else []
    found = [test for test in dict.fromkeys(own + importing + neighbours) if test.name not in TAKE_TOO_LONG]
    return [test.relative_to(UNIT).as_posix() for test in found]


@cache
def unit_tests() -> list[tuple[Path, str]]:
    return [(path, path.read_text()) for path in sorted(UNIT.rglob("test_*.py"))]


def mutations_of(source: bytes, file: str) -> list[Mutation]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, replacement in changes(ast.parse(source)):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutation(file, node.lineno, start, end, source[start:end].decode(), replacement))
    return found


def changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Below a node: what could be replaced, and by what."""
    for child in ast.iter_child_nodes(node):
        if is_left_alone(child, node):
            continue
        if isinstance(child, ast.expr):
            yield from ((child, written(changed, child)) for changed in changed_expressions(child))
            if not isinstance(node, ast.Expr):  # a statement is left out as a whole
                yield from ((child, written(changed, child)) for changed in without_call(child))
        elif isinstance(child, ast.stmt) and is_left_out(child):
            yield child, "pass"
        yield from changes(child)


def written(changed: ast.expr, original: ast.expr) -> str:
    """In brackets where it stands for something that binds more tightly."""
    text = ast.unparse(changed)
    return f"({text})" if isinstance(changed, BINDS_LOOSELY) and type(changed) is not type(original) else text


def is_left_alone(node: ast.AST, parent: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: an assertion
        return True
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
        node in parent.decorator_list or node is getattr(parent, "returns", None)
    ):
        return True
    if isinstance(parent, ast.AnnAssign) and node is parent.annotation:
        return True
    if isinstance(node, ast.Assign) and any(ast.unparse(target).endswith(TIMES) for target in node.targets):
        return True
    words = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else []
    return any(word in (*FOR_PEOPLE, *FOR_TYPE_CHECKERS) for word in words)


def is_left_out(node: ast.stmt) -> bool:
    """Statements without which the rest is still a program."""
    if isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        return isinstance(call, ast.Call) and not is_left_alone(call, node)
    targets = node.targets if isinstance(node, ast.Assign) else []
    changes_something = any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets)
    return changes_something or isinstance(node, ast.AugAssign | ast.Delete | ast.Continue)


def changed_expressions(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[operator, *others]) if type(operator) in OPPOSITE_OPERATORS:
            yield with_(node, ops=[opposite(operator), *others])
        case ast.BoolOp(op=operator):
            yield with_(node, op=opposite(operator))
        case ast.BinOp(op=operator) if type(operator) in OPPOSITE_OPERATORS and not is_text(node):
            yield with_(node, op=opposite(operator))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.IfExp(test=test):
            yield with_(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=function, args=[first, second, *others]):
            is_starred = any(isinstance(argument, ast.Starred) for argument in (first, second))
            name = ast.unparse(function).rpartition(".")[2]
            has_one_order = name in OF_UNLIKE_ARGUMENTS or name in OPPOSITE_NAMES  # or any: max(a, b) is max(b, a)
            if not is_starred and not has_one_order and ast.dump(first) != ast.dump(second):
                yield with_(node, args=[second, first, *others])
            yield from renamed(node, function)
        case ast.Call(func=function):
            yield from renamed(node, function)


def without_call(node: ast.expr) -> Iterator[ast.expr]:
    """What the call is given, or the object whose method it is."""
    match node:
        case ast.Call(args=[argument], keywords=[]) if not isinstance(argument, ast.Starred):
            yield argument
        case ast.Call(func=ast.Attribute(value=called), args=[], keywords=[]):
            yield called


def renamed(call: ast.Call, function: ast.expr) -> Iterator[ast.expr]:
    match function:
        case ast.Name(id=name) if name in OPPOSITE_NAMES:
            yield with_(call, func=ast.Name(OPPOSITE_NAMES[name]))
        case ast.Attribute(value=value, attr=name) if name in OPPOSITE_NAMES:
            yield with_(call, func=ast.Attribute(value, OPPOSITE_NAMES[name]))


def is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr | ast.Constant) and not is_number(side) for side in sides)


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def opposite(operator: ast.AST) -> ast.AST:
    return OPPOSITE_OPERATORS[type(operator)]()


def with_(node: ast.expr, **fields: object) -> ast.expr:
    """A copy of the node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
