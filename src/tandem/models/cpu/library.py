"""Compiles kernels.c for this machine when it is first needed, and keeps the result for the next time.

Without a C compiler everything works as well, only slower: callers take PyTorch's operations instead.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  (its OpenMP runtime is the one our kernels use: it has to be loaded first)

logger = logging.getLogger(__name__)
SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "inference.h", "training.h")]
FLAGS = [
    "-O3", "-march=native", "-std=c11", "-fPIC", "-fopenmp",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
]  # fmt: skip
SWITCH = "TANDEM_KERNELS"
COMPILE_TIMEOUT_S = 120


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled kernels, or None, with the reason logged, where there are none."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        logger.info("no C compiler found: decoding with PyTorch's own operations, which is slower on a CPU")
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("the CPU kernels cannot be used, PyTorch's own operations are slower: %s", detail)
        return None


def _compiled(compiler: str) -> Path:
    path = _cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh, object_file = Path(folder) / path.name, Path(folder) / "kernels.o"
            _run(compiler, *FLAGS, "-c", "-o", str(object_file), str(SOURCES[0]))
            # Linked without an OpenMP runtime: PyTorch has brought one, and two of them would fight for cores.
            _run(compiler, "-shared", "-o", str(fresh), str(object_file), "-lm")
            fresh.rename(path)
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)


def _fingerprint(compiler: str) -> str:
    """Another source, compiler or processor needs another library."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout
    parts = [*(source.read_bytes() for source in SOURCES), " ".join(FLAGS).encode(), version, _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    except OSError:
        return platform.processor().encode()


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "tandem"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="tandem-kernels-"))
    return folder
