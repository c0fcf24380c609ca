"""Environments that tests name by their module, and processes that are ended without a long wait."""

from pathlib import Path

import pytest

from tandem.isolation import process


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(process, "GRACE_S", 1.0)
