"""The run: generation and training kept overlapped, as far as staleness allows.

Two tasks run side by side:

    batches   dispatcher ─► groups ─► advantages ─► samples, metrics ─► rollouts/step_n
    policy    weights/step_n ─► /update_weights or /load_lora_adapter ─► evaluation where due

A third ends the run as soon as it has lost its server.

The trainer is met only through the run directory, the inference server only through its client.
"""

import asyncio
import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from tandem.algorithms.curriculum import Curriculum
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.batch_files import RolloutWriter
from tandem.data.tokenizer import Tokenizer
from tandem.envs.mixture import costs_of
from tandem.envs.protocol import Environment
from tandem.orchestrator.advantages import make_batch_advantages
from tandem.orchestrator.batches import batch_metrics, make_batch
from tandem.orchestrator.buffer import GroupBuffer
from tandem.orchestrator.client import ServerLost
from tandem.orchestrator.conversations import open_episodes
from tandem.orchestrator.dispatcher import Dispatcher
from tandem.orchestrator.evaluation.evaluator import Evaluator, MixedEvaluator
from tandem.orchestrator.failures import FailureLedger, TooManyFailures
from tandem.orchestrator.filters import GroupFilter
from tandem.orchestrator.protocols import ServedVersion
from tandem.orchestrator.rate import Rate
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.orchestrator.samples import write_samples
from tandem.orchestrator.servers import ServerList
from tandem.orchestrator.shaping import RewardShaping
from tandem.orchestrator.state import OrchestratorState
from tandem.orchestrator.tasks import Prompts, TaskOrder, request_seed, sampling_options
from tandem.orchestrator.weight_sync import Policy
from tandem.types.rollout import Group, SamplingRequest, Task
from tandem.utils.errors import UserError, is_unwritable
from tandem.utils.garbage import collect_by_the_clock
from tandem.utils.metrics import MetricsForwarder, RunLog, read_metrics
from tandem.utils.run_dir import RunDir, step_name
from tandem.utils.waiting import Deadline
from tandem.weights.versions import wait_for_whole

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at a deadline, or at the metrics


