"""Inference engines as Python objects: each is an inference server on a GPU of its own, and a client of it.

The server is the one that `inference` starts. It is a process of its own, so an engine neither shares the interpreter
with training nor brings it down.
"""

import asyncio
import math
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from tandem.config.client import ClientConfig
from tandem.config.explain import explain_validation_error
from tandem.config.inference import InferenceConfig
from tandem.data.tokenizer import Tokenizer
from tandem.launch.local.server import ServerProcess
from tandem.orchestrator.claim import RunClaim
from tandem.orchestrator.client import InferenceClient, InferenceError, InstanceChanged, ServerLost
from tandem.python.gpus import gpu_environment
from tandem.python.pool import Job, SamplerGone
from tandem.types.rollout import Completion, Message, SamplingRequest
from tandem.utils.errors import UserError
from tandem.utils.http import HttpClient
from tandem.utils.hub import fetch_model, is_to_be_fetched
from tandem.weights.versions import is_adapter

SLOTS = 64  # prompts under way in one engine
OUTAGE_S = 60.0
KEY_VARIABLE = "TANDEM_ENGINE_KEY"
LEASE_FILE = "server_lease.txt"


class InferenceEngine:
    """What all engines have; use one of the classes below.

    `gpu_id` or `gpu_ids`: the GPUs it runs on, counted among the visible ones; neither: all, or the CPU. `base_url`: a
    running server (`inference …`), on another node for instance, instead of one of its own; `api_key` is its key.
    `options` are those of the `[inference]` section: `seq_len=512`, `model={"dtype": "bfloat16"}`.

    Use it as `async with engine:`, or call `start` and `close`; `run_rl_training` does both.
    """

    engine = "native"

    def __init__(
        self,
        model_name: str | Path,
        gpu_id: int | None = None,
        *,
        gpu_ids: Sequence[int] | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        if gpu_id is not None:
            if gpu_ids is not None:
                raise UserError(f"gpu_id = {gpu_id} and gpu_ids = {list(gpu_ids)} are both given; give one of them")
            gpu_ids = [gpu_id]
        self.gpu_ids = gpu_ids
        key = api_key if api_key is not None or base_url is not None else secrets.token_hex(16)
        self._environment = gpu_environment(gpu_ids, "gpu_ids") | ({} if key is None else {KEY_VARIABLE: key})
        model = {"name": str(model_name), **options.pop("model", {})}
        self._options = {"engine": self.engine, "model": model, **self._with_gpu(options)}
        try:
            self.config = InferenceConfig.model_validate(self._options)
            self._client_config = ClientConfig.model_validate(
                {"base_url": base_url or "http://127.0.0.1", "api_key": key, "outage_timeout_s": OUTAGE_S}
            )
        except ValidationError as error:
            raise UserError(f"{type(self).__name__}: {explain_validation_error(InferenceConfig, error)}") from error
        self.base_url = None if base_url is None else self._client_config.base_urls[0]
        self.slots = SLOTS
        self._server: ServerProcess | None = None
        self._client: InferenceClient | None = None
        self._folder: Path | None = None
        self._own_folder: Path | None = None  # deleted with the engine
        self._served: tuple[Path, int] = (self.model_dir, 0)

    @property
    def name(self) -> str:
        where = "" if self.gpu_ids is None else f" on GPU {', '.join(map(str, self.gpu_ids))}"
        return f"{type(self).__name__}{where}" if self.base_url is None else f"the server at {self.base_url}"

    @property
    def model_dir(self) -> Path:
        return self.config.model.name

    @property
    def is_started(self) -> bool:
        return self._client is not None

    async def start(self, folder: Path | None = None, weight_roots: Sequence[Path] = ()) -> None:
        """Returns when the engine serves its model. Its log goes to `folder`; weights will come from below
        `weight_roots`, which a server that was started by others has to allow."""
        if is_to_be_fetched(self.model_dir):
            await asyncio.to_thread(fetch_model, self.model_dir)
            self.config = InferenceConfig.model_validate(self._options)  # its name leads to the cache now
            self._served = (self.model_dir, 0)
        if folder is None:
            folder = self._own_folder = Path(tempfile.mkdtemp(prefix="tandem-engine-"))
        self._folder = folder
        self._roots = [str(root.resolve()) for root in weight_roots]
        try:
            await self._open()
        except BaseException:  # cleans up
            await self.close()
            raise

    async def close(self) -> None:
        if self._client is not None:
            if self.base_url is not None:
                await self._client.release()
            await self._client.close()
        if self._server is not None:
            await self._server.stop()
        self._client = self._server = None
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompts: Sequence[str | list[Message]],
        n: int = 1,
        *,
        max_tokens: int = 128,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[list[str]]:
        """`n` completions of each prompt as text: a text is what the user says, a list is a whole conversation."""
        if isinstance(prompts, str):
            raise UserError(f"prompts = {prompts!r} is one text; give a list of prompts: [{prompts!r}]")
        if not math.isfinite(temperature):
            raise UserError(f"temperature = {temperature} is not finite; 0 takes the likeliest token, 100 is the most")
        tokenizer = Tokenizer.of(self.config.model)
        loop = asyncio.get_running_loop()
        jobs = []
        for number, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = tokenizer.encode_chat(messages, add_generation_prompt=True)
            jobs.append(Job(ids, SamplingRequest(n, max_tokens, temperature, seed + number), loop.create_future()))
        return [[tokenizer.decode(one.token_ids) for one in found] for found in await self.sample(jobs)]

    async def update_weights(self, path: str | Path, version: int) -> None:
        """Serve the model, or the LoRA adapter, in this directory. Running requests go on under the new weights."""
        await self.load(Path(path), version)

    async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
        """Completions with tokens, log-probs and versions; see `generate` for text."""
        return await asyncio.gather(*(self._ask(job) for job in jobs))

    async def load(self, path: Path, version: int) -> None:
        await self._guarded(self._load(path, version))
        self._served = (path, version)

    async def revive(self) -> bool:
        """Start its server again."""
        await self.close()
        try:
            await self._open()
        except UserError as error:
            raise SamplerGone(f"{self.name}: {error}") from error
        return True

    def _with_gpu(self, options: dict[str, Any]) -> dict[str, Any]:
        """Without a GPU it would compute on the CPU, where one was asked for."""
        return options if self.gpu_ids is None else {"device": "cuda"} | options

    async def _open(self) -> None:
        assert self._folder is not None
        url = self.base_url
        if url is None:
            self._server = ServerProcess(await self._server_config(), self._folder, self._environment)
            url = self._server.url
            http = HttpClient(url, timeout_s=600)
            try:
                await self._server.wait_until_well(http, self._check_processes)
            finally:
                await http.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        key_file = self._folder / LEASE_FILE
        claim = RunClaim.of(self._folder, key_file)
        claim.keep(key_file)
        self._client = InferenceClient(self._client_config, claim, url)
        self._client.on_trouble = self._check
        await self._client.wait_until_ready()
        if self.base_url is not None:
            await self._check_access()
        await self._guarded(self._load(self.model_dir, 0))

    async def _check_access(self) -> None:
        """One that others have started may not know our run directory, or another run holds it."""
        try:
            await self._running.meet()
            await self._running.take()
            for root in self._roots:
                await self._running.check_root(Path(root))
        except InferenceError as error:
            raise UserError(f"{self.name} refuses this run: {error}") from error

    async def _server_config(self) -> dict[str, Any]:
        """Nobody but us has its key, so it may load weights from wherever we say."""
        config = self.config.model_dump(mode="json", exclude_unset=True)
        return config | {"server": config.get("server", {}) | {"weight_roots": ["/"], "api_key_var": KEY_VARIABLE}}

    async def _ask(self, job: Job) -> list[Completion]:
        while True:
            try:
                return await self._guarded(self._running.generate(job.prompt_ids, job.sampling))
            except InstanceChanged:  # started again by others: it has forgotten its weights
                await self.load(*self._served)

    async def _load(self, path: Path, version: int) -> None:
        client = self._running
        if client.instance is None:
            await client.meet()
        if is_adapter(path):
            await client.load_adapter(path, version)
        else:
            await client.update_weights(path, version)
        client.adopt()

    async def _guarded(self, work: Any) -> Any:
        try:
            return await work
        except ServerLost as error:
            raise SamplerGone(f"{self.name}: {error}") from error

    @property
    def _running(self) -> InferenceClient:
        if self._client is None:
            raise SamplerGone(f"{self.name} is not started; use it as `async with engine:`")
        return self._client

    def _check(self) -> None:
        try:
            self._check_processes()
        except UserError as error:
            raise SamplerGone(f"{self.name}: {error}") from error

    def _check_processes(self) -> None:
        """UserError with the last lines of one that has ended."""
        if self._server is not None:
            self._server.check("ended")


class NativeEngine(InferenceEngine):
    """Our own engine in PyTorch: CPU and GPU, nothing else to install."""


class VLLMEngine(InferenceEngine):
    """vLLM's server. `flags` are vLLM's own: `VLLMEngine(model, gpu_ids=[0, 1], flags={"tensor-parallel-size": 2})`;
    `python` is that of the environment that vLLM is installed in, if it is another one."""

    engine = "vllm"

    def __init__(
        self,
        model_name: str | Path,
        gpu_id: int | None = None,
        *,
        flags: Mapping[str, Any] | None = None,
        python: str | Path | None = None,
        **options: Any,
    ) -> None:
        vllm = {"flags": dict(flags or {}), "python": None if python is None else str(python)}
        super().__init__(model_name, gpu_id, vllm=vllm, **options)

    def _with_gpu(self, options: dict[str, Any]) -> dict[str, Any]:
        return options  # vLLM computes on what it was built for
