"""The name by which users' environments and rewards import the sandbox."""

from tandem.isolation.sandbox import SandboxResult, SandboxUnavailable, run_python, why_unprotected

__all__ = ["SandboxResult", "SandboxUnavailable", "run_python", "why_unprotected"]
