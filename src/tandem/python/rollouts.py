"""What rollouts are made of: the prompts of a data buffer, engines or workers that complete them, and a reward."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.protocol import Environment
from tandem.orchestrator.rehearsal import open_tried
from tandem.orchestrator.tasks import Prompts, encode_prompts
from tandem.python.config import RLTrainingConfig
from tandem.python.data_buffer import DataBuffer
from tandem.python.engines import InferenceEngine
from tandem.python.pool import Sampler
from tandem.python.remote import RemoteSampler, Worker
from tandem.python.rewards import RewardedTasks, Scorer
from tandem.utils.errors import UserError


class RolloutManager:
    """Scored rollouts of the prompts of a data buffer. Every engine takes prompts as it has room for them; if one dies,
    what it had taken goes to the others and it is started again.

    `reward`: an object with `score(prompt, response)`, a function of completion and answer, or a name such as "math";
    left out, it is that of the environment the data buffer came from. `config`: that of
    run_rl_training counts.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine] = (),
        data_buffer: DataBuffer | None = None,
        reward: Scorer | Callable[..., Any] | str | None = None,
        config: RLTrainingConfig | None = None,
    ) -> None:
        self.engines = list(engines)
        self.workers: list[Worker] = []
        self.options: dict[str, Any] = {}
        self.reward = reward
        self.config = config
        self._data_buffer = data_buffer

    @property
    def data_buffer(self) -> DataBuffer:
        if self._data_buffer is None:
            raise UserError("there is no data; give RolloutManager or run_rl_training a data_buffer")
        return self._data_buffer

    def join(
        self,
        engines: Sequence[InferenceEngine] = (),
        workers: Sequence[Worker] = (),
        data_buffer: DataBuffer | None = None,
    ) -> None:
        """What it does not know yet takes part as well."""
        if workers:
            raise UserError("inference_workers need a RemoteRolloutManager")
        self.engines += [engine for engine in engines if engine not in self.engines]
        self._data_buffer = self._data_buffer or data_buffer

    def check(self, config: RLTrainingConfig) -> None:
        """Refuse what cannot work, before anything starts."""
        buffer = self.data_buffer
        if not self.engines and not self.workers:
            raise UserError("there is nothing to generate with; give inference_engines, or inference_workers")
        if self.reward is None and buffer.env is None:
            raise UserError("there is no reward; give RolloutManager one, or take the data from DataBuffer.from_env")
        if self.reward is not None and buffer.has_conversations:
            raise UserError("a reward is given, and the data buffer's environment scores its own conversations")
        if config.eval is not None and not buffer.eval_tasks:
            raise UserError("eval is given, and the data buffer has no held-out tasks; give DataBuffer eval_rows")

    @asynccontextmanager
    async def open_environment(
        self, config: RLTrainingConfig, options: OrchestratorConfig, tokenizer: Tokenizer
    ) -> AsyncIterator[tuple[Environment, Prompts]]:
        """Users' environments run in a process of their own, under their time limits, as under `rl`."""
        buffer, evaluates = self.data_buffer, config.eval is not None
        if self.reward is None:
            async with open_tried(options, tokenizer, evaluates=evaluates) as opened:
                yield opened
            return
        rewarded = RewardedTasks(self.reward, config.reward_timeout_s, buffer.tasks, buffer.eval_tasks)
        try:
            yield rewarded, encode_prompts(rewarded, tokenizer, options, evaluates=evaluates)
        finally:
            await rewarded.close()

    @asynccontextmanager
    async def samplers(self, config: RLTrainingConfig, options: OrchestratorConfig) -> AsyncIterator[list[Sampler]]:
        """All that completes prompts, ready. Engines that it has started end with the block; what was started before
        goes on."""
        run_dir = options.output_dir
        ours = [engine for engine in self.engines if not engine.is_started]
        message = {
            "cmd": "init_engine",
            "model_name": str(options.model.name.resolve()),
            "options": self.options,
            "weight_roots": [str(run_dir.resolve())],
        }
        remote = [RemoteSampler(worker, message, config.worker_timeout_s) for worker in self.workers]
        async with AsyncExitStack() as stack:
            for engine in ours:
                stack.push_async_callback(engine.close)
            for one in remote:
                stack.callback(one.close)
            async with asyncio.TaskGroup() as starting:  # where one fails, the others end before they are closed
                for engine in ours:
                    folder = run_dir / "logs" / f"engine_{self.engines.index(engine)}"
                    starting.create_task(engine.start(folder, [run_dir]))
                for one in remote:
                    starting.create_task(one.open())
            yield [*remote, *self.engines]


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
        config: RLTrainingConfig | None = None,
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
