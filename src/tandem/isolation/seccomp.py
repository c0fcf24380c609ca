"""The system calls that code in the sandbox may make, as a seccomp filter. Pure: bytes for the kernel. Linux only.

An allow-list: what is not named here fails, with EPERM where Python code is likely to meet it, else with ENOSYS, at
which the C library tries an older call. Files are Landlock's part (sandbox_child.py), except for what it leaves
alone: attributes, owners, times, and cutting off a file that is opened for reading.
"""

import errno
import struct
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # the kernel's name, column in the tables

# Name, number on x86-64, number on aarch64.
ALLOWED = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; preadv 295 69; pwritev 296 70
preadv2 327 286; pwritev2 328 287; close 3 57; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79
statx 332 291; access 21 -; faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getdents 78 -
getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50; mkdir 83 -; mkdirat 258 34; rmdir 84 -; unlink 87 -
unlinkat 263 35; rename 82 -; renameat 264 38; renameat2 316 276; symlink 88 -; symlinkat 266 36; link 86 -
linkat 265 37; ftruncate 77 46; fsync 74 82; fdatasync 75 83; lseek 8 62; statfs 137 43
fstatfs 138 44; flock 73 32; umask 95 166; sendfile 40 71; copy_file_range 326 285; poll 7 -; ppoll 271 73; select 23 -
pselect6 270 72; epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22
epoll_pwait2 441 441; eventfd 284 -; eventfd2 290 19; pipe 22 -; pipe2 293 59; dup 32 23; dup2 33 -; dup3 292 24
mmap 9 222; munmap 11 215; mprotect 10 226; mremap 25 216; madvise 28 233; brk 12 214; msync 26 227; membarrier 324 283
rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136; rt_sigtimedwait 128 137
rt_sigsuspend 130 133; sigaltstack 131 132; pause 34 -; alarm 37 -; getitimer 36 102; setitimer 38 103; nanosleep 35 101
clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153
getpid 39 172; getppid 110 173; gettid 186 178; getpgrp 111 -; getpgid 121 155; getsid 124 156; getuid 102 174
geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148; getresgid 120 150; getgroups 115 158; futex 202 98
futex_waitv 449 449; set_robust_list 273 99; get_robust_list 274 100; rseq 334 293; set_tid_address 218 96
arch_prctl 158 -; sched_yield 24 124; sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120
sched_get_priority_max 146 125; sched_get_priority_min 147 126; getcpu 309 168; getpriority 140 141; getrandom 318 278
uname 63 160; sysinfo 99 179; getrusage 98 165; getrlimit 97 163; exit 60 93; exit_group 231 94; restart_syscall 219 128
wait4 61 260; waitid 247 95; sendto 44 206; recvfrom 45 207; recvmsg 47 212; shutdown 48 210
getsockopt 55 209; getsockname 51 204; getpeername 52 205
"""

# Each would reach beyond the sandbox (the network, other processes, attributes of files that can be read), or take disk
# that isolation/sandbox_disk.py does not see in time: blocks that nobody writes, files in flight between sockets.
REFUSED = """
socket 41 198; connect 42 203; bind 49 200; listen 50 201; accept 43 202; accept4 288 242; fork 57 -; vfork 58 -
execve 59 221; execveat 322 281; kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138; pidfd_open 434 434
pidfd_send_signal 424 424; ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; chmod 90 -; fchmod 91 52
fchmodat 268 53; chown 92 -; fchown 93 55; lchown 94 -; fchownat 260 54; truncate 76 45; utimensat 280 88
setxattr 188 5; setrlimit 160 164; setpriority 141 140; mount 165 40; umount2 166 39; unshare 272 97; setns 308 268
setuid 105 146; setgid 106 144; setsid 112 157; setpgid 109 154; chroot 161 51; memfd_create 319 279; fallocate 285 47
sendmsg 46 211
"""


@dataclass(frozen=True)
class Condition:
    """Argument number `argument`, under `mask`, has to be one of `values`. `high`: the upper half of 64 bits."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    high: bool = False


