"""The SGLang engine: requests go to a running SGLang server over HTTP, one call for every sample.

    caller threads ──submit, cancel──────────────► loop: a task for every request, a call for every sample ──► SGLang
                   ──pause, resume, weights, …───► loop: one operation at a time ──────────────────────────►

Everything but the checks of new files runs in one event loop in a thread of its own. While SGLang is paused, and
while weights change, new samples wait here, so that the version a sample is sent under is known.

Weights change in four calls: pause (running requests are retracted: SGLang forgets what it computed of them, and
computes it again later), flush the cache, load from disk, continue. The cache is flushed first, while the old weights
serve: where SGLang refuses that, nothing has changed. Where SGLang fails while it loads, its own way back is not
relied on: the weights that served before are loaded again from where they came from, and if that fails too the
engine has failed.
"""

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tandem.config.inference import InferenceConfig
from tandem.inference.engine import (
    AdapterRefused,
    EngineBusy,
    EngineError,
    EngineStats,
    GenerationRequest,
    GenerationResult,
    OnDone,
    OnPart,
    UpdateMode,
    WeightUpdateRefused,
)
from tandem.inference.sglang.adapters import Adapters, check_adapter_files, new_adapter
from tandem.inference.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.inference.sglang.flights import Flight, Flights, Request
from tandem.inference.sglang.handshake import Met, meet
from tandem.inference.sglang.translate import Abilities, Limits, UnknownWeights, check_request, generate_body
from tandem.inference.vllm.checkpoint import Served
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")
SHUTTING_DOWN = "the engine is shutting down"
WATCH_S = 5.0  # between two looks at whether the server is still the one we met
LOOKS = 3  # in vain, before it counts as gone
FAREWELL_S = 5.0  # to abort what still runs when the engine stops


