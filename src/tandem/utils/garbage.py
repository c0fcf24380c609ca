"""Garbage collection: none while modules are imported; by the clock where an event loop must not stand still.

Torch brings hundreds of thousands of objects, all of which stay. To look at them again and again while they come is an
eighth of the time that it takes to import them.

An event loop may hold very many objects too. Python collects when enough objects were made, less those that were
freed. With ten thousand conversations under way, of which as many objects are freed as are made, that comes late: it
then looks at hundreds of thousands at once, and finds next to nothing. Reference counts free nearly all; what is left
are cycles of closed connections and of errors.

So collections go by the clock there: often of what is new, which is little each time, and of everything while little
is there.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_S = 0.05
ALL_S = 5.0
LITTLE = 200_000  # blocks of memory; to look at them takes some 30 ms
# After this time everything is collected however much is there. With ten thousand conversations it takes a second.
AT_LEAST_S = 3600.0


@contextmanager
def importing() -> Iterator[None]:
    """Around imports that take long: nothing is collected meanwhile, and what is there then is not looked at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


async def collect_by_the_clock() -> None:
    """Run this as a task; automatic collection is off until it ends. What is there now, modules and prompts above all,
    is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    frozen, last = sys.getallocatedblocks(), time.monotonic()
    try:
        while True:
            await asyncio.sleep(YOUNG_S)
            gc.collect(0)
            since_s = time.monotonic() - last
            if since_s > ALL_S and (sys.getallocatedblocks() - frozen < LITTLE or since_s > AT_LEAST_S):
                gc.collect()
                last = time.monotonic()
    finally:
        gc.enable()
