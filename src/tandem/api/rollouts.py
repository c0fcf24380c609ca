"""Rollouts for the Python API: prompts from a data buffer, completions from engines or workers, rewards."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tandem.api.data_buffer import DataBuffer
from tandem.api.engines import InferenceEngine
from tandem.api.pool import Job, Sampler, SamplerGone, SamplerPool
from tandem.api.rewards import RewardedTasks, Scorer
from tandem.data.tokenizer import Tokenizer
from tandem.launch.cluster import WorkerDied
from tandem.orchestrator.failures import TaskFailed
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.orchestrator.tasks import request_seed, sampling_options
from tandem.types.rollout import Completion, Group, SamplingRequest, Task
from tandem.utils.errors import UserError
from tandem.utils.run_dir import RunDir

if TYPE_CHECKING:
    from tandem.api.training import RLTrainingConfig


class RolloutManager:
    """`generate_batch(n)` gives `n` groups of scored rollouts. Every engine takes prompts as it has room for them; if
    one dies, what it had taken goes to the others and it is started again.

    `reward`: an object with `score(prompt, response)`, a function of completion and answer, or a name such as "math";
    left out, it is that of the environment the data buffer came from.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine] = (),
        data_buffer: DataBuffer | None = None,
        reward: Scorer | Callable[..., Any] | str | None = None,
        config: "RLTrainingConfig | None" = None,
    ) -> None:
        self.engines = list(engines)
        self.reward = reward
        self.config = config
        self._data_buffer = data_buffer
        self._order = 0  # of the next prompt
        self._pool: SamplerPool | None = None
        self._closing: list[InferenceEngine] = []

    @property
    def data_buffer(self) -> DataBuffer:
        if self._data_buffer is None:
            raise UserError("there is no data; give RolloutManager or run_rl_training a data_buffer")
        return self._data_buffer

    def join(
        self,
        engines: Sequence[InferenceEngine] = (),
        workers: "Sequence[Worker]" = (),
        data_buffer: DataBuffer | None = None,
    ) -> None:
        """What it does not know yet takes part as well."""
        if workers:
            raise UserError("inference_workers need a RemoteRolloutManager")
        self.engines += [engine for engine in engines if engine not in self.engines]
        self._data_buffer = self._data_buffer or data_buffer

    async def start(self, config: "RLTrainingConfig", model_dir: Path, run_dir: RunDir) -> None:
        """Returns when all that completes prompts is ready."""
        self.config = config
        tokenizer = Tokenizer(model_dir)
        self._tokenizer = tokenizer
        self._order = self.data_buffer.position
        scored = RewardedTasks(self.reward, self.data_buffer.environment, config.reward_timeout_s)
        self._pool = SamplerPool()
        self._maker = RolloutMaker(self._pool, scored, tokenizer, tries=1, record=lambda attempt: None)
        for sampler in await self._open_samplers(model_dir, run_dir):
            self._pool.add(sampler)

    async def generate_batch(self, num_prompts: int) -> list[Group]:
        """The next prompts of the data buffer, each with its rollouts and rewards. Any number will do."""
        tasks = self.data_buffer.sample(num_prompts)
        first, self._order = self._order, self._order + num_prompts
        making = [asyncio.ensure_future(self._make_group(task, first + number)) for number, task in enumerate(tasks)]
        try:
            return list(await asyncio.gather(*making))
        finally:
            for one in making:
                one.cancel()

    async def update_weights(self, path: Path, version: int) -> None:
        """All that completes prompts serves this version from here on."""
        assert self._pool is not None, "start comes first"
        await self._pool.load(path, version)

    async def close(self) -> None:
        """Engines that it has started end; what was started before goes on."""
        if self._pool is not None:
            await self._pool.close()
        for engine in self._closing:
            await engine.close()
        self._closing = []

    async def _open_samplers(self, model_dir: Path, run_dir: RunDir) -> Sequence[Sampler]:
        if not self.engines:
            raise UserError("there is nothing to generate with; give inference_engines, or inference_workers")
        self._closing = [engine for engine in self.engines if not engine.is_started]
        starting = [
            engine.start(run_dir.root / "logs" / f"engine_{self.engines.index(engine)}", [run_dir.root])
            for engine in self._closing
        ]
        await asyncio.gather(*starting)
        return self.engines

    async def _make_group(self, task: Task, order: int) -> Group:
        assert self.config is not None
        config = self.config
        request = SamplingRequest(
            n=config.group_size,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=request_seed(config.seed, "train", order),
            options=sampling_options(config, config.stop),
        )
        prompt = self._tokenizer.encode_chat(task.messages, add_generation_prompt=True)
        needed = len(prompt) + config.max_tokens
        if needed > config.seq_len:
            raise UserError(
                f"seq_len = {config.seq_len} is too short: task {task.index} has {len(prompt)} tokens, plus "
                f"max_tokens = {config.max_tokens}; the smallest that fits is {needed}"
            )
        try:
            return await self._maker.make_group(task, prompt, order, request)
        except TaskFailed as error:
            raise UserError(f"task {task.index} could not be scored: {error}") from error


