"""What a test has called off goes on for a moment."""

import asyncio
from typing import Any


async def until_alone(*others: "asyncio.Task[Any]") -> None:
    """Until no task but these is there. TimeoutError where one stays."""
    async with asyncio.timeout(20):
        while asyncio.all_tasks() - {asyncio.current_task(), *others}:
            await asyncio.sleep(0)
