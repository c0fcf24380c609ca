"""Command lines as users type them, and the messages they get back."""

from tests.unit.config.conftest import refusal, rl_toml

__all__ = ["refusal", "rl_toml"]
