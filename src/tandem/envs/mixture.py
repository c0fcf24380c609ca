"""Several environments as one: each in a process of its own, told apart by the name that their tasks carry."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from tandem.envs.config import EnvPlan
from tandem.envs.process import EnvironmentProcess, open_environment
from tandem.envs.protocol import Environment, ModelProxy, Score
from tandem.envs.results import Result
from tandem.types.rollout import Task


class Mixture:
    """The tasks of each environment lie together, in the order of the configuration."""

    def __init__(self, environments: Mapping[str, EnvironmentProcess]) -> None:
        self.environments = environments
        self.train_tasks = [task for one in environments.values() for task in one.train_tasks]
        self.eval_tasks = [task for one in environments.values() for task in one.eval_tasks]

    async def score(self, task: Task, completion: str) -> Score:
        return await self.environments[task.environment].score(task, completion)

    async def play(self, task: Task, model: ModelProxy) -> Result:
        return await self.environments[task.environment].play(task, model)


def costs_of(environment: Environment) -> dict[str, float]:
    """What rewards have cost so far, as metrics."""
    if isinstance(environment, Mixture):
        environments = environment.environments.items()
        return {f"{name}/{key}": value for name, one in environments for key, value in costs_of(one).items()}
    if not isinstance(environment, EnvironmentProcess):
        return {}
    return {f"reward/{name}": value for name, value in environment.costs.items()}


@asynccontextmanager
async def open_environments(plans: Mapping[str, EnvPlan]) -> AsyncIterator[EnvironmentProcess | Mixture]:
    """What the configuration names, one environment without a name or several, ended with the block."""
    async with AsyncExitStack() as stack:
        opened = {
            name: await stack.enter_async_context(open_environment(plan.env, name)) for name, plan in plans.items()
        }
        yield opened[""] if "" in opened else Mixture(opened)
