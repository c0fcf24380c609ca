"""In a process of its own: what is frozen stays so."""

import subprocess
import sys

SCRIPT = """
import asyncio, gc, time
from tandem.utils import garbage

garbage.YOUNG_S, garbage.ALL_S, garbage.LITTLE = 0.005, 0.01, 100_000

class Knot:
    def __init__(self):
        self.itself = self

def num_knots():
    return sum(isinstance(one, Knot) for one in gc.get_objects())

def num_full():
    return gc.get_stats()[2]["collections"]

async def until(condition, what):
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise SystemExit(what)

async def main():
    collecting = asyncio.ensure_future(garbage.collect_by_the_clock())
    await asyncio.sleep(0)
    assert not gc.isenabled()
    before = num_full()
    much = [[] for _ in range(500_000)]
    knots = [Knot() for _ in range(1000)]
    del knots
    await until(lambda: num_knots() == 0, "young knots are left")
    old = [Knot() for _ in range(1000)]
    young = gc.get_stats()[0]["collections"]
    await until(lambda: gc.get_stats()[0]["collections"] > young + 5, "nothing young is collected")
    del old
    await asyncio.sleep(0.1)
    assert num_full() == before, "everything was collected while much was there"
    assert num_knots() == 1000
    del much
    await until(lambda: num_knots() == 0, "old knots are left")
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    assert gc.isenabled()

asyncio.run(main())
"""


def test_what_is_new_is_collected_often_and_everything_while_little_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


IMPORTING = """
import gc
from tandem.utils.garbage import importing
from tandem.utils.processes import run_entrypoint

def body():
    before = gc.get_stats()[0]["collections"]
    with importing():
        modules = [[] for _ in range(100_000)]
        assert gc.get_stats()[0]["collections"] == before
    assert gc.isenabled() and gc.get_freeze_count() > 100_000
    try:
        with importing():
            raise ImportError
    except ImportError:
        assert gc.isenabled()

run_entrypoint("rl", body)
assert gc.get_freeze_count() == 0
"""


def test_nothing_is_collected_while_modules_are_imported() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
