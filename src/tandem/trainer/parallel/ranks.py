"""The processes that train one model together, as one of them sees it.

`torchrun` starts them and sets rank and world size; without it the world size is 1. Each rank reports what it is doing
to the rendezvous store, so that a rank that times out can name the one it waited for.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from tandem.config.shared import Device
from tandem.models.runtime import choose_device
from tandem.trainer.parallel.interface import choose_interface
from tandem.utils.errors import UserError


class RankLost(RuntimeError):
    """Another rank died or does not answer."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    size: int
    device: torch.device
    store: Store | None = None

    @classmethod
    def single(cls, device: torch.device) -> "Ranks":
        return cls(0, 1, device)

    @property
    def is_first(self) -> bool:
        """The one that writes what is there once: logs, weights, metrics."""
        return self.rank == 0

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def all_max(self, values: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def report(self, step: int, phase: str) -> None:
        """Say what this rank is about to do, for those who may have to wait for it."""
        if self.store is not None:
            entry = {"step": step, "phase": phase, "time": time.time(), "host": socket.gethostname()}
            self.store.set(f"rank_{self.rank}", json.dumps(entry))

    def explain(self, error: BaseException) -> str:
        """Who is behind, by what each rank said last."""
        assert self.store is not None
        reports: dict[int, dict[str, object]] = {}
        try:
            for rank in range(self.size):
                if self.store.check([f"rank_{rank}"]):
                    reports[rank] = json.loads(self.store.get(f"rank_{rank}"))
        except (RuntimeError, ValueError):
            return f"rank {self.rank}: the rendezvous' host is gone ({_first_line(error)})"
        own = reports[self.rank]
        furthest = max((entry["step"] for entry in reports.values()), default=0)  # type: ignore[type-var]
        behind = [rank for rank in reports if rank != self.rank and reports[rank]["step"] != furthest]
        suspects = behind or sorted(set(range(self.size)) - {self.rank})
        who = "; ".join(_describe(rank, reports.get(rank)) for rank in suspects)
        return (
            f"rank {self.rank} waited in vain in step {own['step']} ({own['phase']}) for: {who}. "
            f"What was seen: {_first_line(error)}"
        )


def _describe(rank: int, report: dict[str, object] | None) -> str:
    if report is None:
        return f"rank {rank}, which never began"
    return f"rank {rank} on {report['host']}, last heard of in step {report['step']} ({report['phase']})"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@contextmanager
def joined(device: Device, timeout_s: float, *, group_for_one: bool = False) -> Iterator[Ranks]:
    """Meet the other ranks, and leave them in the end. `group_for_one`: a lone process needs a group as well."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 and not group_for_one:
        yield Ranks.single(choose_device(device))
        return
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device)
    if chosen.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"only {torch.cuda.device_count()} GPUs are visible; lower parallel.ranks (or --nproc-per-node) from "
                f"{os.environ['LOCAL_WORLD_SIZE']} to {torch.cuda.device_count()}"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if size == 1:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # pyright: ignore
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    else:
        choose_interface()
        dist.init_process_group(backend, timeout=timeout)
    store = PrefixStore("tandem", _get_default_store())
    ranks = Ranks(rank, size, chosen, store)
    ranks.report(0, "starting")
    try:
        yield ranks
    except RuntimeError as error:
        if isinstance(error, RankLost) or not _is_communication(error):
            raise
        raise RankLost(ranks.explain(error)) from error
    finally:
        dist.destroy_process_group()


def _is_communication(error: RuntimeError) -> bool:
    """Whether an error came from talking to other ranks; torch has no class of its own for gloo's."""
    words = ("gloo", "Connection", "Timed out", "NCCL", "Socket", "Broken pipe", "recv operation", "send operation")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