class Worker(Protocol):
    """What RemoteRolloutManager asks of a worker; those of `Cluster.start` have it. See docs/python.md for what the
    messages are."""

    @property
    def name(self) -> str: ...

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for the answer. Raises WorkerDied."""
        ...

    def restart(self) -> bool:
        """After it died: whether it was started again."""
        ...


class RemoteRolloutManager(RolloutManager):
    """The same over workers on other nodes, which run `tandem.api.workers.inference` or a function of your own that
    answers the same messages. Any number of prompts goes over any number of workers; each takes as much as it gets
    done. If one dies, its prompts go to the others, and it is started again where that is possible."""

    def __init__(
        self,
        workers: Sequence[Worker] = (),
        data_buffer: DataBuffer | None = None,
        reward: Scorer | Callable[..., Any] | str | None = None,
        config: "RLTrainingConfig | None" = None,
        engine: str = "native",
        **options: Any,
    ) -> None:
        """`engine` and `options` are those of the `[inference]` section, for every worker."""
        super().__init__((), data_buffer, reward, config)
        self.workers = list(workers)
        self.options = {"engine": engine} | options

    def join(
        self,
        engines: Sequence[InferenceEngine] = (),
        workers: Sequence[Worker] = (),
        data_buffer: DataBuffer | None = None,
    ) -> None:
        super().join(engines, (), data_buffer)
        self.workers += [worker for worker in workers if worker not in self.workers]

    async def _open_samplers(self, model_dir: Path, run_dir: RunDir) -> Sequence[Sampler]:
        if not self.workers:
            return await super()._open_samplers(model_dir, run_dir)
        message = {
            "cmd": "init_engine",
            "model_name": str(model_dir.resolve()),
            "options": self.options,
            "weight_roots": [str(run_dir.root.resolve())],
        }
        remote = [RemoteSampler(worker, message) for worker in self.workers]
        await asyncio.gather(*(one.open() for one in remote))
        engines = await super()._open_samplers(model_dir, run_dir) if self.engines else ()
        return [*remote, *engines]


class RemoteSampler:
    """A worker as the pool sees it: one message at a time."""

    slots = 1

    def __init__(self, worker: Worker, first_message: dict[str, Any]) -> None:
        self.worker = worker
        self.first_message = first_message
        self._turn = asyncio.Lock()

    @property
    def name(self) -> str:
        return self.worker.name

    async def open(self) -> None:
        await self._call(self.first_message)

    async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
        asked = [{"prompt_ids": job.prompt_ids, "sampling": asdict(job.sampling)} for job in jobs]
        answer = await self._call({"cmd": "generate", "prompts": asked})
        completions = [[Completion(**one) for one in group] for group in answer["completions"]]
        if [len(group) for group in completions] != [job.sampling.n for job in jobs]:
            raise SamplerGone(
                f"{self.name} answered {len(jobs)} prompts with {list(map(len, completions))} completions"
            )
        return completions

    async def load(self, path: Path, version: int) -> None:
        await self._call({"cmd": "update_weights", "path": str(path.resolve()), "version": version})

    async def revive(self) -> bool:
        if not await asyncio.to_thread(self.worker.restart):
            return False
        await self.open()
        return True

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            try:
                answer = await asyncio.to_thread(self.worker.call, message)
            except WorkerDied as error:
                raise SamplerGone(str(error)) from error
        if "error" in answer:
            raise UserError(f"{self.name}: {answer['error']}")
        return answer
