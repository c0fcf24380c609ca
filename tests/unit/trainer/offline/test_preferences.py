"""Rows of preferences as batches."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.data.tokenizer import Tokenizer
from tandem.trainer.offline.preferences import BAD, GOOD, AlignBatch, AlignRow, encode_align_row, mismatches, scored
from tandem.types.rollout import TrainingSequence


def sample(prompt: list[int], completion: list[int]) -> TrainingSequence:
    return TrainingSequence(prompt + completion, [0] * len(prompt) + [1] * len(completion))


def pair(prompt: list[int], chosen: list[int], rejected: list[int], margin: float = 0.0) -> AlignRow:
    return AlignRow((sample(prompt, chosen), sample(prompt, rejected)), (GOOD, BAD), margin)


def labeled(prompt: list[int], completion: list[int], label: float) -> AlignRow:
    return AlignRow((sample(prompt, completion),), (label,))


def test_every_token_knows_its_label_margin_and_reference() -> None:
    rows = [pair([1, 2], [3, 4], [5], margin=0.5), pair([1, 6], [7], [8, 9, 10], margin=2.0)]
    reference = [
        (np.array([-1, -2], dtype=np.float32), np.array([-3], dtype=np.float32)),
        (np.array([-4], dtype=np.float32), np.array([-5, -6, -7], dtype=np.float32)),
    ]
    rows = [AlignRow(row.samples, row.labels, row.margin, part) for row, part in zip(rows, reference, strict=True)]
    batch = AlignBatch.of(rows)
    assert batch.num_rows == 2
    assert batch.packed.token_ids[batch.packed.targets].tolist() == [3, 4, 5, 7, 8, 9, 10]
    assert batch.packed.streams["labels"].tolist() == [1, 1, 0, 1, 0, 0, 0]
    assert batch.packed.streams["margins"].tolist() == [0.5, 0.5, 0.5, 2, 2, 2, 2]
    assert batch.packed.streams["reference_logprobs"].tolist() == [-1, -2, -3, -4, -5, -6, -7]
    assert batch.mean_chosen_length == 1.5  # of 2 tokens and 1
    assert batch.packed.num_tokens == 2 + 3 + 2 + 4  # both prompts are there once


PROMPTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)
COMPLETIONS = st.lists(st.integers(51, 99), min_size=1, max_size=6)


@settings(max_examples=50)
@given(
    rows=st.lists(st.tuples(PROMPTS, COMPLETIONS, COMPLETIONS), min_size=1, max_size=8),
    world_size=st.integers(1, 3),
    bound=st.integers(24, 60),
)
def test_pairs_stay_together_however_the_step_is_divided(rows: list, world_size: int, bound: int) -> None:
    """In every micro-batch sequence 2i is the chosen one and 2i + 1 the rejected one of one row: as labels tell."""
    batch = AlignBatch.of([pair(*row, margin=float(number)) for number, row in enumerate(rows)])
    seen = []
    for micro_batch in (part for rank in range(world_size) for part in batch.divide(rank, world_size, bound)):
        assert micro_batch.num_sequences % 2 == 0
        is_chosen = micro_batch.sequences % 2 == 0
        assert np.array_equal(micro_batch.streams["labels"], is_chosen.astype(np.float32))
        for number in range(0, micro_batch.num_sequences, 2):
            both = (micro_batch.sequences // 2) == number // 2
            margins = np.unique(micro_batch.streams["margins"][both])
            assert len(margins) == 1
            seen.append(int(margins[0]))
    assert sorted(seen) == list(range(len(rows)))


def test_mismatched_completions_come_from_the_next_row_with_another_prompt() -> None:
    rows = [labeled([1], [11], GOOD), labeled([1], [12], BAD), labeled([2], [21, 22], GOOD), labeled([3], [31], BAD)]
    found = [row.samples[0] for row in mismatches(rows)]
    assert [one.token_ids for one in found] == [[1, 21, 22], [1, 21, 22], [2, 31], [3, 11]]
    assert [one.loss_mask for one in found] == [[0, 1, 1], [0, 1, 1], [0, 1], [0, 1]]


def test_mismatched_completions_stay_within_seq_len() -> None:
    rows = [labeled([1, 2, 3], [11], GOOD), labeled([2], [21, 22, 23], GOOD)]
    found = [row.samples[0] for row in mismatches(rows, seq_len=4)]
    assert found == [TrainingSequence([1, 2, 3, 21], [0, 0, 0, 1]), TrainingSequence([2, 11], [0, 1])]


def test_mismatched_completions_of_pairs_come_in_pairs() -> None:
    rows = [pair([1], [11], [12]), pair([2], [21], [22]), pair([3], [31], [32])]
    found = [row.samples[0].token_ids for row in mismatches(rows)]
    assert found == [[1, 21], [1, 22], [2, 31], [2, 32], [3, 11], [3, 12]]


def test_without_another_prompt_nothing_is_mismatched() -> None:
    assert mismatches([labeled([1], [11], GOOD), labeled([1], [12], BAD)]) == []
    assert mismatches([labeled([1], [11], GOOD)]) == []


def test_a_reward_model_reads_all_after_the_prompt_and_one_token_more() -> None:
    """The last token, which closes the turn and is not learned by others, is scored too."""
    row = scored(AlignRow((TrainingSequence([1, 2, 3, 4], [0, 0, 1, 0]),), (GOOD,), margin=0.5))
    assert row.samples[0] == TrainingSequence([1, 2, 3, 4, 4], [0, 0, 1, 1, 1])
    assert row.margin == 0.5


def test_a_reward_model_reads_up_to_the_last_token_that_is_no_padding() -> None:
    samples = (TrainingSequence([1, 2, 3, 4, 4], [0, 0, 1, 1, 0]), TrainingSequence([1, 2, 4], [0, 0, 1]))
    row = scored(AlignRow(samples, (GOOD, BAD)), padding=4)
    assert row.samples == (TrainingSequence([1, 2, 3, 3], [0, 0, 1, 1]), TrainingSequence([1, 2, 2], [0, 0, 1]))


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


PAIR = {"prompt": "abc", "chosen": "cba", "rejected": "abc", "margin": 1.5}
LABELED = {"prompt": "abc", "completion": "cba", "label": False}


def completion(tokenizer: Tokenizer, encoded: TrainingSequence) -> str:
    learned = [token for token, mask in zip(encoded.token_ids, encoded.loss_mask, strict=True) if mask]
    return tokenizer.decode(learned, skip_special_tokens=False)


def encode(row: dict, tokenizer: Tokenizer, loss_type: str) -> AlignRow:
    return encode_align_row(row, lambda each: each, tokenizer, AlignLossConfig(type=loss_type))


def test_rows_as_the_objectives_take_them(tokenizer: Tokenizer) -> None:
    dpo = encode(PAIR, tokenizer, "dpo")
    assert [completion(tokenizer, each) for each in dpo.samples] == ["cba<|im_end|>", "abc<|im_end|>"]
    assert (dpo.labels, dpo.margin) == ((GOOD, BAD), 0.0)
    kto = encode(LABELED, tokenizer, "kto")
    assert ([completion(tokenizer, each) for each in kto.samples], kto.labels) == (["cba<|im_end|>"], (BAD,))
    assert encode(PAIR, tokenizer, "bco") == dpo
    reward = encode(PAIR, tokenizer, "reward")
    assert [completion(tokenizer, each) for each in reward.samples] == ["cba<|im_end|>\n\n", "abc<|im_end|>\n\n"]
    assert reward.margin == encode(PAIR | {"margin": "1.5"}, tokenizer, "reward").margin == 1.5


@pytest.mark.parametrize(
    ("row", "loss_type", "message"),
    [
        (LABELED, "dpo", "'chosen'"),
        ({"prompt": "abc", "completion": "cba"}, "kto", "'label'"),
        (PAIR | {"margin": "nan"}, "reward", "'margin' must be a number; it is nan"),
        (PAIR | {"margin": "large"}, "reward", "'margin' must be a number; it is 'large'"),
        (PAIR | {"margin": math.nan}, "reward", "'margin' must be a number; it is nan"),
        (PAIR | {"margin": -math.inf}, "reward", "'margin' must be a number; it is -inf"),
        (PAIR | {"margin": 10**39}, "reward", "'margin' must be a number; it is 1000"),
        (PAIR | {"margin": True}, "reward", "'margin' must be a number; it is True"),
    ],
)
def test_rows_that_do_not_fit_the_objective(tokenizer: Tokenizer, row: dict, loss_type: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(row, tokenizer, loss_type)
