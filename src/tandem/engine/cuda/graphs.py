"""The CUDA graphs of an engine's steps: which there are, and how one is captured. Replaying is `runner.py`'s.

A graph replays fixed shapes on fixed buffers, so rows, or tokens of prompts, are rounded up to a bucket.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tandem.engine.cuda.draw import DrawnOnDevice
from tandem.models.memory_estimate import MOST_GRAPH_TOKENS

# Fewer tokens take as long as the first; those of prompts that take long are rounded up by less.
PREFILL_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, MOST_GRAPH_TOKENS)
PREFILL_TOKENS_PER_ROW = 8  # at least


class GraphKey(NamedTuple):
    kind: Literal["decode", "shared", "prefill"]  # shared: decoding rows, some of which share prompts
    size: int  # rows, or tokens of prompts
    place: int = 0  # of the weights of the adapter that all rows go through (`AdapterBank.places`); 0: of none


@dataclass(frozen=True)
class StepGraph:
    graph: torch.cuda.CUDAGraph
    drawn: DrawnOnDevice | None  # None: of prompts
    words: Tensor  # what the step is told


class StepGraphs:
    """All graphs of one runner; they take turns in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[GraphKey, StepGraph] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[GraphKey]:
        return iter(self._graphs)

    def __getitem__(self, key: GraphKey) -> StepGraph:
        return self._graphs[key]

    def keep(self, places: set[int]) -> None:
        """Drop the graphs of adapters that lie at none of these places any more."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if key.place in places}

    def capture(self, key: GraphKey, words: Tensor, compute: Callable[[], DrawnOnDevice | None]) -> None:
        """`words`: what `compute` reads, and what each replay is told."""
        self._graphs[key] = StepGraph(*self._record(compute), words)

    def _record(self, compute: Callable[[], DrawnOnDevice | None]) -> tuple[torch.cuda.CUDAGraph, DrawnOnDevice | None]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            compute()  # GEMMs choose their plans before the graph is captured
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        memory = next((known.graph.pool() for known in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            drawn = compute()
        return graph, drawn


def buckets(num_slots: int) -> list[int]:
    """Numbers of rows that graphs are captured for: doublings, and from 64 on their halves between."""
    sizes = [1]
    while sizes[-1] < num_slots:
        size = sizes[-1]
        power = 1 << (size.bit_length() - 1)
        sizes.append(size + power // 2 if size >= 64 else size * 2)
    return sizes


def prefill_buckets(most: int) -> list[int]:
    """Numbers of tokens of prompts that graphs are captured for, up to `most`."""
    return [size for size in PREFILL_BUCKETS if size <= most]


def find_prefill_bucket(most: int, num_rows: int, num_tokens: int) -> int | None:
    """The smallest that holds these prompts; None: none does."""
    needed = max(num_tokens, num_rows * PREFILL_TOKENS_PER_ROW)
    return next((size for size in prefill_buckets(most) if size >= needed), None)


def graph_keys(prefill_tokens: int, num_slots: int, may_share: Callable[[int], bool]) -> Iterator[GraphKey]:
    """Of all graphs without an adapter, the largest first: the others find room in its memory."""
    for size in reversed(prefill_buckets(prefill_tokens)):
        yield GraphKey("prefill", size)
    for size in reversed(buckets(num_slots)):
        if may_share(size):
            yield GraphKey("shared", size)
        yield GraphKey("decode", size)
