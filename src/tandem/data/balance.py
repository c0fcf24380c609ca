"""Balancing work over ranks, and filling bins of bounded size."""

import heapq
from collections.abc import Sequence


def balance(costs: Sequence[float], world_size: int) -> list[list[int]]:
    """Indices of the items each rank gets: the most expensive first, always to the rank with the least load."""
    loads = [(0.0, rank) for rank in range(world_size)]
    members: list[list[int]] = [[] for _ in range(world_size)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(loads)
        members[rank].append(item)
        heapq.heappush(loads, (load + costs[item], rank))
    return members


def fill(items: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Few bins, found cheaply: the largest item first, each into the first bin that has room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(items, key=lambda item: (-sizes[item], item)):
        index = next((i for i, free in enumerate(room) if free >= sizes[item]), None)
        if index is None:
            bins.append([])
            room.append(capacity)
            index = len(bins) - 1
        bins[index].append(item)
        room[index] -= sizes[item]
    return bins
