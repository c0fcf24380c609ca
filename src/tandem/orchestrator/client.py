"""Client of the inference server: token ids in, tokens with log-probs and versions out.

Requests that fail on their way are sent again; what the server refuses is raised with its reason.
"""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from tandem.config.orchestrator import ClientConfig
from tandem.types.rollout import Completion, require_logprobs
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)
RETRY_STATUS = (429, 502, 503, 504)
ADAPTER = "tandem-policy"  # what the server calls the adapter that is trained


class InferenceError(RuntimeError):
    """The server refused a request, or could not be reached."""


class InferenceClient:
    """Made inside a running event loop, closed by whoever made it."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.base_url = config.base_url.rstrip("/")
        self.model: dict[str, str] = {}  # what requests ask for; nothing: the model that is served
        key = config.resolve_api_key()
        self._http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=config.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def close(self) -> None:
        await self._http.close()

    async def wait_until_ready(self) -> None:
        deadline = Deadline(
            what=f"the inference server at {self.config.base_url}",
            timeout_s=self.config.startup_timeout_s,
            hint="is it running, and is client.base_url right? see logs/inference.log",
        )
        while not await self._is_healthy():
            deadline.check()
            await asyncio.sleep(0.05)

    async def _is_healthy(self) -> bool:
        try:
            async with self._http.get(f"{self.base_url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def generate(
        self, prompt_ids: list[int], *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> list[Completion]:
        """`n` completions of one prompt."""
        body = {
            "prompt": prompt_ids,
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        } | self.model
        answer = await self._post("/v1/completions", body)
        return [_completion(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    async def update_weights(self, path: Path, version: int) -> None:
        body = {"path": str(path.resolve()), "version": version, "mode": self.config.update_mode}
        await self._post("/update_weights", body)
        self.model = {}

    async def load_adapter(self, path: Path, version: int) -> None:
        """Have a LoRA adapter serve in place of the one before; completions come from it from here on."""
        body = {
            "lora_name": ADAPTER,
            "lora_path": str(path.resolve()),
            "load_inplace": True,
            "version": version,
            "mode": self.config.update_mode,
        }
        await self._post("/load_lora_adapter", body)
        self.model = {"model": ADAPTER}

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        problem = ""
        for attempt in range(self.config.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 5))
            try:
                async with self._http.post(f"{self.base_url}{route}", json=body) as response:
                    if response.status == 200:
                        return orjson.loads(await response.read())
                    problem = f"{response.status}: {_reason(await response.text())}"
                    if response.status not in RETRY_STATUS:
                        break
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
                logger.warning("%s%s: %s (attempt %d)", self.base_url, route, problem, attempt + 1)
        raise InferenceError(f"{self.base_url}{route} failed: {problem}")


def _completion(choice: dict[str, Any]) -> Completion:
    logprobs = choice["logprobs"]["token_logprobs"]
    try:
        require_logprobs(logprobs, f"completion {choice['index']} of the server")
    except ValueError as error:
        raise InferenceError(str(error)) from error
    return Completion(
        token_ids=choice["token_ids"],
        logprobs=logprobs,
        versions=choice["weight_versions"],
        finish_reason=choice["finish_reason"],
    )


def _reason(body: str) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200]
