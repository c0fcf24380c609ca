"""Garbage collection in a process with an event loop and very many objects."""

import gc

# Of new objects, of those that outlived one collection, of all. Python's own are (700, 10, 10) in version 3.11.
THRESHOLDS = (10_000, 10, 1_000)


def collect_rarely() -> None:
    """A collection of all objects of ten thousand conversations takes more than a second, in which the event loop
    stands still, and finds nothing: what they leave is freed by reference counts, and cycles are mostly young.
    Collections of young objects go on; that of all becomes rare. What is there now, modules above all, is never looked
    at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
