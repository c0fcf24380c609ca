"""The process in which untrusted Python runs: it takes away its own rights, then runs the code. See sandbox.py.

A script on its own, started by its path: nothing of this package can be imported here, or by the code that runs.
Its one argument is JSON; on its error output it says "ready", or why not, before any of the code runs. Tests of the
code come over a socket when the code has ended (isolation/sandbox_tests.py), and are sandbox_judge.py's.
"""

import base64
import builtins
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable

STATUS = "\x01sandbox: "
KEY_BYTES = 32  # that every answer to tests begins with
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522
# The same numbers on every processor.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_ONLY, PATH_BENEATH = 1, 1
# Rights to files that each version of Landlock knows of: the number of bits.
RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
# Not in its own folder either: programs, devices, sockets.
EXECUTE, MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK, IOCTL_DEV = 1 << 0, 1 << 6, 1 << 9, 1 << 11, 1 << 15

libc = ctypes.CDLL(None, use_errno=True)


class RulesetAttributes(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def succeed(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    return succeed(libc.syscall(ctypes.c_long(number), *arguments), what)


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        _, most = resource.getrlimit(number)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(number, (value, value))


def restrict_files(folder: str, readable: list[str], writable: list[str]) -> None:
    """All of `folder`, reading below `readable`, and the devices `writable`; nothing else can be opened."""
    version = syscall("Landlock", CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_ONLY))
    rights = (1 << RIGHTS_BY_VERSION.get(version, 16)) - 1
    attributes = RulesetAttributes(rights)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    ruleset = syscall("Landlock", CREATE_RULESET, ctypes.byref(attributes), size, ctypes.c_uint32(0))
    own = rights & ~(EXECUTE | MAKE_CHAR | MAKE_SOCK | MAKE_BLOCK | IOCTL_DEV)
    _allow(ruleset, folder, own)
    for path in readable:
        _allow(ruleset, path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)  # noqa: PTH112
    for path in writable:
        _allow(ruleset, path, (READ_FILE | WRITE_FILE | TRUNCATE) & rights)
    syscall("Landlock", RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = PathBeneath(rights, descriptor)
    number = ctypes.c_int(PATH_BENEATH)
    syscall("Landlock", ADD_RULE, ctypes.c_int(ruleset), number, ctypes.byref(rule), ctypes.c_uint32(0))
    os.close(descriptor)


def drop_capabilities() -> None:
    """Of root's rights, none but that of owning root's files."""
    header = CapabilityHeader(CAPABILITY_VERSION, 0)
    succeed(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


def restrict_calls(instructions: bytes) -> None:
    program = FilterProgram(len(instructions) // 8, instructions)
    zero = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    succeed(libc.prctl(PR_SET_SECCOMP, mode, ctypes.byref(program), zero, zero), "seccomp")


def protect(request: dict) -> None:
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    succeed(libc.prctl(PR_SET_NO_NEW_PRIVS, one, zero, zero, zero), "no_new_privs")
    restrict_files(request["folder"], request["readable"], request["writable"])
    drop_capabilities()
    restrict_calls(base64.b64decode(request["filter"]))


def prepare(request: dict) -> str:
    """ "ready", or why the code must not run."""
    try:
        if request["parent"] is not None:
            libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
            if os.getppid() != request["parent"]:
                return "the process that started this one is gone"
        set_limits(request["limits"])
        if request["filter"] is not None:
            protect(request)
    except OSError as error:
        return str(error.strerror)
    return "ready"


def make_main(path: str) -> dict:
    """The namespace of a new `__main__`, as Python makes it for a script: pickle and unittest look there."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    return vars(module)


def run_program(source: bytes, path: str, *, has_tests: bool) -> dict:
    """What the program leaves in its module. With tests it may exit, or ask for more input than there is: they come
    next. What else it raises ends the process."""
    scope = make_main(path)
    try:
        exec(compile(source, "main.py", "exec", dont_inherit=True), scope)
    except BaseException as error:  # answers: the verdict says what the program did
        if not (has_tests and isinstance(error, (SystemExit, EOFError))):
            if isinstance(error, Exception):
                end_with(error)
            raise
    return scope


def end_with(error: Exception) -> None:
    """As Python does, without the frames of this script."""
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename == __file__:
        where = where.tb_next
    traceback.print_exception(error.with_traceback(where))
    raise SystemExit(1) from None


def read_judge() -> types.CodeType:
    path = os.path.join(os.path.dirname(__file__), "sandbox_judge.py")  # noqa: PTH118, PTH120
    with open(path, "rb") as file:  # noqa: PTH123
        return compile(file.read(), path, "exec", dont_inherit=True)


def make_judge(code: types.CodeType) -> Callable[[bytes, int, dict], None]:
    """`answer_tests` with globals and builtins of its own, which the program does not change with its own."""
    scope = {"__builtins__": dict(vars(builtins)), "__name__": "sandbox_judge"}
    exec(code, scope)
    return scope["answer_tests"]


def main() -> None:
    request = json.loads(sys.argv[1])
    with open(request["main"], "rb") as file:  # noqa: PTH123
        source = file.read()
    judge = read_judge()  # before its file is out of reach
    said = prepare(request)
    print(f"{STATUS}{said}", file=sys.stderr, flush=True)
    if said != "ready":
        raise SystemExit(1)
    sys.argv = ["main.py"]
    sys.path.insert(0, request["folder"])
    path, channel = request["main"], request["channel"]
    if channel is None:
        run_program(source, path, has_tests=False)
    else:
        # While the program runs, its judge and the key are operands of this call: no name on the stack leads to them.
        make_judge(judge)(os.read(channel, KEY_BYTES), channel, run_program(source, path, has_tests=True))


if __name__ == "__main__":
    main()
