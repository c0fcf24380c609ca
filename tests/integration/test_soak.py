"""Hundreds of clients at once, a third of whom leave when they like: nothing is leaked, nobody is left waiting."""

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
from tests.integration.processes import Starter
from tests.integration.servers import wait_until_healthy
from tests.patience import PATIENCE
from tests.ports import free_port

NUM_CLIENTS = 500
NUM_ROUNDS = 4
MAX_GROWTH_BYTES = 16 << 20  # of resident memory from the second round on; every round has the same work
IDLE = {
    "tandem_sequences_running": 0,
    "tandem_sequences_waiting": 0,
    "tandem_cache_usage_ratio": 0,
    "tandem_http_requests_open": 1,  # the one that asks
}


def make_body(dice: random.Random) -> dict[str, Any]:
    shared = "what many prompts begin with, and the cache may keep: " if dice.random() < 0.5 else ""
    body: dict[str, Any] = {
        "prompt": shared + "".join(dice.choices("abcdefgh", k=dice.randint(1, 40))),
        "n": dice.choice([1, 1, 2, 4]),
        "max_tokens": dice.randint(1, 24),
        "ignore_eos": True,
        "stream": dice.random() < 0.5,
    }
    if dice.random() < 0.3:
        body["stop"] = [dice.choice("xyz"), "ab"]
    if dice.random() < 0.3:
        body |= {"logprobs": 2, "top_p": 0.9, "repetition_penalty": 1.1, "return_token_ids": True}
    return body


async def ask(http: aiohttp.ClientSession, seed: int) -> bool:
    """One client; whether it stayed to the end. What it then has is a whole answer."""
    dice = random.Random(seed)
    body = make_body(dice)
    patience_s = dice.uniform(0, 1.5) if dice.random() < 1 / 3 else None
    try:
        async with asyncio.timeout(patience_s), http.post("/v1/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
    except TimeoutError:
        return False
    if body["stream"]:
        assert text.endswith("data: [DONE]\n\n") and "error" not in text
        assert text.count('"finish_reason":"') == body["n"]
    else:
        assert text.count('"finish_reason":"') == body["n"]
    return True


async def numbers(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def wait_until_idle(http: aiohttp.ClientSession) -> dict[str, float]:
    found: dict[str, float] = {}
    for _ in range(int(200 * PATIENCE)):
        found = await numbers(http)
        if all(found[name] == value for name, value in IDLE.items()):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError({name: found.get(name) for name in IDLE})


async def soak(base_url: str) -> list[float]:
    """Resident memory after each round."""
    resident = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300 * PATIENCE)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as http:
        for round_number in range(NUM_ROUNDS):
            seeds = range(round_number * NUM_CLIENTS, (round_number + 1) * NUM_CLIENTS)
            stayed = await asyncio.gather(*(ask(http, seed) for seed in seeds))
            assert NUM_CLIENTS / 2 < sum(stayed) < NUM_CLIENTS - NUM_CLIENTS / 20, "some should leave, most should stay"
            found = await wait_until_idle(http)
            resident.append(found["process_resident_memory_bytes"])
        async with http.get("/health") as answer:
            assert answer.status == 200, await answer.text()
    return resident


def test_clients_that_come_and_go(tiny_model: Path, starter: Starter) -> None:
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    process = starter.start(
        "inference",
        *("--model.name", str(tiny_model), "--port", str(port), "--seq-len", "128", "--threads", "1"),
        # Less room than the sequences would take, so that some are set back.
        *("--max-sequences", "128", "--kv-cache-tokens", "3072", "--check-invariants"),
    )
    wait_until_healthy(process, base_url)
    resident = asyncio.run(soak(base_url))
    process.terminate()
    output, _ = process.communicate(timeout=30 * PATIENCE)
    assert process.returncode == 0 and "ERROR" not in output and "WARNING" not in output, output
    growth_bytes = max(resident[2:]) - resident[1]
    assert growth_bytes < MAX_GROWTH_BYTES, [f"{size / 2**20:.1f} MiB" for size in resident]
