"""One group: a task's prompt to the server, its completions to the judge."""

import asyncio

from tandem.data.tokenizer import Tokenizer
from tandem.envs.protocol import Environment
from tandem.orchestrator.client import InferenceClient
from tandem.types.rollout import Completion, Group, Rollout, Task


class RolloutMaker:
    def __init__(self, client: InferenceClient, environment: Environment, tokenizer: Tokenizer) -> None:
        self.client = client
        self.environment = environment
        self.tokenizer = tokenizer

    async def make_group(
        self, task: Task, order: int, *, n: int, max_tokens: int, temperature: float, seed: int
    ) -> Group:
        prompt_ids = self.tokenizer.encode_chat(task.messages, add_generation_prompt=True)
        completions = await self.client.generate(
            prompt_ids, n=n, max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        rollouts = await asyncio.gather(*(self._judge(task, prompt_ids, completion) for completion in completions))
        return Group(task, order, list(rollouts))

    async def _judge(self, task: Task, prompt_ids: list[int], completion: Completion) -> Rollout:
        text = self.tokenizer.decode(completion.token_ids)
        reward = float(await self.environment.score(task, text))
        return Rollout(prompt_ids, completion, text, reward)
