"""Which version of the weights made each token, exactly.

The ledger counts the tokens of every tracked request as they arrive from vLLM's engines, in the order the engines
sent them. An engine reports that it has paused only after the last token it computed, so when the report is here,
every token of the old weights has been counted, and no token of the new ones exists:

    engine ──tokens──tokens──"paused"─────────────────────────────tokens──►
    ledger     3        5        │  mark(new version) at 5 tokens    6  …
                                 └─ reload, reset caches ─ resume ─┘
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Protocol

# [child_]prefix-<our id>[-prompt]-<8 random characters>: how vLLM names the engine's requests after ours.
ENGINE_ID = re.compile(r"(?:(?P<child>\d+)_)?[a-z]+-.*?(?P<id>tandem[0-9a-f]{32})(?:-(?P<prompt>\d+))?-\w{8}")

Slot = tuple[int, int]  # (prompt, sample of that prompt)


class EngineOutput(Protocol):
    """What the ledger reads of vLLM's EngineCoreOutput."""

    request_id: str
    new_token_ids: list[int]


class UncountedTokens(RuntimeError):
    """Tokens that did not come by the ledger, so that their version is unknown."""


class TrackedRequest:
    """One HTTP request: the version it came in under, the tokens counted so far, and the updates since."""

    def __init__(self, version: int, adapter: str | None = None) -> None:
        self.version = version
        self.adapter = adapter
        self.counts: dict[Slot, int] = {}
        self.engine_ids: list[str] = []
        self.marks: list[tuple[int, dict[Slot, int]]] = []  # (new version, tokens there were)

    def versions(self, slot: Slot, num_tokens: int, first: int = 0) -> list[int]:
        """The versions of tokens `first` … `first + num_tokens - 1` of a sample."""
        if first + num_tokens > self.counts.get(slot, 0):
            # Never guessed: a version of vLLM that names its requests otherwise must not go unnoticed.
            raise UncountedTokens(f"{first + num_tokens} tokens of {slot} answered, {self.counts.get(slot, 0)} counted")
        starts = [0, *(counts.get(slot, 0) for _, counts in self.marks)]
        versions = [self.version, *(version for version, _ in self.marks)]
        # Of marks at the same token, the last one holds: nothing was computed in between.
        return [versions[bisect_right(starts, position) - 1] for position in range(first, first + num_tokens)]


class VersionLedger:
    """The version that serves, and the tokens of the requests that are under way."""

    def __init__(self) -> None:
        self.version = 0
        self.adapters: dict[str, int | None] = {}  # versions of their own; None: that of the weights below
        self._tracked: dict[str, TrackedRequest] = {}
        self._places: dict[str, tuple[TrackedRequest, Slot]] = {}  # by the engine's request id

    def open(self, request_id: str, model: str | None = None) -> TrackedRequest:
        """`model`: what the request asks for; an adapter, if it is the name of one."""
        adapter = model if model in self.adapters else None
        tracked = self._tracked[request_id] = TrackedRequest(self._version_of(adapter), adapter)
        return tracked

    def close(self, request_id: str) -> None:
        for engine_id in self._tracked.pop(request_id).engine_ids:
            del self._places[engine_id]

    def mark(self, version: int) -> None:
        """From here on tokens are made by `version`. The engines must be paused."""
        self.version = version
        for tracked in self._tracked.values():
            tracked.marks.append((self._version_of(tracked.adapter), dict(tracked.counts)))

    def mark_adapter(self, name: str, version: int | None) -> None:
        """The same for the tokens of one adapter, which may be new."""
        self.adapters[name] = version
        for tracked in self._tracked.values():
            if tracked.adapter == name:
                tracked.marks.append((self._version_of(name), dict(tracked.counts)))

    def _version_of(self, adapter: str | None) -> int:
        own = None if adapter is None else self.adapters.get(adapter)
        return self.version if own is None else own

    def count(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            if output.new_token_ids and (place := self._place(output.request_id)) is not None:
                tracked, slot = place
                tracked.counts[slot] = tracked.counts.get(slot, 0) + len(output.new_token_ids)

    def _place(self, engine_id: str) -> tuple[TrackedRequest, Slot] | None:
        """Where to count; None for requests that are not tracked, or no longer."""
        known = self._places.get(engine_id)
        if known is not None:
            return known
        place = place_of(engine_id)
        tracked = self._tracked.get(place[0]) if place else None
        if place is None or tracked is None:
            return None
        tracked.engine_ids.append(engine_id)
        self._places[engine_id] = tracked, place[1]
        return self._places[engine_id]


def place_of(engine_id: str) -> tuple[str, Slot] | None:
    """Our request id, and which prompt and sample of it; None for requests that are not ours."""
    match = ENGINE_ID.fullmatch(engine_id)
    if match is None:
        return None
    return match["id"], (int(match["prompt"] or 0), int(match["child"] or 0))


def listen(queue: Any, on_outputs: Callable[[Iterable[EngineOutput]], None]) -> None:
    """Look at everything put into the queue of engine outputs, at the moment it is put there.

    That is earlier than vLLM's own processing of it, and in one order with the answers of pause and resume.
    """
    put = queue.put_nowait

    def put_nowait(item: Any) -> None:
        on_outputs(getattr(item, "outputs", ()))
        put(item)

    queue.put_nowait = put_nowait
