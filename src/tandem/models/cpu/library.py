"""The kernels as a library, compiled for this machine once and kept for the next time.

Whoever computes on a CPU calls `load_for` when it starts; `python -m tandem.models.cpu.library` compiles them ahead.
Without a C compiler everything works as well, only slower: callers take PyTorch's operations instead.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tandem.models.cpu import compiler as c
from tandem.models.cpu.compiler import Compiler

logger = logging.getLogger(__name__)
SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "inference.h", "exact.h", "training.h")]
SWITCH = "TANDEM_KERNELS"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def load_for(device: torch.device) -> None:
    """Have the kernels ready, if this device is one they are for, before there is anything to compute."""
    if device.type == "cpu":
        load()


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None, with the reason logged, where there are none."""
    if os.environ.get(SWITCH) == "0":
        logger.info("%s=0: no CPU kernels, PyTorch's own operations are slower", SWITCH)
        return None
    compiler = Compiler.find()
    if compiler is None:
        logger.warning("no C compiler found (cc, gcc, clang, or $CC): PyTorch's own operations are slower on a CPU")
        return None
    try:
        library = _kept_or_compiled(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("the CPU kernels cannot be used, PyTorch's own operations are slower: %s", detail)
        return None
    if not ctypes.c_int.in_dll(library, "uses_threads").value:
        program = compiler.command[0]
        logger.warning("the CPU kernels run on one thread: %s has no OpenMP that works with PyTorch's", program)
    return library


def _kept_or_compiled(compiler: Compiler) -> ctypes.CDLL:
    name = f"kernels-{_fingerprint(compiler, _share_openmp())}.so"
    folder = _private_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as temporary:
            return ctypes.CDLL(str(_compile(compiler, Path(temporary) / name)))
    with _alone_in(folder):
        kept = _kept(folder / name)
        if kept is not None:
            return kept
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            return ctypes.CDLL(str(_compile(compiler, Path(temporary) / name).rename(folder / name)))


def _kept(path: Path) -> ctypes.CDLL | None:
    try:
        _refuse_if_written_by_others(path)
        library = ctypes.CDLL(str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("the kept CPU kernels are not used: %s", error)
        return None
    logger.info("CPU kernels: %s", path)
    return library


def _compile(compiler: Compiler, path: Path) -> Path:
    logger.info("compiling the CPU kernels with %s, once for this machine", compiler.command[0])
    began = time.monotonic()
    suited = compiler.suited_to_this_machine(path.parent)
    suited.build(SOURCES[0], path).chmod(0o700)
    logger.info("compiled the CPU kernels in %.1f s (%s)", time.monotonic() - began, " ".join(suited.flags))
    return path


def _share_openmp() -> str:
    """Make PyTorch's OpenMP runtime visible to libraries that are loaded later, which it is not everywhere.

    Returns its name, or nothing where PyTorch has none.
    """
    for path in _openmp_runtimes():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return Path(path).name
        except OSError as error:
            logger.debug("%s: %s", path, error)
    return ""


def _openmp_runtimes() -> list[str]:
    """The runtimes that may be PyTorch's, its own first: what it has loaded, then what lies in the same folder."""
    package = Path(torch.__file__).parent
    loaded = [path for path in _loaded_libraries() if _is_openmp(path)]
    own = [path for path in loaded if path.startswith(str(package))]
    folders = (package / "lib", Path(sys.prefix) / "lib")
    neighbours = [str(path) for folder in folders for path in sorted(folder.glob("lib*omp*")) if _is_openmp(str(path))]
    return [*own, *loaded, *neighbours]


def _is_openmp(path: str) -> bool:
    return Path(path).name.startswith(("libgomp", "libomp", "libiomp"))


def _loaded_libraries() -> list[str]:
    """Linux only; elsewhere none are known."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = (line.split(maxsplit=5) for line in lines)
    return list(dict.fromkeys(field[5] for field in fields if len(field) == 6))


def _fingerprint(compiler: Compiler, openmp: str) -> str:
    """Another source, compiler, OpenMP runtime or processor needs another library."""
    tried = [c.FLAGS, c.FOR_THIS_PROCESSOR, c.OPENMP, c.LINK_FLAGS]
    parts = [repr(tried), repr(compiler.command), compiler.version(), openmp, _processor()]
    sources = [source.read_bytes() for source in SOURCES]
    return hashlib.sha256(b"\0".join([*sources, *(part.encode() for part in parts)])).hexdigest()[:16]


def _processor() -> str:
    if sys.platform == "darwin":
        return c.run("sysctl", "-n", "machdep.cpu.brand_string")
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _private_folder() -> Path | None:
    """Where compiled kernels are kept: the first usual place that only this user can write to."""
    for folder in _usual_places():
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            actual = folder.resolve()
            _refuse_if_written_by_others(actual)
            for path in (*folder.absolute().parents, *actual.parents):
                _refuse_if_replaced_by_others(path)
            return folder
        except OSError as error:
            logger.warning("no CPU kernels are kept in %s: %s", folder, error)
    return None


def _usual_places() -> list[Path]:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return [Path(base) / "tandem", Path(tempfile.gettempdir()) / f"tandem-{os.geteuid()}"]


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Of processes that start together, such as the ranks of a run, one compiles and the others wait for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process that compiles the CPU kernels")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:  # some file systems have no locks: then it may be compiled twice, no more
        logger.debug("no lock on %s: %s", folder, error)
    try:
        yield
    finally:
        os.close(descriptor)


def _refuse_if_written_by_others(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError(f"others may have written {path} ({_access(status)}); only you may have access to it")


def _refuse_if_replaced_by_others(folder: Path) -> None:
    """Whether others could put something else in the place of what lies in this folder; not if it is sticky."""
    status = folder.stat()
    shared = status.st_mode & WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
    if shared or status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"others may write to {folder} ({_access(status)})")


def _access(status: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    load()
