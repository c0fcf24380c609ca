"""Reference log-probs: what the model says, found again by what the samples say, computed once."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.config.shared import ModelConfig
from tandem.data.packing import pack
from tandem.trainer.model.memory import MicroBatchSize
from tandem.trainer.offline.preferences import BAD, GOOD, AlignRow
from tandem.trainer.offline.reference import place_stream, places_in, precompute, sample_key
from tandem.types.rollout import PackedBatch, TrainingSequence


@pytest.fixture
def rows(make_samples) -> list[AlignRow]:
    found = [TrainingSequence(each.token_ids, each.loss_mask) for each in make_samples(0, num_prompts=5, group_size=2)]
    return [AlignRow((found[i], found[i + 1]), (GOOD, BAD)) for i in range(0, len(found), 2)]


def test_each_sample_gets_the_log_probs_of_its_own_tokens(make_stepper, rows, tiny_model, tmp_path):
    """In batches of several sizes, with rows that come again, against each sample alone."""
    stepper = make_stepper()
    batches = [rows[:3], [], rows[2:4], rows[:2], rows[4:]]
    size = MicroBatchSize(stepper, 30, least=30)
    found = precompute(stepper, batches, ModelConfig(name=tiny_model), size, tmp_path / "cache").attach(reversed(rows))
    for row, original in zip(found, reversed(rows), strict=True):
        assert row.reference is not None and row.samples == original.samples
        for logprobs, sample in zip(row.reference, row.samples, strict=True):
            with torch.no_grad():
                alone = stepper.predict(pack([sample])).logprobs.numpy()
            np.testing.assert_allclose(logprobs, alone, atol=1e-5)


def test_the_cache_stands_for_the_same_model_and_the_same_rows(make_stepper, rows, tiny_model, tmp_path):
    model_dir, cache = tmp_path / "model", tmp_path / "reference.safetensors"
    shutil.copytree(tiny_model, model_dir)
    model = ModelConfig(name=model_dir)
    stepper = make_stepper()
    size = MicroBatchSize(stepper, 1000, least=1000)
    asked = []
    stepper.predict = lambda *arguments, ask=stepper.predict: asked.append(1) or ask(*arguments)
    first = precompute(stepper, [rows], model, size, cache)
    assert len(asked) == 1
    again = precompute(stepper, [rows], model, size, cache)
    assert len(asked) == 1, "the cache was not used"
    for key, logprobs in first.logprobs.items():
        np.testing.assert_array_equal(logprobs, again.logprobs[key])

    precompute(stepper, [rows[:-1]], model, size, cache)
    assert len(asked) == 2, "other rows have another reference"
    precompute(stepper, [rows[:-1]], ModelConfig(name=model_dir, dtype="bfloat16"), size, cache)
    assert len(asked) == 3, "another precision gives another reference"
    precompute(stepper, [rows[:-1]], model, size, cache)
    assert len(asked) == 4
    os.utime(model_dir / "model.safetensors", ns=(0, 0))
    precompute(stepper, [rows[:-1]], model, size, cache)
    assert len(asked) == 5, "other weights have another reference"
    replacement = model_dir / "replacement"
    shutil.copyfile(model_dir / "model.safetensors", replacement)
    os.utime(replacement, ns=(0, 0))  # as `cp -p` and rsync do
    replacement.replace(model_dir / "model.safetensors")
    precompute(stepper, [rows[:-1]], model, size, cache)
    assert len(asked) == 6, "another file of the same size and mtime was taken for the old one"
    cache.write_bytes(cache.read_bytes()[:-8])
    precompute(stepper, [rows[:-1]], model, size, cache)
    assert len(asked) == 7, "a damaged cache was believed"


def test_a_size_that_does_not_fit_is_lowered_and_all_is_computed_anew(make_stepper, rows, tiny_model, tmp_path):
    """Or some rows would have been computed in other company than theirs in the steps that follow."""
    model = ModelConfig(name=tiny_model)
    known = MicroBatchSize(make_stepper(), 1000, least=1000)
    expected = precompute(known.stepper, [rows], model, known, tmp_path / "expected")
    stepper = make_stepper()
    size = MicroBatchSize(stepper, 0, least=16)
    sizes = []

    def bounded(batch: PackedBatch, *arguments, ask=stepper.predict):
        sizes.append(batch.num_tokens)
        if batch.num_tokens > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ask(batch, *arguments)

    stepper.predict = bounded
    found = precompute(stepper, [rows[:1], rows], model, size, tmp_path / "cache")
    assert size.tokens <= 40 < max(sizes) and sizes.count(sizes[0]) > 1
    for key, logprobs in expected.logprobs.items():
        np.testing.assert_allclose(found.logprobs[key], logprobs, atol=1e-5)


def test_places_are_told_apart_beyond_what_float32_counts() -> None:
    stream = place_stream(2**24 + 4)
    chosen = [0, 5, 2**24 - 1, 2**24, 2**24 + 1, 2**24 + 3]
    assert places_in(stream[chosen]).tolist() == chosen and stream.dtype == np.float32


def test_samples_are_told_apart_by_tokens_and_by_mask() -> None:
    keys = {
        sample_key(TrainingSequence(ids, mask))
        for ids, mask in [([1, 2, 3], [0, 1, 1]), ([1, 2, 4], [0, 1, 1]), ([1, 2, 3], [0, 0, 1]), ([1, 2], [0, 1])]
    }
    assert len(keys) == 4
    assert sample_key(TrainingSequence([1, 2], [0, 1])) == sample_key(
        TrainingSequence([1, 2], [0, 1], {"place": [0.0, 1.0]})
    )


def test_nothing_of_the_cache_path_is_left_behind(make_stepper, rows, tiny_model, tmp_path: Path) -> None:
    stepper = make_stepper()
    size = MicroBatchSize(stepper, 1000, least=1000)
    precompute(stepper, [rows], ModelConfig(name=tiny_model), size, tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
