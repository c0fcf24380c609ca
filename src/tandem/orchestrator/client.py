"""Client of the inference server: token ids in, tokens with log-probs and versions out.

Failed requests are sent again once the server is healthy; what the server refuses is raised with its reason. Every
answer says who gave it (types/identity). It is used only if it comes from the process that the run's weights were
loaded into, and only from those weights.

    answer ─► another instance            InstanceChanged: weight_sync.py loads the weights again
          └─► weights of another run      ServerLost: the run ends

Before weights are loaded the server is claimed, and again and again after that, so that no other run loads its own.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tandem.config.client import ClientConfig
from tandem.orchestrator.claim import Hold, RunClaim
from tandem.orchestrator.concurrency import NO_LOAD, EngineLoad, parse_load
from tandem.types.identity import ServerIdentity, describe_run
from tandem.types.rollout import Completion, Kept, SamplingRequest, require_drawn, require_logprobs
from tandem.utils.errors import UserError
from tandem.utils.http import BUSY, OK, RETRY_STATUS, HttpClient, Reply, RequestFailed, Unreachable
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)
ADAPTER = "tandem-policy"  # what the server calls the adapter that is trained
BIASED = "with top_p, top_k or min_p the gradient is biased (docs/algorithms.md, Sampling)"
HEALTH_TIMEOUT_S = 5
POLL_S = 0.05


class InferenceError(RuntimeError):
    """The server refused a request, or could not answer it."""


class InstanceChanged(Exception):
    """The server was started again: what answers has not been given the weights of this run."""


class ServerLost(RuntimeError):
    """The run cannot go on with its server: it stays away, or another run has taken it."""


class ServerGone(ServerLost):
    """It stays away."""


class InferenceClient:
    """Made inside a running event loop, closed by whoever made it. `claim` is what the server is told of the run.
    `on_trouble` is called whenever the server is found not to be well.

    A server is met, given weights and then adopted: only an adopted one is asked for completions."""

    def __init__(self, config: ClientConfig, claim: RunClaim, base_url: str) -> None:
        self.config = config
        self.run = claim.name
        self.on_trouble: Callable[[], None] = lambda: None
        self._http = HttpClient(base_url, config.resolve_api_key(), timeout_s=config.timeout_s)
        self.base_url = self._http.base_url
        self.model: dict[str, str] = {}  # what requests ask for; nothing: the model that is served
        self.instance: str | None = None  # that serves the weights of this run
        self._met: str | None = None  # that is given weights
        self._owned: str | None = None  # that has weights of this run
        self._versions: set[int] = set()  # that it has been given
        self._hold = Hold(self._http, claim)
        self._open: dict[asyncio.Timeout, str | None] = {}  # requests, by the instance each is meant for
        self._looking = asyncio.Lock()
        self._warned_of_bias = False
        self._seen = (-math.inf, "")  # when a server was last well, and which

    async def close(self) -> None:
        self._hold.end()
        await self._http.close()

    @property
    def is_busy(self) -> bool:
        """Whether it was asked for something that has not come."""
        return bool(self._open)

    async def release(self) -> None:
        await self._hold.release()

    async def wait_until_ready(self) -> None:
        deadline = Deadline(
            what=f"the inference server at {self.base_url}",
            timeout_s=self.config.startup_timeout_s,
            hint=f"is it running, and is client.{self.config.told(self.base_url)} right? see logs/inference.log",
        )
        await self._look_until_well(deadline)

    async def is_well(self) -> bool:
        return await self._look() is not None

    async def read_load(self) -> EngineLoad | None:
        """What /metrics say; None where there are none."""
        try:
            reply = await self._http.send("GET", "/metrics", timeout_s=HEALTH_TIMEOUT_S)
        except Unreachable:
            return NO_LOAD
        if reply.status >= 500:
            return NO_LOAD
        return parse_load(reply.body.decode(errors="replace")) if reply.status == OK else None

    async def meet(self) -> None:
        """Turn to the server that answers now, whichever it is. Whose weights it has is of no concern yet."""
        self._met = await self._until_well("it was started again and is not well")
        self._versions.clear()

    def adopt(self) -> None:
        """The server that was met has all it needs: completions come from it."""
        self.instance = self._met

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        """`sampling.n` completions of one prompt. Everything is said: no default of the server or of the model's
        generation_config.json takes its place."""
        body = {
            "prompt": prompt_ids,
            "n": sampling.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
            "detokenize": False,  # token ids are all that is read; vLLM passes over it
            **vars(sampling.options),
        } | self.model
        asks_kept = sampling.is_trained_on and sampling.options.truncates
        if asks_kept:
            body["return_kept_token_ids"] = True  # engines that do not know it leave them out
        answer = await self._post("/v1/completions", body, self.instance)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        completions = [_completion(choice) for choice in choices]
        self._check_versions(completions)
        if asks_kept and not self._warned_of_bias and any(completion.kept is None for completion in completions):
            self._warned_of_bias = True
            logger.warning("%s does not report which tokens were kept: %s", self.base_url, BIASED)
        return completions

    async def update_weights(self, path: Path, version: int) -> None:
        body = {"path": str(path.resolve()), "version": version, "mode": self.config.update_mode}
        await self._load("/update_weights", body)
        self.model = {}

    async def check_root(self, folder: Path) -> None:
        """Raises InferenceError unless the server takes our key, and weights from below this folder."""
        await self.meet()
        body = {"path": str(folder.resolve()), "version": 0, "check_only": True}
        await self._post("/update_weights", body, self._met)

    async def take(self, *, check_only: bool = False) -> None:
        """Hold the server that was met, from here on; `check_only`: see whether that is possible. Raises InferenceError
        while another run holds it."""
        if self._hold.instance == self._met:
            return
        await self._post("/claim", self._hold.body | {"check_only": check_only}, self._met)
        if not check_only:
            self._hold.begin(self._met)

    async def check_access(self, folder: Path, section: str = "client", *, check_only: bool = False) -> None:
        """Both, as an error of the user's; `section` is where the address of the server was given."""
        while True:
            try:
                await self.check_root(folder)
                return await self.take(check_only=check_only)
            except InstanceChanged:
                pass  # whoever answers now is asked
            except InferenceError as error:
                key = f"; give its key with --{section}.api-key-var" if " 401: " in str(error) else ""
                raise UserError(
                    f"{section}.{self.config.told(self.base_url)}: the server there refuses this run: {error}{key}"
                ) from None

    async def load_adapter(self, path: Path, version: int) -> None:
        """Have a LoRA adapter serve in place of the one before; completions come from it from here on."""
        body = {
            "lora_name": ADAPTER,
            "lora_path": str(path.resolve()),
            "load_inplace": True,
            "version": version,
            "mode": self.config.update_mode,
        }
        await self._load("/load_lora_adapter", body)
        self.model = {"model": ADAPTER}

    async def _load(self, route: str, body: dict[str, Any]) -> None:
        await self.take()
        self._versions.add(body["version"])  # before: tokens of it may arrive before the answer does
        await self._post(route, body | {"run": self.run}, self._met)
        self._owned = self._met

    async def _post(self, route: str, body: dict[str, Any], instance: str | None) -> dict[str, Any]:
        """The answer of `instance`. Sent again after what was no fault of the request."""
        send_again = partial(self._send_again, route, instance)
        until_gone = asyncio.timeout(None)  # which `_look` ends
        try:
            async with until_gone:
                self._open[until_gone] = instance
                reply = await self._http.post(route, body, self.config.retries, send_again)
        except RequestFailed as error:
            raise InferenceError(str(error)) from error
        except TimeoutError:
            raise self._changed(instance) from None
        finally:
            self._open.pop(until_gone, None)
        return orjson.loads(reply.body)

    async def _send_again(self, route: str, instance: str | None, reply: Reply | None, problem: str) -> bool:
        """Whether to send a request once more to `instance`, which is well by then."""
        if reply is not None:
            identity = ServerIdentity.from_headers(reply.headers)
            self._check(identity, reply.status, instance)
            if reply.status in (OK, BUSY):
                return True
            if reply.status not in RETRY_STATUS and (identity is not None or reply.status < 500):
                return False
        if not self._looking.locked():
            logger.warning("%s%s: %s", self.base_url, route, problem)
        if await self._until_well(problem) != instance:
            raise self._changed(instance)
        return True

    def _check(self, identity: ServerIdentity | None, status: int, instance: str | None) -> None:
        """Whether an answer is from whom the request was meant for, and only from weights of this run."""
        if identity is None:
            if status == OK:
                raise self._nameless()
            return  # something on the way has answered in its place
        if identity.instance != instance:
            raise self._changed(instance)
        others = [run for run in identity.runs if run != self.run]
        if others and instance == self._owned:
            raise ServerLost(
                f"the weights of this run ({self.run}) at {self.base_url} have been replaced by "
                f"{describe_run(others[-1])}; give every run its own server (client.base_url), then resume with "
                "--resume"
            )

    def _changed(self, instance: str | None) -> InstanceChanged:
        if self.instance == instance:
            self.instance = None
        return InstanceChanged(f"another server than {instance} answers at {self.base_url}")

    def _check_versions(self, completions: list[Completion]) -> None:
        unknown = set().union(*(completion.versions for completion in completions)) - self._versions
        if unknown:
            raise ServerLost(
                f"{self.base_url} returned tokens of version {min(unknown)}, which this run ({self.run}) has not "
                "loaded into it"
            )

    def _nameless(self) -> ServerLost:
        return ServerLost(f"{self.base_url} does not say which server it is; is it one of our inference servers?")

    async def _until_well(self, problem: str) -> str:
        """The instance that is well now. Of many requests that have met a problem at once, one looks."""
        since = time.monotonic()
        deadline = Deadline(
            what=f"the inference server at {self.base_url}",
            timeout_s=self.config.outage_timeout_s,
            hint=f"it was lost with: {problem}; start it again, then use --resume",
        )
        async with self._looking:
            if self._seen[0] < since:
                try:
                    await self._look_until_well(deadline)
                except TimeoutError as error:
                    raise ServerGone(str(error)) from error
            return self._seen[1]

    async def _look_until_well(self, deadline: Deadline) -> None:
        while (instance := await self._look()) is None:
            self.on_trouble()
            deadline.check()
            await asyncio.sleep(POLL_S)
        self._seen = (time.monotonic(), instance)

    async def _look(self) -> str | None:
        """The instance that answers, if it is well."""
        try:
            reply = await self._http.send("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except Unreachable:
            return None
        if reply.status != OK:
            return None
        identity = ServerIdentity.from_headers(reply.headers)
        if identity is None:
            raise self._nameless()
        self._end_requests_to_others(identity.instance)
        return identity.instance

    def _end_requests_to_others(self, instance: str) -> None:
        """A machine that lost its power closes no connection: nothing else may tell that no answer will come."""
        if self.instance not in (None, instance):
            self._changed(self.instance)
        for until_gone, meant_for in list(self._open.items()):
            if meant_for != instance:
                del self._open[until_gone]
                until_gone.reschedule(asyncio.get_running_loop().time())


def _completion(choice: dict[str, Any]) -> Completion:
    logprobs = choice["logprobs"]["token_logprobs"]
    kept = Kept(choice["kept_token_ids"], choice["kept_logprobs"]) if "kept_token_ids" in choice else None
    try:
        if kept is not None:
            require_drawn(choice["token_ids"], kept, f"completion {choice['index']} of the server")
        for given in (logprobs,) if kept is None else (logprobs, kept.logprobs):
            require_logprobs(given, f"completion {choice['index']} of the server")
    except ValueError as error:
        raise InferenceError(str(error)) from error
    return Completion(
        token_ids=choice["token_ids"],
        logprobs=logprobs,
        versions=choice["weight_versions"],
        finish_reason=choice["finish_reason"],
        stop=reason if isinstance(reason := choice.get("stop_reason"), str) else None,
        kept=kept,
    )