class SGLangEngine:
    def __init__(
        self, config: InferenceConfig, api_key: str | None, eos_token_ids: list[int], on_failure: Callable[[str], None]
    ) -> None:
        self.version = 0
        self.paused = False
        self.failure: str | None = None
        self._config, self._api_key = config, api_key
        self._eos_token_ids = frozenset(eos_token_ids)
        self._on_failure = on_failure
        options = config.sglang
        self._limits = Limits(config.seq_len, options.allow_unseeded, options.allow_adjusted_logprobs)
        self._abilities = Abilities()
        self._served = Served(config.model.name)
        self._request_ids = count()
        self._requests: dict[int, Request] = {}
        self._flights = Flights()
        self._adapters = Adapters()
        self._labels: dict[str, int] = {}  # SGLang's names of weights and our versions
        self._label, self._path = "", ""  # of the weights that serve
        self._is_held = False  # SGLang is paused, by `pause` or for the time of an update
        self._stopping = False
        self._one_update = threading.Lock()
        self._mutex = threading.Lock()  # between callers and the end of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._open = asyncio.Event()  # samples may be sent
        self._operation = asyncio.Lock()
        self._operations: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="sglang", daemon=True)
        self._met: Future[None] = Future()

    def start(self) -> None:
        """Returns once the SGLang server answers and is the right one. Raises UserError otherwise."""
        self._thread.start()
        self._met.result()

    @property
    def stats(self) -> EngineStats:
        return self._flights.stats(sum(request.num_waiting for request in list(self._requests.values())))

    @property
    def adapters(self) -> dict[str, str]:
        return self._adapters.paths

    def submit(self, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None = None) -> int:
        check_request(request, self._abilities, self._limits)
        request_id = next(self._request_ids)
        if request.adapter is not None:
            self._adapters.get(request.adapter)
        seed = request.sampling.seed
        if self._abilities.deterministic and seed is None:
            # SGLang would give every request without one the same.
            seed = (self._config.seed << 32) ^ request_id
        entry = Request(request_id, request, on_done, on_part, seed if self._abilities.deterministic else None)
        self._send(lambda: self._begin(entry), on_done)
        return request_id

    def cancel(self, request_id: int) -> None:
        self._send(lambda: self._forget(request_id), lambda error: None)

    def pause(self, mode: UpdateMode = "keep") -> None:
        self._call(self._pause(mode))

    def resume(self) -> None:
        self._call(self._resume())

    def update_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        with self._one_update:
            if version < 0:
                raise WeightUpdateRefused(f"version must be 0 or more, not {version}")
            self._served.check(path, version)
            self._call(self._update(path.resolve(), version, mode))
        logger.info("serving version %d from %s", version, path)

    def load_adapter(self, name: str, path: Path, version: int | None = None, *, replace: bool = False) -> None:
        if not self._abilities.has_adapters:
            raise AdapterRefused("this SGLang server serves no adapters; start it with --enable-lora")
        check_adapter_files(path)
        self._call(self._load_adapter(name, path.resolve(), version, replace))

    def unload_adapter(self, name: str) -> None:
        self._call(self._unload_adapter(name))

    def reset_prefix_cache(self) -> None:
        self._call(self._reset_prefix_cache())

    def stop(self) -> None:
        with self._mutex:
            self._stopping = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _send(self, action: Callable[[], None], refuse: Callable[[EngineError], None]) -> None:
        with self._mutex:
            if self.failure is None and not self._stopping and self._loop is not None:
                self._loop.call_soon_threadsafe(action)
                return
        refuse(EngineError(self.failure or SHUTTING_DOWN))

    def _call(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation in the loop and wait for it; raises if the engine ends before."""
        with self._mutex:
            loop = self._loop
            if self.failure is not None or self._stopping or loop is None:
                operation.close()
                raise EngineError(self.failure or SHUTTING_DOWN)
            future = asyncio.run_coroutine_threadsafe(self._one_at_a_time(operation), loop)
        try:
            return future.result()
        except CancelledError:
            raise EngineError(self.failure or SHUTTING_DOWN) from None

    # From here on, everything runs in the loop.

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception as error:
            logger.exception("the SGLang engine failed")
            self._fail(f"the engine failed: {type(error).__name__}: {error}")
        with self._mutex:
            self._stopping = True
        if not self._met.done():
            self._met.set_exception(EngineError(self.failure or SHUTTING_DOWN))
        self._refuse_everything(self.failure or SHUTTING_DOWN)

    async def _live(self) -> None:
        """From meeting the server to leaving it."""
        options = self._config.sglang
        self._client = SGLangClient(options.base_url, self._api_key, options.timeout_s)
        try:
            with self._mutex:
                self._loop = asyncio.get_running_loop()
            arrival = asyncio.ensure_future(self._arrive())
            await self._until_stopped(arrival)
            if self._stop.is_set() or arrival.exception() is not None:
                return
            watch = asyncio.ensure_future(self._watch())
            await self._until_stopped(watch)
            if not watch.cancelled():
                watch.result()
        finally:
            with self._mutex:
                self._stopping = True
            await self._leave()
            with self._mutex:
                self._loop = None

    async def _arrive(self) -> None:
        """Meet the server, and tell `start` how it went."""
        config = self._config
        try:
            timeout_s = config.sglang.startup_timeout_s
            found = await meet(self._client, config.model.name, config.seq_len, config.deterministic, timeout_s)
        except BaseException as error:
            self._met.set_exception(error if isinstance(error, Exception) else EngineError(SHUTTING_DOWN))
            raise
        self._settle_in(found)
        self._met.set_result(None)

    async def _until_stopped(self, task: "asyncio.Task[None]") -> None:
        """Until the task is done or the engine is to end, whichever comes first."""
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for left in (task, stopped):
            left.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)

    def _settle_in(self, found: Met) -> None:
        self._abilities = found.abilities
        self.version, self._label, self._path = found.version, found.label, found.model_path
        self._labels[found.label] = found.version
        self._open.set()

    async def _watch(self) -> None:
        """Notice when the server goes away, or comes back with other weights than we put there."""
        misses = 0
        while True:
            await asyncio.sleep(WATCH_S)
            async with self._operation:
                try:
                    label = str((await self._client.model_info())["weight_version"])
                except (SGLangUnreachable, SGLangRefused) as error:
                    misses += 1
                    if misses == LOOKS:
                        self._fail(f"the SGLang server is gone: {error}")
                    continue
                misses = 0
                if label != self._label:
                    self._fail(
                        f"SGLang at {self._client.base_url} serves weights {label!r} instead of {self._label!r}, which "
                        "were put there from here; was it restarted, or updated by somebody else?"
                    )

    async def _leave(self) -> None:
        """End what runs at SGLang, and leave it neither busy nor paused."""
        await asyncio.sleep(0)  # what was sent to the loop before the end is in the books now
        for task in [*self._operations, *(request.task for request in self._requests.values() if request.task)]:
            task.cancel()
        rids = [flight.rid for flight in self._flights.current]
        self._refuse_everything(self.failure or SHUTTING_DOWN)
        goodbye = [self._client.abort(rid) for rid in rids]
        goodbye += [self._client.unload_adapter(adapter.sglang_name) for adapter in self._adapters.all]
        if self._is_held:
            goodbye.append(self._client.resume())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*goodbye, return_exceptions=True)
        await self._client.close()

    # Requests.

    def _begin(self, entry: Request) -> None:
        if self._stopping or self.failure is not None:
            entry.on_done(EngineError(self.failure or SHUTTING_DOWN))
            return
        self._requests[entry.id] = entry
        entry.task = asyncio.ensure_future(self._serve(entry))

    async def _serve(self, entry: Request) -> None:
        """Answer one request: all of its samples, or the first error."""
        samples = [asyncio.ensure_future(self._sample(entry, index)) for index in range(entry.request.n)]
        try:
            done = await asyncio.gather(*samples)
            outcome = GenerationResult(
                samples=[flight.sample for flight in done if flight.sample is not None],
                num_cached_tokens=min(flight.num_cached_tokens for flight in done),
                prompt_logprobs=done[0].prompt_logprobs,
            )
            self._flights.count(outcome, len(entry.request.prompt_ids), done)
        except EngineError as error:
            outcome = error
            if isinstance(error, UnknownWeights):
                self._fail(str(error))
        except Exception as error:
            logger.exception("an answer of SGLang cannot be read")
            outcome = EngineError(f"an answer of SGLang cannot be read: {type(error).__name__}: {error}")
        finally:
            for sample in samples:
                sample.cancel()
        if isinstance(outcome, Exception):
            self._abort(entry)
        if self._requests.pop(entry.id, None) is not None:
            entry.on_done(outcome)

    async def _sample(self, entry: Request, index: int) -> Flight:
        while not self._open.is_set():
            await self._open.wait()
        # No other task runs from here to the call: what serves at this moment is what the call is sent under.
        name = entry.request.adapter
        adapter = None if name is None else self._adapters.find(name)
        flight = self._flights.take_off(entry, index, uuid.uuid4().hex, adapter, self.version)
        try:
            if name is not None and adapter is None:
                flight.land_unsent()
            else:
                await self._fly(flight)
        finally:
            self._flights.land(flight)
        return flight

    async def _fly(self, flight: Flight) -> None:
        entry, index = flight.entry, flight.index
        adapter = flight.adapter.sglang_name if flight.adapter else None
        streams = entry.on_part is not None
        body = generate_body(entry.request, index, flight.rid, seed=entry.seed, adapter=adapter, stream=streams)
        if not streams:
            flight.read(await self._client.generate(body))
        else:
            async for output in self._client.stream(body):
                flight.read(output)
                if not flight.is_finished:
                    self._tell(flight)
        flight.land(self._labels, self._eos_token_ids)
        if streams:
            self._tell(flight)

    def _tell(self, flight: Flight) -> None:
        entry = flight.entry
        if entry.on_part is not None and entry.id in self._requests:
            entry.on_part(flight.index, flight.next_part())

    def _forget(self, request_id: int) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            self._abort(entry)
            if entry.task is not None:
                # SGLang also aborts a request whose connection is closed, if it has not known it by its id yet.
                entry.task.cancel()

    def _abort(self, entry: Request) -> None:
        for flight in self._flights.of([entry]):
            self._in_background(self._abort_one(flight.rid))

    async def _abort_one(self, rid: str) -> None:
        try:
            await self._client.abort(rid)
        except EngineError as error:
            logger.warning("a request could not be aborted: %s", error)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)

    # Operations, one at a time.

    async def _one_at_a_time(self, operation: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._operations.add(task)
        try:
            async with self._operation:
                if self.failure is not None:
                    raise EngineError(self.failure)
                return await operation
        finally:
            operation.close()  # if it was never begun
            self._operations.discard(task)

    async def _pause(self, mode: UpdateMode) -> None:
        self._refuse_to_wait_while_paused(mode)
        await self._hold(mode)
        self.paused = True

    async def _resume(self) -> None:
        await self._release()
        self.paused = False

    async def _update(self, path: Path, version: int, mode: UpdateMode) -> None:
        self._refuse_to_wait_while_paused(mode)
        if mode == "abort" or not self.paused:
            await self._hold(mode)
        try:
            await self._flush()
            await self._replace(str(path), version)
        except SGLangUnreachable as error:
            self._fail(f"what SGLang serves is not known: {error}")
            raise
        finally:
            if not self.paused and self.failure is None:
                await self._go_on()

    def _refuse_to_wait_while_paused(self, mode: UpdateMode) -> None:
        if mode == "wait" and self.paused:
            raise EngineBusy("the engine is paused: running requests cannot end; resume it first")

    async def _hold(self, mode: UpdateMode) -> None:
        """Send no more samples, and have SGLang compute nothing until `_release`."""
        self._open.clear()
        try:
            if mode == "wait":
                await self._flights.all_landed()
            await self._client.pause("abort" if mode == "abort" else "retract")
            self._is_held = True
        except SGLangUnreachable:
            if not self._is_held:
                # It may have heard us.
                with contextlib.suppress(EngineError):
                    await self._client.resume()
            raise
        finally:
            if not self._is_held:
                self._open.set()

    async def _release(self) -> None:
        await self._client.resume()
        self._is_held = False
        self._open.set()

    async def _flush(self) -> None:
        try:
            await self._client.flush_cache()
        except SGLangRefused as error:
            raise EngineBusy(
                f"SGLang {self._abilities.version} does not empty its cache now, so the old weights keep serving: "
                f"{error}; update with mode wait or abort"
            ) from error

    async def _replace(self, path: str, version: int) -> None:
        label = str(version)
        # Before the load: an answer may name the new weights before we hear that they are there.
        self._labels[label] = version
        self._flights.note_version(version)
        try:
            await self._client.update_weights(path, label)
        except SGLangRefused as error:
            await self._restore(error)
        self.version, self._label, self._path = version, label, path

    async def _restore(self, cause: SGLangRefused) -> None:
        """Have the weights that served before loaded again: how far SGLang came with the new ones is not known."""
        try:
            await self._client.update_weights(self._path, self._label)
        except SGLangRefused as error:
            self._fail(f"{cause}; loading {self._path} again failed too: {error}; what SGLang serves is not known")
            raise EngineError(self.failure) from error
        raise WeightUpdateRefused(f"{cause}; version {self.version} was loaded again and serves") from cause

    async def _go_on(self) -> None:
        try:
            await self._release()
        except EngineError as error:
            self._fail(f"SGLang stays paused: {error}")
            raise

    async def _load_adapter(self, name: str, path: Path, version: int | None, replace: bool) -> None:
        known = self._adapters.find(name)
        if known is not None and not replace:
            raise AdapterRefused(f"an adapter named {name!r} is loaded already, from {known.path}; replace it")
        adapter = new_adapter(name, path, version)
        try:
            await self._client.load_adapter(adapter.sglang_name, str(path))
        except SGLangRefused as error:
            raise AdapterRefused(str(error)) from error
        self._adapters.put(name, adapter)
        if known is not None:
            self._in_background(self._unload_quietly(known.sglang_name))
        logger.info("serving the adapter %s from %s", name, path)

    async def _unload_quietly(self, sglang_name: str) -> None:
        try:
            await self._client.unload_adapter(sglang_name)
        except EngineError as error:
            logger.warning("an adapter that was replaced could not be unloaded: %s", error)

    async def _unload_adapter(self, name: str) -> None:
        adapter = self._adapters.get(name)
        self._adapters.remove(name)
        running = [flight.rid for flight in self._flights.current if flight.adapter is adapter]
        await asyncio.gather(*(self._abort_one(rid) for rid in running))
        try:
            await self._client.unload_adapter(adapter.sglang_name)
        except SGLangRefused as error:
            raise AdapterRefused(str(error)) from error

    async def _reset_prefix_cache(self) -> None:
        try:
            await self._client.flush_cache()
        except SGLangRefused as error:
            raise EngineBusy(f"{error}; SGLang empties its cache only while nothing runs") from error

    # The end.

    def _fail(self, reason: str) -> None:
        with self._mutex:
            if self.failure is not None:
                return
            self.failure = reason
        logger.error("%s", reason)
        self._refuse_everything(reason)
        self._on_failure(reason)
        self._stop.set()

    def _refuse_everything(self, reason: str) -> None:
        """Nobody is left waiting for an engine that has ended."""
        requests: Iterable[Request] = list(self._requests.values())
        self._requests.clear()
        for entry in requests:
            entry.on_done(EngineError(reason))


def build_engine(
    config: InferenceConfig, api_key: str | None, eos_token_ids: list[int], on_failure: Callable[[str], None]
) -> SGLangEngine:
    """A client of the configured server; it is not met before `start`."""
    try:
        return SGLangEngine(config, api_key, eos_token_ids, on_failure)
    except (OSError, ValueError) as error:
        raise UserError(f"model.name = {str(config.model.name)!r}: {error}") from error
