"""Waiting for a server that a test has started."""

import subprocess
import time

import httpx
from tests.patience import PATIENCE


def wait_until_healthy(process: subprocess.Popen[str], base_url: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s * PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{base_url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the server did not start: {process.communicate()[0]}")
