"""Groups of rollouts."""

from tests.unit.orchestrator.conftest import make_group

__all__ = ["make_group"]
