"""The filter is run here by a small interpreter, for both processors, so that each is tested on every machine."""

import errno
import re
import struct
from pathlib import Path

import pytest

from tandem.isolation.seccomp import (
    ALLOW,
    ALLOWED,
    AND,
    ARCHITECTURES,
    CONDITIONAL,
    FAIL,
    JUMP_IF_EQUAL,
    KILL_PROCESS,
    LOAD,
    REFUSED,
    RETURN,
    make_filter,
    parse_table,
)

MACHINES = sorted(ARCHITECTURES)
EPERM, ENOSYS = FAIL | errno.EPERM, FAIL | errno.ENOSYS
MOST_INSTRUCTIONS = 4096


def outcome(machine: str, name: str | int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel does with a call, by its name or number."""
    kernel_name, column = ARCHITECTURES[machine]
    tables = parse_table(ALLOWED, column) | parse_table(REFUSED, column)
    tables |= {key: numbers[column] for key, numbers in CONDITIONAL.items() if numbers[column] is not None}
    number = tables[name] if isinstance(name, str) else name
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, architecture or kernel_name, 0, *values)
    program = [struct.unpack("<HBBI", chunk) for chunk in chunks(make_filter(machine))]
    assert len(program) <= MOST_INSTRUCTIONS
    position, register = 0, 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == LOAD:
            (register,) = struct.unpack_from("<I", data, value)
        elif code == AND:
            register &= value
        elif code == JUMP_IF_EQUAL:
            position += if_true if register == value else if_false
        else:
            assert code == RETURN
            return value


def chunks(program: bytes) -> list[bytes]:
    return [program[start : start + 8] for start in range(0, len(program), 8)]


@pytest.mark.parametrize("machine", MACHINES)
def test_what_python_needs_is_allowed_and_what_reaches_out_is_refused(machine: str) -> None:
    _, column = ARCHITECTURES[machine]
    for name in parse_table(ALLOWED, column):
        assert outcome(machine, name) == ALLOW, name
    for name in parse_table(REFUSED, column):
        assert outcome(machine, name) == EPERM, name
    assert outcome(machine, 9999) == ENOSYS
    assert outcome(machine, 435) == ENOSYS  # clone3, whose flags lie in memory
    assert outcome(machine, 437) == ENOSYS  # openat2, likewise
    assert outcome(machine, 425) == ENOSYS  # io_uring_setup, which makes calls past every filter


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_processor_end_the_process(machine: str) -> None:
    assert outcome(machine, "read", architecture=0x40000003) == KILL_PROCESS  # int 0x80 on x86-64
    assert outcome(machine, 0x40000000) == ENOSYS  # the x32 calls


@pytest.mark.parametrize("machine", MACHINES)
def test_only_threads_are_created(machine: str) -> None:
    thread = 0x3D0F00  # what pthread_create gives
    assert outcome(machine, "clone", thread) == ALLOW
    assert outcome(machine, "clone", 0x1200011) == EPERM  # fork
    assert outcome(machine, "clone", 0x4111) == EPERM  # vfork
    assert outcome(machine, "clone", thread | 0x10000000) == EPERM  # a user namespace
    assert outcome(machine, "clone", thread & ~0x400) == EPERM  # with descriptors of its own, which nobody counts


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_that_reach_out_are_refused(machine: str) -> None:
    o_trunc, parent = 0x200, 1234
    assert outcome(machine, "openat", 0, 0, 0) == ALLOW
    assert outcome(machine, "openat", 0, 0, 1 | o_trunc) == ALLOW
    assert outcome(machine, "openat", 0, 0, o_trunc) == EPERM  # reading, and cutting off
    assert outcome(machine, "prlimit64", 0, 7, 0) == ALLOW
    assert outcome(machine, "prlimit64", parent, 7, 0) == EPERM
    assert outcome(machine, "prlimit64", 0, 7, 0x7FFF00000000) == EPERM  # a pointer whose lower half is zero
    assert outcome(machine, "fcntl", 3, 2) == ALLOW
    assert outcome(machine, "fcntl", 3, 8, parent) == EPERM  # F_SETOWN: signals to another process
    assert outcome(machine, "fcntl", 3, 1024) == EPERM  # F_SETLEASE: others wait for us
    assert outcome(machine, "close_range", 3, 9, 4) == ALLOW
    assert outcome(machine, "close_range", 3, 9, 2) == EPERM  # descriptors of its own, likewise
    assert outcome(machine, "ioctl", 1, 0x5401) == ALLOW
    assert outcome(machine, "ioctl", 1, 0x5412) == EPERM  # TIOCSTI: typing into a terminal
    assert outcome(machine, "prctl", 15) == ALLOW
    assert outcome(machine, "prctl", 1) == EPERM  # the signal at the parent's death
    assert outcome(machine, "socketpair", 1, 1 | 0x80000) == ALLOW
    assert outcome(machine, "socketpair", 1, 2) == EPERM  # datagrams
    assert outcome(machine, "socketpair", 2, 1) == EPERM


HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is not installed (linux-libc-dev)")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    kernel = {name: int(number) for name, number in found}
    kernel.setdefault("newfstatat", kernel.get("fstatat", -1))
    _, column = ARCHITECTURES[machine]
    ours = parse_table(ALLOWED, column) | parse_table(REFUSED, column)
    ours |= {name: numbers[column] or -1 for name, numbers in CONDITIONAL.items() if numbers[column]}
    newer = {name for name in ours if name not in kernel}  # than the header
    assert newer <= {"futex_waitv", "epoll_pwait2", "close_range", "faccessat2"}
    assert {name: kernel[name] for name in ours if name in kernel} == {
        name: number for name, number in ours.items() if name in kernel
    }
