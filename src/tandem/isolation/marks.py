"""Whose code runs in a worker process, and that its event loop turns.

Both lie in memory that its owner maps too: they can be read while the process is stuck, and after it has died.
"""

import mmap
import signal
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

TURNS = struct.Struct("=Q")
SLOT = struct.Struct("=QQ")  # the number of a call, or 0; the thread that runs its code
NUM_SLOTS = 64  # the first is the event loop's; threads beyond the others run unmarked
STACK_SIGNAL = signal.SIGUSR1  # has the process write where its threads are
SIZE_BYTES = TURNS.size + NUM_SLOTS * SLOT.size


class Marks:
    """Written by the process, read by its owner."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE_BYTES)
        self._free = deque(range(1, NUM_SLOTS))
        self._thread = threading.get_ident()

    def turn(self) -> None:
        """The event loop turns."""
        TURNS.pack_into(self._memory, 0, self.turns + 1)

    def in_loop(self, number: int) -> None:
        """Code of this call runs in the event loop from now on; 0: of none."""
        self._set(0, number, self._thread)

    @contextmanager
    def in_thread(self, number: int) -> Iterator[None]:
        """Code of this call runs in the current thread."""
        try:
            slot = self._free.popleft()
        except IndexError:
            yield
            return
        self._set(slot, number, threading.get_ident())
        try:
            yield
        finally:
            self._set(slot, 0, 0)
            self._free.append(slot)

    def _set(self, slot: int, number: int, thread: int) -> None:
        SLOT.pack_into(self._memory, TURNS.size + slot * SLOT.size, number, thread)

    @property
    def turns(self) -> int:
        """How often the event loop has turned."""
        return TURNS.unpack_from(self._memory)[0]

    @property
    def running(self) -> dict[int, int]:
        """The calls whose code runs, and in which thread."""
        return {number: thread for number, thread in SLOT.iter_unpack(self._memory[TURNS.size :]) if number}

    def close(self) -> None:
        self._memory.close()
