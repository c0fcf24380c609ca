"""Rollouts for the Python API: prompts from a data buffer, completions from engines or workers, rewards."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from tandem.data.tokenizer import Tokenizer
from tandem.envs.process import open_environment
from tandem.envs.protocol import Environment
from tandem.envs.trial import try_environment
from tandem.launch.ray.cluster import WorkerDied
from tandem.orchestrator.conversations import open_episodes
from tandem.orchestrator.evaluation.evaluator import Evaluator
from tandem.orchestrator.failures import FailureLedger, TaskFailed, TooManyFailures
from tandem.orchestrator.filters import GroupFilter
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.orchestrator.shaping import RewardShaping
from tandem.orchestrator.tasks import encode_tasks, request_seed, sampling_options
from tandem.python.data_buffer import DataBuffer
from tandem.python.engines import InferenceEngine
from tandem.python.pool import Job, Sampler, SamplerGone, SamplerPool
from tandem.python.rewards import RewardedTasks, Scorer
from tandem.python.threads import DaemonThreads, GivenUp
from tandem.types.rollout import Completion, Group, SamplingRequest
from tandem.utils.errors import UserError, shorten
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

if TYPE_CHECKING:
    from tandem.python.training import RLTrainingConfig

COMPLETIONS = TypeAdapter(list[list[Completion]])


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
        self._pool: SamplerPool | None = None
        self._closing = AsyncExitStack()

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

    def check(self, config: "RLTrainingConfig") -> None:
        """Refuse what cannot work, before anything starts."""
        buffer = self.data_buffer
        if not self._num_samplers:
            raise UserError("there is nothing to generate with; give inference_engines, or inference_workers")
        if self.reward is None and buffer.env is None:
            raise UserError("there is no reward; give RolloutManager one, or take the data from DataBuffer.from_env")
        if self.reward is not None and buffer.has_conversations:
            raise UserError("a reward is given, and the data buffer's environment scores its own conversations")
        if config.eval is not None and not buffer.eval_tasks:
            raise UserError("eval is given, and the data buffer has no held-out tasks; give DataBuffer eval_rows")

    @property
    def _num_samplers(self) -> int:
        return len(self.engines)

    async def start(self, config: "RLTrainingConfig", model_dir: Path, run_dir: RunDir) -> None:
        """Returns when all that completes prompts is ready, and all prompts are known to fit."""
        self.check(config)
        self.config = config
        options = config.orchestrator
        tokenizer = Tokenizer(model_dir, options.model.read_chat_template())
        environment = await self._open_environment(config)
        self._tasks = environment.train_tasks
        self._prompts = encode_tasks("training", environment.train_tasks, tokenizer, options)
        self._pool = SamplerPool()
        self._run_log = RunLog(run_dir, "orchestrator")
        self._ledger = FailureLedger(run_dir, config.max_failed_share)
        self.filter = GroupFilter(config.filters, RewardShaping(options), config.prompts_per_step)
        episodes = open_episodes(environment, tokenizer, config.seq_len)
        make_maker = partial(RolloutMaker, self._pool, environment, tokenizer, episodes=episodes)
        tries = config.reward_tries if self.data_buffer.env is None else self.data_buffer.env.tries
        self._maker = make_maker(tries=tries, record=self._ledger.training_attempt)
        self.evaluator: Evaluator | None = None
        if config.eval is not None:
            self.evaluator = Evaluator(
                make_maker(tries=1, record=self._ledger.evaluation_attempt),
                config.eval,
                environment.eval_tasks,
                encode_tasks("held-out", environment.eval_tasks, tokenizer, options),
                config.max_tokens,
                config.seed,
                self._run_log,
                sampling_options(config.eval, config.stop),
                solved_reward=config.solved_reward,
            )
        for sampler in await self._open_samplers(model_dir, run_dir):
            self._pool.add(sampler)

    async def generate_batch(self, num_prompts: int | None = None) -> list[Group]:
        """The next prompts of the data buffer, each with its rollouts and rewards. Any number will do; left out, it is
        config.prompts_per_step. Another prompt takes the place of one that is filtered, or cannot be scored."""
        assert self.config is not None, "start comes first"
        num_prompts = self.config.prompts_per_step if num_prompts is None else num_prompts
        making = [asyncio.ensure_future(self._make_kept_group()) for _ in range(num_prompts)]
        try:
            return sorted(await asyncio.gather(*making), key=lambda group: group.order)
        except TooManyFailures as error:
            raise UserError(str(error)) from error
        finally:
            for one in making:
                one.cancel()

    async def evaluate(self, version: int, run_dir: RunDir) -> float:
        """Mean reward on the held-out tasks, by what is served now."""
        assert self.evaluator is not None, "config.eval comes first"
        try:
            return await self.evaluator.run(version, run_dir)
        except TooManyFailures as error:
            raise UserError(str(error)) from error

    async def update_weights(self, path: Path, version: int) -> None:
        """All that completes prompts serves this version from here on."""
        assert self._pool is not None, "start comes first"
        await self._pool.load(path, version)

    async def close(self) -> None:
        """Engines that it has started end, and the environment's process; what was started before goes on."""
        if self._pool is not None:
            await self._pool.close()
        await self._closing.aclose()

    async def _open_environment(self, config: "RLTrainingConfig") -> Environment:
        """Users' environments run in a process of their own, under their time limits, as under `rl`."""
        buffer = self.data_buffer
        if self.reward is not None:
            rewarded = RewardedTasks(self.reward, config.reward_timeout_s, buffer.tasks, buffer.eval_tasks)
            self._closing.push_async_callback(rewarded.close)
            return rewarded
        assert buffer.env is not None, "check comes first"
        environment = await self._closing.enter_async_context(open_environment(buffer.env))
        await try_environment(environment, buffer.env)
        return environment

    async def _open_samplers(self, model_dir: Path, run_dir: RunDir) -> Sequence[Sampler]:
        ours = [engine for engine in self.engines if not engine.is_started]
        for engine in ours:
            self._closing.push_async_callback(engine.close)
        logs = [run_dir.root / "logs" / f"engine_{self.engines.index(engine)}" for engine in ours]
        starting = [
            asyncio.ensure_future(engine.start(log, [run_dir.root])) for engine, log in zip(ours, logs, strict=True)
        ]
        try:
            await asyncio.gather(*starting)
        finally:
            for one in starting:  # where one fails, the others end before they are closed
                one.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        return self.engines

    async def _make_kept_group(self) -> Group:
        """A group that is trained on. Which ones are does not depend on the order they come in: as many are under way
        as are missing."""
        while True:
            order = self.data_buffer.next_order()
            try:
                group = await self._make_group(order)
            except TaskFailed as error:
                self._set_aside(order, error)
                continue
            if (kept := self.filter(group)) is not None:
                return kept

    async def _make_group(self, order: int) -> Group:
        assert self.config is not None
        config = self.config
        request = SamplingRequest(
            n=config.group_size,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            seed=request_seed(config.seed, "train", order),
            options=sampling_options(config, config.stop),
            is_trained_on=True,
        )
        place = self.data_buffer.place(order)
        return await self._maker.make_group(self._tasks[place], self._prompts[place], order, request)

    def _set_aside(self, order: int, error: TaskFailed) -> None:
        place = self.data_buffer.place(order)
        self.data_buffer.set_aside.add(place)
        self._run_log.event("task_set_aside", task=self._tasks[place].index, order=order, reason=str(error))
        if len(self.data_buffer.set_aside) == len(self.data_buffer):
            raise self._ledger.too_many(f"all {len(self.data_buffer)} training tasks failed and are set aside")
        self._ledger.check()


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
    """The same over workers on other nodes, which run `tandem.python.workers.inference` or a function of your own that
    answers the same messages. Any number of prompts goes over any number of workers; each takes as much as it gets
    done. If one dies, or does not answer within config.worker_timeout_s, its prompts go to the others, and it is
    started again where that is possible."""

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

    @property
    def _num_samplers(self) -> int:
        return len(self.engines) + len(self.workers)

    async def _open_samplers(self, model_dir: Path, run_dir: RunDir) -> Sequence[Sampler]:
        engines = await super()._open_samplers(model_dir, run_dir)
        if not self.workers:
            return engines
        message = {
            "cmd": "init_engine",
            "model_name": str(model_dir.resolve()),
            "options": self.options,
            "weight_roots": [str(run_dir.root.resolve())],
        }
        assert self.config is not None, "start comes first"
        remote = [RemoteSampler(worker, message, self.config.worker_timeout_s) for worker in self.workers]
        for one in remote:
            self._closing.callback(one.close)
        await asyncio.gather(*(one.open() for one in remote))
        return [*remote, *engines]


