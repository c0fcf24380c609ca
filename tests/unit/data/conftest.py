from collections.abc import Callable

import pytest

from tandem.data.packing import pack
from tandem.types.rollout import TrainBatch, TrainingSequence


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    def make(step: int = 1, shapes: tuple[tuple[int, int], ...] = ((2, 3), (1, 2))) -> TrainBatch:
        """Sequences of given numbers of prompt and learned tokens."""
        samples = [
            TrainingSequence(
                token_ids=[number * 100 + position for position in range(num_prompt + num_learned)],
                loss_mask=[0] * num_prompt + [1] * num_learned,
                streams={
                    "advantages": [number / 3] * (num_prompt + num_learned),
                    "logprobs": [-position / 7 for position in range(num_prompt + num_learned)],
                },
                kept=[()] * num_prompt + [range(number * position) for position in range(num_learned)],
            )
            for number, (num_prompt, num_learned) in enumerate(shapes)
        ]
        return TrainBatch(step, 2 / 3, pack(samples))

    return make
