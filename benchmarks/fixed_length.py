"""An environment for measuring `rl`: prompts of a given length in tokens, rewards that say nothing. Completions of a
model with random weights hardly ever end before max_tokens."""

import random
import zlib

from tandem.types.rollout import Task

NUM_TASKS = 4096


class FixedLength:
    """For a tokenizer whose tokens are the words w0, w1, … (`gpu_rollouts.make_model`)."""

    def __init__(self, prompt_tokens: int, vocab_size: int) -> None:
        draw = random.Random(0)

        def task(index: int) -> Task:
            words = " ".join(f"w{draw.randrange(3, vocab_size)}" for _ in range(prompt_tokens))
            return Task(index=index, messages=[{"role": "user", "content": words}], answer="")

        self.train_tasks = [task(index) for index in range(NUM_TASKS)]
        self.eval_tasks = [task(NUM_TASKS)]

    async def score(self, task: Task, completion: str) -> float:
        return zlib.crc32(completion.encode()) % 1000 / 1000
