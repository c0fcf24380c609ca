"""How much memory there is to spare."""

import os
from pathlib import Path

import pytest

from tandem.utils.devices import free_memory_bytes


def test_it_is_some_of_what_the_machine_has() -> None:
    assert 0 < free_memory_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_memory_that_could_be_freed_counts_and_unused_pages_where_that_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    lines = ["MemTotal:  900 kB", "MemFree:  100 kB", "MemAvailable:  400 kB"]
    monkeypatch.setattr(Path, "read_text", lambda path: "\n".join(lines))
    assert free_memory_bytes() == 400 * 1024
    del lines[2]
    assert free_memory_bytes() == 7 * 4096
