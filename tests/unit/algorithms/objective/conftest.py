"""Streams made by hand."""

from tests.unit.trainer.losses.conftest import make_streams

__all__ = ["make_streams"]
