"""What is asked of the server: seeds that depend on the task alone, and prompts that fit."""

import hashlib

from tandem.config.orchestrator import OrchestratorConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.protocol import Environment
from tandem.utils.errors import UserError


def request_seed(seed: int, purpose: str, order: int) -> int:
    """A seed for one request, the same in every run with the same seed, whatever ran before."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{order}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_prompts(environment: Environment, tokenizer: Tokenizer, config: OrchestratorConfig) -> None:
    """Refuse tasks that cannot fit, before anything starts."""
    for name, tasks in (("training", environment.train_tasks), ("held-out", environment.eval_tasks)):
        if not tasks:
            raise UserError(f"env.id = {config.env.id!r} has no {name} tasks")
        for task in tasks:
            num_tokens = len(tokenizer.encode_chat(task.messages, add_generation_prompt=True))
            needed = num_tokens + config.sampling.max_tokens
            if needed > config.seq_len:
                raise UserError(
                    f"seq_len = {config.seq_len} is too short: the prompt of {name} task {task.index} has "
                    f"{num_tokens} tokens, and sampling.max_tokens = {config.sampling.max_tokens} more are allowed; "
                    f"the smallest seq_len that fits it is {needed}"
                )
