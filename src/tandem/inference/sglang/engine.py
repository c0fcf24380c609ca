"""The SGLang engine, as callers in any thread see it: a running SGLang server that is probed, watched and left.

    caller threads ──submit, cancel──────────────► requests.py: a task for every request ─► the server
                   ──pause, resume, weights, …───► control/updates.py: in turn ───────────►

All of it runs in one event loop (loop.py) in a thread of its own.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path

from tandem.config.inference import InferenceConfig
from tandem.inference.control.updates import ControlPlane
from tandem.inference.engine import (
    AdapterRefused,
    EngineError,
    EngineStats,
    GenerationRequest,
    OnDone,
    OnPart,
    UpdateMode,
)
from tandem.inference.sglang.backend import SGLangBackend
from tandem.inference.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.inference.sglang.loop import SHUTTING_DOWN, EngineLoop
from tandem.inference.sglang.probe import probe
from tandem.inference.sglang.requests import Request
from tandem.inference.sglang.translate import Abilities, Limits, check_request
from tandem.inference.weight_check import ServedModel
from tandem.utils.errors import UserError

WATCH_S = 5.0  # between two looks at whether the server is still the one we probed
LOOKS = 3  # in vain, before it counts as gone
FAREWELL_S = 5.0  # to abort what still runs when the engine stops


class SGLangEngine:
    def __init__(
        self, config: InferenceConfig, api_key: str | None, eos_token_ids: list[int], on_failure: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._loop = EngineLoop(self._refuse_and_tell)
        self._thread = threading.Thread(target=self._run, name="sglang", daemon=True)
        self._arrived: Future[None] = Future()
        self._config = config
        options = config.sglang
        self._limits = Limits(config.seq_len, options.allow_unseeded, options.allow_adjusted_logprobs)
        self._abilities = Abilities()
        self._client = SGLangClient(options.base_url, api_key, options.timeout_s)
        self._backend = SGLangBackend(self._client, self._loop, eos_token_ids)
        self._requests = self._backend.requests
        self._control = ControlPlane(self._backend, ServedModel(config.model.name), self._loop.fail)
        self._request_ids = count()

    def start(self) -> None:
        """Returns once the server answers and is the right one. Raises UserError otherwise."""
        self._thread.start()
        self._arrived.result()

    @property
    def version(self) -> int:
        return self._requests.version

    @property
    def paused(self) -> bool:
        return self._control.paused

    @property
    def failure(self) -> str | None:
        return self._loop.failure

    @property
    def stats(self) -> EngineStats:
        return self._requests.stats

    @property
    def adapters(self) -> dict[str, str]:
        return self._requests.adapters.paths

    def cancel(self, request_id: int) -> None:
        self._loop.send(lambda: self._requests.forget(request_id), lambda error: None)

    def pause(self, mode: UpdateMode = "keep") -> None:
        self._loop.call(self._control.pause(mode))

    def resume(self) -> None:
        self._loop.call(self._control.resume())

    def update_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        self._loop.call(self._control.update(path, version, mode))

    def reset_prefix_cache(self) -> None:
        self._loop.call(self._control.reset_prefix_cache())

    def stop(self) -> None:
        self._loop.stop()
        self._thread.join()

    def submit(self, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None = None) -> int:
        check_request(request, self._abilities, self._limits)
        request_id = next(self._request_ids)
        if request.adapter is not None:
            self._requests.adapters.get(request.adapter)
        seed = request.sampling.seed
        if seed is None:
            # SGLang would give every request without one the same.
            seed = (self._config.seed << 32) ^ request_id
        entry = Request(
            request_id, request, on_done, on_part, seed if self._abilities.deterministic else None, request.n
        )
        self._loop.send(lambda: self._requests.begin(entry), on_done)
        return request_id

    def load_adapter(
        self, name: str, path: Path, version: int | None = None, *, replace: bool = False, mode: UpdateMode = "keep"
    ) -> None:
        if not self._abilities.has_adapters:
            raise AdapterRefused("this SGLang server serves no adapters; start it with --enable-lora")

        async def load() -> None:
            # SGLang itself is not paused: running requests keep the adapter they began with.
            async with self._requests.drained() if mode == "wait" else contextlib.nullcontext():
                await self._backend.load_adapter(name, path.resolve(), version, replace=replace)

        self._loop.call(self._control.load_adapter(path, mode, load, hold=False))

    def unload_adapter(self, name: str) -> None:
        async def unload() -> None:
            async with self._control.turn:
                await self._backend.unload_adapter(name)

        self._loop.call(unload())

    # From here on, everything runs in the loop.

    def _run(self) -> None:
        self._loop.run(self._live, self._end)
        if not self._arrived.done():
            self._arrived.set_exception(EngineError(self._loop.why_over))
        self._requests.refuse_all(self._loop.why_over)

    async def _live(self) -> None:
        arrival = asyncio.ensure_future(self._tell_arrival())
        is_stopped = await self._loop.until_stopped(arrival)
        if is_stopped or arrival.exception() is not None:
            return
        watch = asyncio.ensure_future(self._watch())
        await self._loop.until_stopped(watch)
        if not watch.cancelled():
            watch.result()

    async def _tell_arrival(self) -> None:
        """To `start`, which waits for it."""
        try:
            await self._arrive()
        except BaseException as error:
            self._arrived.set_exception(error if isinstance(error, Exception) else EngineError(SHUTTING_DOWN))
            raise
        self._arrived.set_result(None)

    async def _end(self) -> None:
        await asyncio.sleep(0)  # what was sent to the loop before the end has been taken in now
        self._loop.cancel_operations()
        self._requests.cancel_all()
        rids = [sample.rid for sample in self._requests.in_flight]
        self._requests.refuse_all(self._loop.why_over)
        await self._leave(rids)

    def _refuse_and_tell(self, reason: str) -> None:
        self._requests.refuse_all(reason)
        self._on_failure(reason)

    async def _arrive(self) -> None:
        config = self._config
        timeout_s = config.sglang.startup_timeout_s
        found = await probe(self._client, config.model.name, config.seq_len, config.deterministic, timeout_s)
        self._abilities = found.abilities
        self._control.version = found.version
        self._backend.adopt(found)

    async def _watch(self) -> None:
        """Notice when the server goes away, or comes back with other weights than we put there."""
        misses = 0
        while True:
            await asyncio.sleep(WATCH_S)
            async with self._control.turn:
                try:
                    label = str((await self._client.model_info())["weight_version"])
                except (SGLangUnreachable, SGLangRefused) as error:
                    misses += 1
                    if misses == LOOKS:
                        self._loop.fail(f"the SGLang server is gone: {error}")
                    continue
                misses = 0
                if label != self._backend.label:
                    self._loop.fail(
                        f"SGLang at {self._client.base_url} serves weights {label!r} instead of "
                        f"{self._backend.label!r}, which were put there from here; was it restarted, or updated by "
                        "another client?"
                    )

    async def _leave(self, rids: list[str]) -> None:
        goodbye = [self._client.abort(rid) for rid in rids]
        goodbye += [self._client.unload_adapter(each.server_name) for each in self._requests.adapters.loaded.values()]
        if self._backend.is_held:
            goodbye.append(self._client.resume())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*goodbye, return_exceptions=True)
        await self._client.close()


def build_engine(
    config: InferenceConfig, api_key: str | None, eos_token_ids: list[int], on_failure: Callable[[str], None]
) -> SGLangEngine:
    """A client of the configured server; it is not probed before `start`."""
    try:
        return SGLangEngine(config, api_key, eos_token_ids, on_failure)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name = {str(config.model.name)!r}: {error}") from error
