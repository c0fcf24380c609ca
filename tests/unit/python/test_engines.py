"""An engine that uses a server which others have started."""

import asyncio
import threading
from pathlib import Path

import httpx
import pytest
from tests.unit.utils.serving.test_protocol import running

from tandem import NativeEngine, UserError

THEIRS = {"run": "theirs-1", "lease": "0123456789abcdef", "place": "/runs/theirs on gpu8"}


def test_it_holds_the_server_for_as_long_as_it_is_used(tiny_model: Path, tmp_path: Path) -> None:
    async def use(url: str) -> int:
        async with NativeEngine(tiny_model, base_url=url):
            return httpx.post(f"{url}/update_weights", json={"path": str(tiny_model), "version": 1}).status_code

    with running(tmp_path, weight_roots=(Path("/"),)) as server:
        given_back = threading.Event()

        def hold() -> None:
            while not given_back.wait(0.05):
                httpx.post(f"{server.url}/claim", json=THEIRS)

        httpx.post(f"{server.url}/claim", json=THEIRS)
        holder = threading.Thread(target=hold)
        holder.start()
        try:
            with pytest.raises(UserError, match=r"refuses this run: .*run 'theirs-1' \(/runs/theirs on gpu8\) uses"):
                asyncio.run(use(server.url))
        finally:
            given_back.set()
            holder.join()
        assert server.engine.calls == []
        httpx.post(f"{server.url}/release", json={"lease": THEIRS["lease"]})
        assert asyncio.run(use(server.url)) == 409
        assert httpx.post(f"{server.url}/claim", json=THEIRS).status_code == 200
