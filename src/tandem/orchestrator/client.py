"""Client of the inference server: token ids in, tokens with log-probs and versions out.

Requests that fail on their way are sent again; what the server refuses is raised with its reason.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx

from tandem.config.orchestrator import ClientConfig
from tandem.types.rollout import Completion
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)
RETRY_STATUS = (429, 502, 503, 504)


class InferenceError(RuntimeError):
    """The server refused a request, or could not be reached."""


class InferenceClient:
    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        key = config.resolve_api_key()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(
            base_url=config.base_url,
            headers=headers,
            timeout=config.timeout_s,
            limits=limits,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

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
            return (await self._http.get("/health", timeout=5)).status_code == 200
        except httpx.TransportError:
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
        }
        answer = await self._post("/v1/completions", body)
        return [
            _completion(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    async def update_weights(self, path: Path, version: int) -> None:
        await self._post("/update_weights", {"path": str(path.resolve()), "version": version})

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        problem = ""
        for attempt in range(self.config.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 5))
            try:
                response = await self._http.post(route, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
                logger.warning("%s%s: %s (attempt %d)", self.config.base_url, route, problem, attempt + 1)
                continue
            if response.status_code == 200:
                return response.json()
            problem = f"{response.status_code}: {_reason(response)}"
            if response.status_code not in RETRY_STATUS:
                break
        raise InferenceError(f"{self.config.base_url}{route} failed: {problem}")


def _completion(choice: dict[str, Any]) -> Completion:
    return Completion(
        token_ids=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
        versions=choice["weight_versions"],
        finish_reason=choice["finish_reason"],
    )


def _reason(response: httpx.Response) -> str:
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
