"""A process that computes rewards, one at a time: `python -m tandem.rewards.pool_worker`, started by rewards/pool.py.

reads    {"rewards": [the table of each], "path": …}              once
         {"reward": 2, "arguments": {"completion": …, …}}
writes   {"ready": true}                                          once
         {"value": 0.5} | {"error": "ValueError: … (my_rewards.py:12)"}
"""

import asyncio
import inspect
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import orjson
from pydantic import TypeAdapter

from tandem.config.rewards import AnyReward
from tandem.rewards.calls import Call
from tandem.rewards.checked import checked_reward
from tandem.rewards.registry import make_call
from tandem.utils.log import PrintableStream, make_errors_printable, write_what_the_terminal_can
from tandem.utils.places import one_line, own_place


def compute(find: Callable[[int], Call], number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        value = find(number)(arguments)
        if inspect.isawaitable(value):  # a plain function that returns a coroutine
            value = asyncio.run(_awaited(value))
        return {"value": checked_reward(value)}
    except BaseException as error:  # SystemExit, too, costs this call alone
        return {"error": one_line(error), "where": own_place(error)}


async def _awaited(value: Any) -> Any:
    return await value


def main() -> None:
    write_what_the_terminal_can(PrintableStream)
    make_errors_printable()
    connection = int(sys.argv[1])
    # They reach every process of a run; the orchestrator decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with socket.socket(fileno=connection) as channel, channel.makefile("rb") as lines:
        request = orjson.loads(next(lines))
        sys.path[:] = request["path"]
        configs = TypeAdapter(list[AnyReward]).validate_python(request["rewards"])
        find = cache(lambda number: make_call(configs[number]))  # what is never asked for is never made
        channel.sendall(b'{"ready": true}\n')
        for line in lines:
            asked = orjson.loads(line)
            channel.sendall(orjson.dumps(compute(find, asked["reward"], asked["arguments"])) + b"\n")
    os._exit(0)  # threads that users' code left behind do not hold this up


if __name__ == "__main__":
    main()
