"""Opens the environments of a run: do they score at all, and do their episodes make rollouts to train on?

Episodes are played through the conversation of a run (orchestrator/conversations.py), with a model that always says the
same. So messages that make no prompt, tools the model cannot use and conversations beyond seq_len are found here.
Called by `rl`, before anything starts, and by the orchestrator."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.commands.orchestrator import EnvPlan, OrchestratorConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.mixture import Mixture, open_environments
from tandem.envs.process import EnvironmentProcess, HeldTask
from tandem.envs.trial import TurnCount, try_environment
from tandem.isolation.failures import Failure, UserCodeError
from tandem.orchestrator.conversations import ChatFormat, Conversation
from tandem.orchestrator.tasks import Prompts, encode_prompts
from tandem.types.rollout import Completion, SamplingRequest


class ScriptedPolicy:
    """Completes every prompt by the same text, which is cut off where it is too long."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.token_ids = [*tokenizer.encode(text), *tokenizer.eos_token_ids[:1]]
        self.turns = TurnCount(text)

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        self.turns.add()
        token_ids = self.token_ids[: sampling.max_tokens]
        finish_reason = "stop" if len(token_ids) == len(self.token_ids) else "length"
        return [Completion(token_ids, [-1.0] * len(token_ids), [0] * len(token_ids), finish_reason)]


@asynccontextmanager
async def open_tried(
    config: OrchestratorConfig, tokenizer: Tokenizer, *, evaluates: bool = True
) -> AsyncIterator[tuple[EnvironmentProcess | Mixture, Prompts]]:
    """The environments with their prompts, ended with the block; UserError where a run could not use them."""
    async with open_environments(config.plans) as environment:
        prompts = encode_prompts(environment, tokenizer, config, evaluates=evaluates)
        await try_environments(environment, config, tokenizer)
        yield environment, prompts


async def try_environments(
    environment: EnvironmentProcess | Mixture, config: OrchestratorConfig, tokenizer: Tokenizer
) -> None:
    """UserError where one of them fails."""
    chat_format = ChatFormat(tokenizer, config.seq_len)
    for name, plan in config.plans.items():
        one = environment.environments[name] if isinstance(environment, Mixture) else environment
        await try_environment(one, plan.env, Rehearsal(one, chat_format, plan))


class Rehearsal:
    """Plays episodes of one environment as the orchestrator would."""

    def __init__(self, environment: EnvironmentProcess, chat_format: ChatFormat, plan: EnvPlan) -> None:
        self.environment = environment
        self.format = chat_format
        self.sampling = SamplingRequest(1, plan.sampling.max_tokens, plan.sampling.temperature, seed=0)

    async def __call__(self, task: HeldTask, text: str) -> None:
        """UserCodeError where the episode fails, or makes no rollout."""
        conversation = Conversation(ScriptedPolicy(self.format.tokenizer, text), self.format, self.sampling)
        result = await self.environment.play(task, conversation)
        try:
            conversation.rollout(result, len(task.messages))
        except ValueError as error:
            raise UserCodeError(Failure(str(error))) from error
