"""What becomes of the exit codes of ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.utils.processes import REFUSED, UNUSABLE

# The first rank fails; the other is ended by torchrun.
RANK = "import os, sys, time; time.sleep(600) if os.environ['RANK'] == '1' else sys.exit(int(sys.argv[1]))\n"


@pytest.mark.parametrize(("code", "expected"), [(UNUSABLE, UNUSABLE), (REFUSED, REFUSED), (7, 1)])
def test_what_no_restart_mends_is_told_by_the_exit_code(tmp_path: Path, code: int, expected: int) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "tandem.trainer.parallel.torchrun", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script), str(code)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == expected, done.stderr
    assert f"exitcode  : {code}" in done.stderr
