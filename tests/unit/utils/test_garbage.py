"""In a process of its own: it is for good."""

import subprocess
import sys

SCRIPT = """
import gc
from tandem.utils.garbage import collect_rarely

class Knot:
    def __init__(self):
        self.itself = self

collect_rarely()
found = gc.get_stats()
objects = [[] for _ in range(2_000_000)]
knots = [Knot() for _ in range(1000)]
del knots
objects += [[] for _ in range(500_000)]
young, _, full = (after["collections"] - before["collections"] for before, after in zip(found, gc.get_stats()))
assert full == 0, f"{full} collections of everything"
assert young > 100, f"{young} collections of young objects"
left = sum(isinstance(one, Knot) for one in gc.get_objects())
assert left == 0, f"{left} knots are left"
"""


def test_young_garbage_is_collected_and_everything_hardly_ever() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
