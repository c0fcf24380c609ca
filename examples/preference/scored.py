"""Reverse-text with a reward model: a reward server scores completions, instead of a comparison with the answer.

rl @ examples/reverse_text/rl.toml --orchestrator.env.id examples/preference/scored.py:Scored \
    --orchestrator.env.args '{"reward_url": "http://127.0.0.1:8001"}'
"""

from tandem.envs.reverse_text import ReverseText, ReverseTextArgs
from tandem.rewards.server_client import RewardClient
from tandem.types.rollout import Task


class ScoredArgs(ReverseTextArgs):
    reward_url: str
    api_key_var: str | None = None


class Scored(ReverseText):
    Args = ScoredArgs
    args: ScoredArgs

    async def score(self, task: Task, completion: str) -> float:
        async with RewardClient(self.args.reward_url, api_key_var=self.args.api_key_var) as client:
            return await client.score([*task.messages, {"role": "assistant", "content": completion}])
