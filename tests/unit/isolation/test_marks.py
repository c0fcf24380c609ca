"""Marks are seen by whoever maps the same file."""

import tempfile
import threading
from contextlib import ExitStack

from tandem.isolation.marks import NUM_SLOTS, SIZE_BYTES, Marks


def test_whose_code_runs_is_seen_from_the_other_side() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE_BYTES)
        inside, outside = Marks(file.fileno()), Marks(file.fileno())
        this = threading.get_ident()
        assert outside.running == {} and outside.turns == 0
        inside.turn()
        inside.in_loop(7)
        with inside.in_thread(8):
            assert outside.running == {7: this, 8: this}
        inside.in_loop(0)
        assert outside.running == {} and outside.turns == 1
        with ExitStack() as threads:
            for number in range(1, NUM_SLOTS + 5):
                threads.enter_context(inside.in_thread(number))
            assert len(outside.running) == NUM_SLOTS - 1
        assert outside.running == {}
        inside.close()
        outside.close()
