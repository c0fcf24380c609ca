"""SGLang as an engine of the Python API: our server in front of an SGLang server, which it starts or is given."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.launch.supervisor import last_lines
from tandem.python.engines import InferenceEngine
from tandem.utils.errors import UserError
from tandem.utils.ports import listen
from tandem.utils.processes import kept, kill_tree

GRACE_S = 10.0


class SGLangEngine(InferenceEngine):
    """SGLang behind our API: a running SGLang server at `sglang_url`, or one that is started on the GPU with `flags`,
    SGLang's own: `SGLangEngine(model, gpu_ids=[0, 1], flags={"tensor-parallel-size": 2})`.

    SGLang draws by seed only with `--enable-deterministic-inference`; without it, seeds are left out."""

    engine = "sglang"

    def __init__(
        self,
        model_name: str | Path,
        gpu_id: int | None = None,
        *,
        sglang_url: str | None = None,
        flags: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        is_running = sglang_url is not None or options.get("base_url") is not None
        if is_running and flags:
            raise UserError(f"SGLangEngine: flags = {dict(flags)} are for a server that is started; this one runs")
        if not is_running and find_spec("sglang") is None:
            raise UserError(
                "SGLangEngine: sglang is not installed here; install it, or start `python -m sglang.launch_server` "
                "elsewhere and give sglang_url='http://…:30000'"
            )
        self.flags = dict(flags or {})
        if not is_running and "gpu_memory_utilization" in options:
            self.flags.setdefault("mem-fraction-static", options.pop("gpu_memory_utilization"))
        address = {} if sglang_url is None else {"base_url": sglang_url}
        sglang = {"allow_unseeded": True} | options.pop("sglang", {}) | address
        super().__init__(model_name, gpu_id, sglang=sglang, **options)
        self.sglang_url = sglang_url
        self._sglang: subprocess.Popen[bytes] | None = None

    async def close(self) -> None:
        await super().close()
        if self._sglang is not None:
            self._sglang.terminate()
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._sglang.wait, GRACE_S)
            kill_tree(self._sglang)
            self._sglang = None

    def _with_gpu(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    async def _server_config(self) -> dict[str, Any]:
        config = await super()._server_config()
        if self.sglang_url is None:
            config["sglang"]["base_url"] = self._start_sglang()
        return config

    def _check_processes(self) -> None:
        super()._check_processes()
        if self._sglang is not None and self._sglang.poll() is not None:
            raise UserError(f"SGLang ended ({self._log}):\n{last_lines(self._log)}")

    @property
    def _log(self) -> Path:
        assert self._folder is not None, "not started"
        return self._folder / "sglang.log"

    def _start_sglang(self) -> str:
        """Our server waits for it, `sglang.startup_timeout_s` at most."""
        with listen("127.0.0.1", 0) as listening:
            port = listening.getsockname()[1]
        flags = {"model-path": self.model_dir, "host": "127.0.0.1", "port": port} | self.flags
        words = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items()]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._sglang = subprocess.Popen(
                kept([sys.executable, "-m", "sglang.launch_server", *(word for pair in words for word in pair)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment,
            )
        return f"http://127.0.0.1:{port}"