CLONE_FILES, CLONE_THREAD, CLONE_NAMESPACES = 0x400, 0x10000, 0x7E020080
THREAD = CLONE_THREAD | CLONE_FILES
CLOSE_RANGE_CLOEXEC = 4
O_TRUNC, O_ACCMODE = 0x200, 0x3
AF_UNIX, SOCK_STREAM, SOCK_TYPE = 1, 1, 0xF
# F_DUPFD to F_SETLKW, OFD locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ: not those that have signals sent to others.
FCNTL = (*range(8), 36, 37, 38, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_NAME, PR_GET_NAME, and the name of a range of memory, which malloc sets: not the death signal.
PRCTL = (15, 16, 0x53564D41)


def _opens_for_reading_or_writes(argument: int) -> Condition:
    """Old versions of Landlock let a file be cut off that is opened for reading only."""
    cut_off = tuple(O_TRUNC | mode for mode in (1, 2, 3))
    return Condition(argument, (0, 1, 2, 3, *cut_off), mask=O_TRUNC | O_ACCMODE)


CONDITIONAL: dict[str, tuple[int | None, int | None, tuple[Condition, ...]]] = {
    "open": (2, None, (_opens_for_reading_or_writes(1),)),
    "openat": (257, 56, (_opens_for_reading_or_writes(2),)),
    # Threads alone, with the descriptors of the process.
    "clone": (56, 220, (Condition(0, (THREAD,), mask=THREAD | CLONE_NAMESPACES),)),
    "close_range": (436, 436, (Condition(2, (0, CLOSE_RANGE_CLOEXEC)),)),
    "fcntl": (72, 25, (Condition(1, FCNTL),)),
    "ioctl": (16, 29, (Condition(1, IOCTL),)),
    "prctl": (157, 167, (Condition(0, PRCTL),)),
    # One's own limits may be read, not set.
    "prlimit64": (302, 261, (Condition(0, (0,)), Condition(2, (0,)), Condition(2, (0,), high=True))),
    # Datagrams could be sent to any socket of this machine.
    "socketpair": (53, 199, (Condition(0, (AF_UNIX,)), Condition(1, (SOCK_STREAM,), mask=SOCK_TYPE))),
}

LOAD, AND, JUMP_IF_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
ALLOW, KILL_PROCESS, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16


def make_filter(machine: str) -> bytes:
    """The program for processors of the kind `machine`, as `os.uname` names it. KeyError for others."""
    architecture, column = ARCHITECTURES[machine]
    program = [
        _instruction(LOAD, ARCHITECTURE_AT),
        _instruction(JUMP_IF_EQUAL, architecture, if_true=1),
        _instruction(RETURN, KILL_PROCESS),  # calls of a 32-bit process have other numbers
        _instruction(LOAD, NUMBER_AT),
    ]
    for table, outcome in ((ALLOWED, ALLOW), (REFUSED, FAIL | errno.EPERM)):
        for number in parse_table(table, column).values():
            program += [_instruction(JUMP_IF_EQUAL, number, if_false=1), _instruction(RETURN, outcome)]
    for *numbers, conditions in CONDITIONAL.values():
        number = numbers[column]
        if number is not None:
            block = [each for condition in conditions for each in _check(condition)] + [_instruction(RETURN, ALLOW)]
            program += [_instruction(JUMP_IF_EQUAL, number, if_false=len(block)), *block]
    program.append(_instruction(RETURN, FAIL | errno.ENOSYS))
    return b"".join(program)


def parse_table(table: str, column: int) -> dict[str, int]:
    rows = [row.split() for row in table.replace("\n", ";").split(";") if row.strip()]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def _check(condition: Condition) -> list[bytes]:
    """Goes on behind itself where the condition holds; else the call fails."""
    offset = ARGUMENTS_AT + 8 * condition.argument + 4 * condition.high  # both processors are little-endian
    left = len(condition.values)
    tests = [_instruction(JUMP_IF_EQUAL, value, if_true=left - number) for number, value in enumerate(condition.values)]
    return [
        _instruction(LOAD, offset),
        _instruction(AND, condition.mask),
        *tests,
        _instruction(RETURN, FAIL | errno.EPERM),
    ]


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
