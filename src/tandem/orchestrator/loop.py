"""The run: generation and training kept overlapped, as far as staleness allows.

Two tasks run concurrently:

    batches   dispatcher ─► groups ─► advantages ─► samples, metrics ─► rollouts/step_n
    policy    weights/step_n ─► /update_weights or /load_lora_adapter ─► evaluation where due

Two more end the run as soon as it has lost its servers or its trainer.

The loop is given a policy, which generates, and a trainer, which turns batches into weights (protocols.py). For `rl`
they are HTTP servers (server_policy.py) and the run directory (file_trainer.py); for `run_rl_training`, objects of the
Python API (python/).
"""

import asyncio
import logging
import statistics
import time
from collections import Counter
from dataclasses import replace
from functools import partial

from tandem.algorithms.curriculum import Curriculum
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.mixture import costs_of
from tandem.envs.protocol import Environment
from tandem.orchestrator.advantages import make_batch_advantages
from tandem.orchestrator.batches import batch_metrics, make_batch
from tandem.orchestrator.buffer import GroupBuffer
from tandem.orchestrator.causes import cause_of
from tandem.orchestrator.conversations import open_episodes
from tandem.orchestrator.dispatcher import Dispatcher
from tandem.orchestrator.evaluation.evaluator import make_evaluator
from tandem.orchestrator.failures import FailureLedger
from tandem.orchestrator.filters import GroupFilter
from tandem.orchestrator.protocols import ServedPolicy, ServedVersion, Trainer
from tandem.orchestrator.rate import Rate
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.orchestrator.samples import write_samples
from tandem.orchestrator.shaping import RewardShaping
from tandem.orchestrator.state import OrchestratorState
from tandem.orchestrator.tasks import Prompts, TaskOrder, order_of_tasks, request_seed, sampling_options
from tandem.orchestrator.weight_sync import follow_versions
from tandem.types.rollout import Group, SamplingRequest
from tandem.utils.metrics import MetricsForwarder, RunLog, read_metrics
from tandem.utils.run_dir import RunDir
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at a deadline, or at the metrics