class Orchestrator:
    """Everything the loop holds on to; `run` is the loop."""

    def __init__(
        self,
        config: OrchestratorConfig,
        environment: Environment,
        prompts: Prompts,
        tokenizer: Tokenizer,
        servers: ServerList,
        run_name: str,
        forwarder: MetricsForwarder,
        resumed_from: OrchestratorState | None,
    ) -> None:
        self.config = config
        self.run_dir = RunDir(config.output_dir)
        self.run_log = RunLog(self.run_dir, "orchestrator")
        self.servers = servers
        self.run_name = run_name
        self.environment = environment
        self.prompts = prompts
        self.forwarder = forwarder
        self._evaluating = False
        self.start = resumed_from or OrchestratorState(step=0, next_order=0, unfinished=[])
        self.plans = config.plans
        weights = {name: plan.weight for name, plan in self.plans.items()} if config.envs else None
        self.tasks = TaskOrder(environment.train_tasks, config.seed, self.start.set_aside, weights)
        self.ledger = FailureLedger(self.run_dir, config.max_failed_share)
        self.shaping = RewardShaping(config)
        self.filters = {
            name: GroupFilter(plan.filters, self.shaping, config.prompts_per_step) for name, plan in self.plans.items()
        }
        self.curriculum = Curriculum(
            config.curriculum, config.solved_reward, config.seed, self.start.easy, self.start.hard
        )
        self.advantages = make_batch_advantages(config.advantage)
        self.writer = RolloutWriter(self.run_dir.rollouts, config.keep_rollouts)
        self.policy = Policy(
            list(servers),
            config.model.name,
            self.run_dir.weights,
            self.start.step,
            self.run_log,
            None if config.deterministic else config.client.concurrency,
        )
        episodes = open_episodes(environment, tokenizer, config.seq_len)
        make_maker = partial(RolloutMaker, self.policy, environment, tokenizer, episodes=episodes)
        self.makers = {
            name: make_maker(tries=plan.env.tries, record=self.ledger.training_attempt)
            for name, plan in self.plans.items()
        }
        self.evaluator = self._make_evaluator(
            make_maker(tries=1, record=self.ledger.evaluation_attempt), environment.eval_tasks
        )

    def _make_evaluator(self, maker: RolloutMaker, tasks: Sequence[Task]) -> Evaluator | MixedEvaluator:
        config = self.config
        evaluators: list[Evaluator] = []
        for name, plan in self.plans.items():
            own = [place for place, task in enumerate(tasks) if task.environment == name]
            evaluators.append(
                Evaluator(
                    maker,
                    config.eval.model_copy(update={"num_prompts": plan.num_eval_prompts}),
                    [tasks[place] for place in own],
                    [self.prompts.held_out[place] for place in own],
                    plan.sampling.max_tokens,
                    config.seed,
                    self.run_log,
                    sampling_options(config.eval, plan.sampling.stop),
                    name,
                    config.solved_reward,
                )
            )
        return MixedEvaluator(evaluators, self.run_log) if config.envs else evaluators[0]

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks)
        except BaseExceptionGroup as errors:
            raise cause_of(errors) from None
        self.run_log.event("finished", step=self.policy.version)

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        policy = self.policy
        watching = [tasks.create_task(policy.watch()), tasks.create_task(collect_by_the_clock())]
        if (servers_file := self.config.client.servers_file) is not None:
            watching.append(tasks.create_task(self.servers.follow_file(servers_file, policy)))
        ready = await self.servers.wait_until_ready(self.run_dir.weights)
        for replica in policy.replicas:
            replica.is_present = replica.server in ready
        await self._serve_first_version()
        self.run_log.event("started", version=policy.version, run=self.run_name)
        await self._evaluate_start()
        watching.append(tasks.create_task(self._forward_metrics()))
        following = tasks.create_task(policy.follow(self.config.max_steps, self._on_version))
        await self._write_batches(policy)
        await self._wait_for_last_version(policy, following)
        for task in watching:
            task.cancel()

    async def _serve_first_version(self) -> None:
        """Whatever the server served before, it now serves the weights this run starts from."""
        version = self.start.step
        path = self.config.model.name if version == 0 else self.run_dir.weights / step_name(version)
        if version > 0:
            await wait_for_whole(path, version, self._weights_deadline(version))
        await self.policy.load(path, version)

    async def _evaluate_start(self) -> None:
        """What a new run begins with; of a resumed one, what it was ended before."""
        version = self.start.step
        is_due = version == 0 or self.evaluator.is_due(version - 1, version, self.config.max_steps)
        lines = read_metrics(self.run_dir)
        if is_due and not any("eval/reward" in line and line["step"] == version for line in lines):
            await self.evaluator.run(version, self.run_dir)

    async def _write_batches(self, policy: Policy) -> None:
        config, step_size = self.config, self.config.prompts_per_step
        num_spare = round(step_size * (config.oversampling - 1))
        buffer = GroupBuffer(step_size, config.max_staleness, self.start.step, num_spare)
        dispatcher = Dispatcher(
            self._make_group,
            self._keep,
            self.curriculum,
            buffer,
            policy,
            self.tasks,
            self.ledger,
            self.run_log,
            next_order=self.start.next_order,
            retry=self.start.unfinished,
            max_orders=config.max_steps * step_size,
            tries=max(plan.env.tries for plan in self.plans.values()),
        )
        started = time.monotonic()
        rate = Rate(started)
        try:
            for step in range(self.start.step + 1, config.max_steps + 1):
                groups = await dispatcher.next_batch(step, self._batch_deadline(step, policy.version))
                collected = time.monotonic()
                version = policy.version  # the trainer may publish the next one while the batch is written
                # Beside the loop: other rollouts go on.
                await asyncio.to_thread(self._stage_batch, groups, step, self._state(step, dispatcher))
                staged = time.monotonic()
                num_tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
                times = {
                    "step_s": staged - started,
                    "batch_s": staged - collected,
                    "tokens_per_s": rate.add(staged, num_tokens),
                }
                started = staged
                counts = {"groups/stale": buffer.num_dropped_stale, "groups/cut": dispatcher.num_cut}
                self._log_step(groups, step, version, times | counts)
                # Last: with the batch the step is done, and a run that is resumed goes on after it.
                await asyncio.to_thread(self.writer.publish, step)
        finally:
            await dispatcher.close()

    def _state(self, step: int, dispatcher: Dispatcher) -> OrchestratorState:
        return OrchestratorState(
            step,
            dispatcher.next_order,
            dispatcher.unfinished_orders,
            set_aside=sorted(self.tasks.set_aside),
            easy=sorted(self.curriculum.easy),
            hard=sorted(self.curriculum.hard),
        )

    def _keep(self, group: Group) -> Group | None:
        return self.filters[group.task.environment](group)

    async def _make_group(self, order: int) -> Group:
        task = self.tasks[order]
        plan = self.plans[task.environment]
        sampling = SamplingRequest(
            n=plan.group_size,
            max_tokens=plan.sampling.max_tokens,
            temperature=plan.sampling.temperature,
            seed=request_seed(self.config.seed, "train", order),
            options=sampling_options(plan.sampling, plan.sampling.stop),
            is_trained_on=True,
        )
        prompt = self.prompts.train[self.tasks.place(order)]
        return await self.makers[plan.name].make_group(task, prompt, order, sampling)

    def _stage_batch(self, groups: list[Group], step: int, state: OrchestratorState) -> None:
        config = self.config
        rewards = [self.shaping.rewards(group) for group in groups]
        advantages = self.advantages(groups, rewards)
        batch = make_batch(groups, rewards, advantages, step, config.sampling.temperature)
        write_samples(self.run_dir.samples(step), groups, advantages)
        self.writer.stage(replace(batch, orchestrator_state=state.encode()))

    def _log_step(self, groups: list[Group], step: int, version: int, measured: dict[str, float]) -> None:
        metrics = batch_metrics(groups, step) | self.shaping.metrics(groups)
        filtered = sum((Counter(one.take_metrics()) for one in self.filters.values()), Counter())
        metrics |= filtered | self.curriculum.metrics()
        metrics |= self._metrics_by_environment(groups, step)
        state = {
            "generate_s": statistics.fmean(group.generate_s for group in groups),
            "score_s": statistics.fmean(group.score_s for group in groups),
            "version": version,
            "rollouts/failed": self.ledger.num_failed,
            "tasks/set_aside": len(self.tasks.set_aside),
            "servers/present": self.policy.num_present,
            "servers/requests_moved": self.policy.pool.num_moved,
        }
        if (limit := self.policy.limit) is not None:
            state["servers/concurrency"] = limit
        self.run_log.metrics(step, metrics | measured | state | costs_of(self.environment))
        self.forwarder.forward()
        logger.info(
            "step %d: reward %.3f, staleness %d, %.0f tokens/s%s",
            step,
            metrics["reward/mean"],
            metrics["staleness/max"],
            measured["tokens_per_s"],
            self.forwarder.remarks,
        )

    def _metrics_by_environment(self, groups: list[Group], step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in self.plans if self.config.envs else ():
            own = [group for group in groups if group.task.environment == name]
            found[f"{name}/groups"] = len(own)
            if own:
                found |= {f"{name}/{key}": value for key, value in batch_metrics(own, step).items()}
        return found

    async def _on_version(self, previous: int, version: int) -> None:
        self.run_log.event("version_served", version=version)
        self.writer.remove_trained(version)
        if self.evaluator.is_due(previous, version, self.config.max_steps):
            self._evaluating = True
            await self.evaluator.run(version, self.run_dir)
            self._evaluating = False

    async def _wait_for_last_version(self, policy: ServedVersion, following: asyncio.Task[None]) -> None:
        """The deadline is for the trainer: an evaluation does not count against it."""
        last = self.config.max_steps
        deadline = self._weights_deadline(last)
        while not following.done():
            if self._evaluating or policy.version == last:
                deadline = self._weights_deadline(last)
            deadline.check()
            await asyncio.wait([following], timeout=LOOK_S)

    async def _forward_metrics(self) -> None:
        while True:
            self.forwarder.forward()
            await asyncio.sleep(LOOK_S)

    def _batch_deadline(self, step: int, version: int) -> Deadline:
        return Deadline(
            what=f"the groups of step {step}: rollouts from {self.servers}, their scores, or weights after "
            f"version {version} from the trainer",
            timeout_s=self.config.weights_timeout_s,
            hint="see logs/inference.log and logs/trainer.log",
        )

    def _weights_deadline(self, version: int) -> Deadline:
        return Deadline(
            what=f"the trainer's weights {self.run_dir.weights / step_name(version)}",
            timeout_s=self.config.weights_timeout_s,
            hint="is the trainer running? see logs/trainer.log",
        )


def cause_of(errors: BaseExceptionGroup) -> BaseException:
    """The reason for the end, without the wrapping of those tasks that ended with it."""
    met = list(leaves_of(errors))
    told = list(filter(is_unwritable, met))
    for kind in (ServerLost, TooManyFailures):
        told += [error for error in met if isinstance(error, kind)]
    if len(met) == 1 or all(isinstance(error, OSError | UserError) for error in met):  # the first is told in one line
        told += met
    return told[0] if told else errors


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves_of(each)
    else:
        yield error