class RemoteSampler:
    """A worker as the pool sees it: one message at a time. One that does not answer within `timeout_s` is gone."""

    slots = 1

    def __init__(self, worker: Worker, first_message: dict[str, Any], timeout_s: float) -> None:
        self.worker = worker
        self.first_message = first_message
        self.timeout_s = timeout_s
        self._thread = DaemonThreads(1, worker.name)
        self._turn = asyncio.Lock()
        self._is_open = False

    @property
    def name(self) -> str:
        return self.worker.name

    async def open(self) -> None:
        """Returns when the worker has its engine."""
        async with self._turn:
            await self._open()

    async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
        asked = [{"prompt_ids": job.prompt_ids, "sampling": asdict(job.sampling)} for job in jobs]
        answer = await self._call({"cmd": "generate", "prompts": asked})
        if "completions" not in answer:
            raise UserError(
                f"{self.name} answered `generate` with {shorten(str(answer), 200)}; whoever sends it messages has to "
                "receive their answers"
            )
        try:
            completions = COMPLETIONS.validate_python(answer["completions"])
        except ValidationError as error:
            raise UserError(
                f"{self.name} answered `generate` with completions = {shorten(repr(answer['completions']), 200)}; give "
                "a list for each prompt, of tables with token_ids, logprobs, versions and finish_reason"
            ) from error
        if [len(group) for group in completions] != [job.sampling.n for job in jobs]:
            raise SamplerGone(
                f"{self.name} answered {len(jobs)} prompts with {list(map(len, completions))} completions"
            )
        return completions

    async def load(self, path: Path, version: int) -> None:
        await self._call({"cmd": "update_weights", "path": str(path.resolve()), "version": version})

    async def revive(self) -> bool:
        async with self._turn:
            if not await self._in_time("restart", self.worker.restart):
                return False
            await self._open()
        return True

    def close(self) -> None:
        """Whoever started the worker ends it."""
        self._thread.close()

    async def _open(self) -> None:
        await self._exchange(self.first_message)
        self._is_open = True

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            if not self._is_open:  # who waited for this turn must not meet a worker that has just been started again
                raise SamplerGone(f"{self.name} died")
            return await self._exchange(message)

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._in_time(message["cmd"], self.worker.call, message)
        except WorkerDied as error:
            self._is_open = False
            raise SamplerGone(str(error)) from error
        if not isinstance(answer, dict):
            raise UserError(
                f"{self.name} answered `{message['cmd']}` with {shorten(repr(answer), 200)}; every answer is a table"
            )
        if "error" in answer:
            raise UserError(f"{self.name}: {answer['error']}")
        return answer

    async def _in_time(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._thread.run(self.timeout_s, function, *arguments)
        except GivenUp as error:
            self._is_open = False
            raise SamplerGone(
                f"{self.name} has not answered `{what}` within worker_timeout_s = {self.timeout_s:g} s"
            ) from error