class Orchestrator:
    """Everything the loop holds on to; `run` is the loop.

    `tasks`: those to train on, in their order; left out, the environment's, by the seed. `one_step_at_a_time`: groups
    of a step are started once the step before has its own, so that the order of the tasks says which it has."""

    def __init__(
        self,
        config: OrchestratorConfig,
        environment: Environment,
        prompts: Prompts,
        tokenizer: Tokenizer,
        policy: ServedPolicy,
        trainer: Trainer,
        run_name: str,
        forwarder: MetricsForwarder,
        resumed_from: OrchestratorState | None,
        *,
        tasks: TaskOrder | None = None,
        one_step_at_a_time: bool = False,
    ) -> None:
        self.config = config
        self.run_dir = RunDir(config.output_dir)
        self.run_log = RunLog(self.run_dir, "orchestrator")
        self.policy = policy
        self.trainer = trainer
        self.run_name = run_name
        self.environment = environment
        self.prompts = prompts
        self.forwarder = forwarder
        self._evaluating = False
        self.start = resumed_from or OrchestratorState(step=0, next_order=0, unfinished=[])
        self.plans = config.plans
        self.tasks = order_of_tasks(environment.train_tasks, config) if tasks is None else tasks
        self.tasks.position = self.start.next_order
        self.tasks.set_aside.update(self.start.set_aside)
        self.one_step_at_a_time = one_step_at_a_time
        self.ledger = FailureLedger(self.run_dir, config.max_failed_share)
        self.shaping = RewardShaping(config)
        self.filters = {
            name: GroupFilter(plan.filters, self.shaping, config.prompts_per_step) for name, plan in self.plans.items()
        }
        self.curriculum = Curriculum(
            config.curriculum, config.solved_reward, config.seed, self.start.easy, self.start.hard
        )
        self.advantages = make_batch_advantages(config.advantage)
        episodes = open_episodes(environment, tokenizer, config.seq_len)
        make_maker = partial(RolloutMaker, self.policy, environment, tokenizer, episodes=episodes)
        self.makers = {
            name: make_maker(tries=plan.env.tries, record=self.ledger.training_attempt)
            for name, plan in self.plans.items()
        }
        evaluated = make_maker(tries=1, record=self.ledger.evaluation_attempt)
        self.evaluator = make_evaluator(config, evaluated, environment.eval_tasks, prompts.held_out, self.run_log)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks)
        except BaseExceptionGroup as errors:  # answers: its cause is what people need to read
            raise cause_of(errors) from None
        self.run_log.event("finished", step=self.policy.version)

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        policy = self.policy
        watching = [tasks.create_task(policy.watch()), tasks.create_task(self.trainer.watch())]
        await policy.wait_until_ready()
        await self._serve_first_version()
        self.run_log.event("started", version=policy.version, run=self.run_name)
        await self._evaluate_start()
        watching.append(tasks.create_task(self._forward_metrics()))
        following = tasks.create_task(follow_versions(self.trainer, policy, self.config.max_steps, self._on_version))
        await self._write_batches(policy)
        await self._wait_for_last_version(policy, following)
        for task in watching:
            task.cancel()

    async def _serve_first_version(self) -> None:
        """Whatever the server served before, it now serves the weights this run starts from."""
        version = self.start.step
        await self.trainer.wait_for_whole(version, self._weights_deadline(version))
        await self.policy.load(self.trainer.weights(version), version)

    async def _evaluate_start(self) -> None:
        """What a new run begins with; of a resumed one, what it was ended before."""
        version = self.start.step
        lines = read_metrics(self.run_dir)
        is_done = any("eval/reward" in line and line["step"] == version for line in lines)
        if self._is_evaluation_due(version - 1, version) and not is_done:
            await self.evaluator.run(version, self.run_dir)

    def _is_evaluation_due(self, previous: int, version: int) -> bool:
        if not self.prompts.held_out:
            return False
        return version == 0 or self.evaluator.is_due(previous, version, self.config.max_steps)

    def _make_dispatcher(self) -> Dispatcher:
        config, step_size = self.config, self.config.prompts_per_step
        num_spare = round(step_size * (config.oversampling - 1))
        buffer = GroupBuffer(
            step_size, config.max_staleness, self.start.step, num_spare, one_step_at_a_time=self.one_step_at_a_time
        )
        return Dispatcher(
            self._make_group,
            self._keep,
            self.curriculum,
            buffer,
            self.policy,
            self.tasks,
            self.ledger,
            self.run_log,
            retry=self.start.unfinished,
            max_groups=config.max_steps * step_size,
            tries=max(plan.env.tries for plan in self.plans.values()),
        )

    async def _write_batches(self, policy: ServedVersion) -> None:
        config, dispatcher = self.config, self._make_dispatcher()
        started = time.monotonic()
        rate = Rate(started)
        try:
            for step in range(self.start.step + 1, config.max_steps + 1):
                groups = await dispatcher.next_batch(step, self._batch_deadline(step, policy.version))
                collected = time.monotonic()
                version = policy.version  # the trainer may publish the next one while the batch is written
                # In a thread: other rollouts go on.
                await asyncio.to_thread(self._stage_batch, groups, step, self._state(step, dispatcher))
                staged = time.monotonic()
                num_tokens = sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
                times = {
                    "step_s": staged - started,
                    "batch_s": staged - collected,
                    "tokens_per_s": rate.add(staged, num_tokens),
                }
                started = staged
                counts = {"groups/stale": dispatcher.buffer.num_dropped_stale, "groups/cut": dispatcher.num_cut}
                self._log_step(groups, step, version, times | counts)
                # Last: with the batch the step is done, and a run that is resumed goes on after it.
                await self.trainer.publish(step)
        finally:
            await dispatcher.close()

    def _state(self, step: int, dispatcher: Dispatcher) -> OrchestratorState:
        return OrchestratorState(
            step,
            self.tasks.position,
            dispatcher.unfinished_group_ids,
            set_aside=sorted(self.tasks.set_aside),
            easy=sorted(self.curriculum.easy),
            hard=sorted(self.curriculum.hard),
        )

    def _keep(self, group: Group) -> Group | None:
        return self.filters[group.task.environment](group)

    async def _make_group(self, group_id: int) -> Group:
        place = self.tasks.place(group_id)
        task = self.environment.train_tasks[place]
        plan = self.plans[task.environment]
        sampling = SamplingRequest(
            n=plan.group_size,
            max_tokens=plan.sampling.max_tokens,
            temperature=plan.sampling.temperature,
            seed=request_seed(self.config.seed, "train", group_id),
            options=sampling_options(plan.sampling, plan.sampling.stop),
            is_trained_on=True,
        )
        return await self.makers[plan.name].make_group(task, self.prompts.train[place], group_id, sampling)

    def _stage_batch(self, groups: list[Group], step: int, state: OrchestratorState) -> None:
        config = self.config
        rewards = [self.shaping.rewards(group) for group in groups]
        advantages = self.advantages(groups, rewards)
        batch = make_batch(groups, rewards, advantages, step, config.sampling.temperature)
        write_samples(self.run_dir.samples(step), groups, advantages)
        self.trainer.stage(replace(batch, orchestrator_state=state.encode()))

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
        } | self.policy.metrics()
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
        self.trainer.remove_trained(version)
        if self._is_evaluation_due(previous, version):
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
            what=f"the groups of step {step}: rollouts from {self.policy}, their scores, or weights after "
            f"version {version} from the trainer",
            timeout_s=self.config.weights_timeout_s,
            hint="see logs/inference.log and logs/trainer.log",
        )

    def _weights_deadline(self, version: int) -> Deadline:
        return Deadline(
            what=f"the trainer's weights {self.trainer.weights(version)}",
            timeout_s=self.config.weights_timeout_s,
            hint="is the trainer running? see logs/trainer.log",
        )
