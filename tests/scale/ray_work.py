"""Work functions that the tests of `Cluster` name."""

import os
import time
from typing import Any

from tandem.python.workers import Channel


def echo(handle: Channel, rank: int, world_size: int) -> None:
    """Answers what it is asked, with who it is; some messages are commands."""
    while True:
        message: Any = handle.recv()
        match message:
            case {"die": code}:
                os._exit(code)
            case {"raise": text}:
                raise ValueError(text)
            case {"sleep": seconds}:
                time.sleep(seconds)
                handle.send({"slept": seconds})
            case {"all_reduce": value}:
                handle.send({"sum": all_reduce(value)})
            case _:
                handle.send({"rank": rank, "world_size": world_size, "pid": os.getpid(), "echo": message})


def all_reduce(value: float) -> float:
    """Over all workers, which find each other by what `Cluster` has set."""
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()
