"""The SGLang engine, as callers in any thread see it: a running SGLang server that is probed, watched and left.

    caller threads ──submit, cancel──────────────► backend.py: a task for every request ─► the server
                   ──pause, resume, weights, …───► serving/updates.py: in turn ──────────►

All of it runs in one event loop in a thread of its own.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tandem.config.inference import InferenceConfig
from tandem.engine.protocol import (
    EngineError,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    OnDone,
    OnPart,
    UpdateMode,
)
from tandem.serving.sglang.backend import SGLangBackend
from tandem.serving.sglang.client import SGLangClient
from tandem.serving.sglang.probe import probe
from tandem.serving.sglang.translate import Abilities, check_request
from tandem.serving.updates import ControlPlane, EngineLost
from tandem.utils.errors import UserError
from tandem.weights.check import ServedModel
from tandem.weights.versions import AdapterRefused

logger = logging.getLogger(__name__)
T = TypeVar("T")
SHUTTING_DOWN = "the engine is shutting down"
WATCH_S = 5.0  # between two looks at whether the server is still the one we probed
LOOKS = 3  # in vain, before it counts as gone
FAREWELL_S = 5.0  # to abort what still runs when the engine stops


class SGLangEngine:
    def __init__(
        self, config: InferenceConfig, api_key: str | None, eos_token_ids: list[int], on_failure: Callable[[str], None]
    ) -> None:
        self._config, self._on_failure = config, on_failure
        self._abilities = Abilities()
        self._client = SGLangClient(config.sglang.base_url, api_key, config.sglang.timeout_s)
        self._backend = SGLangBackend(self._client, eos_token_ids)
        self._control = ControlPlane(self._backend, ServedModel(config.model.name), self._fail)
        self._request_ids = count()
        self._open: dict[int, Future[GenerationResult]] = {}  # requests that are not answered yet
        self._is_ending = False
        self._mutex = threading.Lock()  # between callers and the end of the loop
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang", daemon=True)

    def start(self) -> None:
        """Returns once the server answers and is the right one. Raises UserError otherwise."""
        self._thread.start()
        try:
            self._call(self._arrive())
        except BaseException:  # cleans up
            self.stop()
            raise

    def stop(self) -> None:
        with self._mutex:
            if self._is_ending:
                return
            self._is_ending = True
            left = asyncio.run_coroutine_threadsafe(self._leave(), self._loop)
        left.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def version(self) -> int:
        return self._control.version

    @property
    def paused(self) -> bool:
        return self._control.paused

    @property
    def failure(self) -> str | None:
        return self._control.failure

    @property
    def stats(self) -> EngineStats:
        return self._backend.stats

    @property
    def adapters(self) -> dict[str, str]:
        return self._backend.adapters.paths

    def submit(self, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None = None) -> int:
        request.check_length(self._config.seq_len)
        check_request(request, self._abilities, self._config.sglang)
        if request.adapter is not None:
            self._backend.adapters.get(request.adapter)
        request_id = next(self._request_ids)
        seed = request.sampling.seed
        if seed is None:
            # SGLang would give every request without one the same.
            seed = (self._config.seed << 32) ^ request_id
        seed = seed if self._abilities.deterministic else None
        answer = self._open[request_id] = self._run(self._backend.generate(request, seed, on_part))
        answer.add_done_callback(lambda _: self._answer(request_id, answer, on_done))
        return request_id

    def cancel(self, request_id: int) -> None:
        answer = self._open.pop(request_id, None)
        if answer is not None:
            answer.cancel()

    def pause(self, mode: UpdateMode = "keep") -> None:
        self._call(self._control.pause(mode))

    def resume(self) -> None:
        self._call(self._control.resume())

    def update_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        self._call(self._control.update(path, version, mode))

    def reset_prefix_cache(self) -> None:
        self._call(self._control.reset_prefix_cache())

    def load_adapter(
        self, name: str, path: Path, version: int | None = None, *, replace: bool = False, mode: UpdateMode = "keep"
    ) -> None:
        if not self._abilities.has_adapters:
            raise AdapterRefused("this SGLang server serves no adapters; start it with --enable-lora")
        load = partial(self._backend.load_adapter, name, path.resolve(), version, replace=replace)
        # Otherwise running requests keep the adapter they began with.
        self._call(self._control.load_adapter(path, mode, load, hold=mode == "wait"))

    def unload_adapter(self, name: str) -> None:
        async def unload() -> None:
            async with self._control.turn:
                await self._backend.unload_adapter(name)

        self._call(unload())

    def _run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """In the loop, while there is one."""
        with self._mutex:
            if not self._is_ending and self.failure is None:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        refused: Future[T] = Future()
        refused.cancel()
        return refused

    def _call(self, operation: Coroutine[Any, Any, None]) -> None:
        """Run an operation and wait for it; raises if the engine ends before."""
        try:
            self._run(operation).result()
        except CancelledError:
            raise EngineError(self.failure or SHUTTING_DOWN) from None

    # From here on, everything runs in the loop.

    async def _arrive(self) -> None:
        self._abilities, weights = await probe(self._client, self._config)
        self._backend.history.append(weights)
        self._control.version = weights.version
        self._backend.sending.set()
        self._watching = asyncio.ensure_future(self._watch())

    def _answer(self, request_id: int, answer: "Future[GenerationResult]", on_done: OnDone) -> None:
        if self._open.pop(request_id, None) is None:  # nobody waits for it any more
            return
        error = EngineError(self.failure or SHUTTING_DOWN) if answer.cancelled() else answer.exception()
        if isinstance(error, EngineLost):
            self._control.fail(str(error))
        on_done(error if isinstance(error, Exception) else answer.result())

    def _fail(self, reason: str) -> None:
        logger.error("%s", reason)
        self._cancel_all()
        self._on_failure(reason)

    def _cancel_all(self) -> "set[asyncio.Task[Any]]":
        """Whoever waits for a request or an operation is told why."""
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task(self._loop)} - self._backend.background
        for task in others:
            task.cancel()
        return others

    async def _watch(self) -> None:
        """Notice when the server goes away, or comes back with other weights than we put there."""
        misses = 0
        while self.failure is None:
            await asyncio.sleep(WATCH_S)
            async with self._control.turn:
                expected = self._backend.history[-1].label
                try:
                    label = str((await self._client.info("/model_info")).get("weight_version"))
                except (EngineError, ValueError) as error:
                    misses += 1
                    if misses == LOOKS:
                        self._control.fail(f"the SGLang server is gone: {error}")
                    continue
                misses = 0
                if label != expected:
                    self._control.fail(
                        f"SGLang at {self._client.base_url} serves weights {label!r} instead of {expected!r}, which "
                        "were put there from here; was it restarted, or updated by another client?"
                    )

    async def _leave(self) -> None:
        """SGLang goes on without us: nothing of ours is left there, and it is not paused."""
        others = self._cancel_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*others, return_exceptions=True)
                for adapter in self._backend.adapters.loaded.values():
                    self._backend.in_background(self._backend.drop_adapter(adapter))
                self._backend.in_background(self._client.post("/continue_generation"))
                await asyncio.gather(*self._backend.background, return_exceptions=True)
        await self._client.close()


def build_engine(
    config: InferenceConfig, api_key: str | None, eos_token_ids: list[int], on_failure: Callable[[str], None]
) -> SGLangEngine:
    """A client of the configured server; it is not probed before `start`."""
    try:
        return SGLangEngine(config, api_key, eos_token_ids, on_failure)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name = {str(config.model.name)!r}: {error}") from error
