"""Blocks known by their content: who shares them, what is computed, and that nothing stale is ever served."""

import queue
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.engine.blocks import BlockManager, block_keys
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GeneratedSample, GenerationRequest, GenerationResult, Sampling
from tandem.utils.manifest import write_manifest

Generate = Callable[[NativeEngine, list[GenerationRequest]], list[list[GeneratedSample]]]
GREEDY = Sampling(4, 0.0, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(2, 64, length).tolist()


def result_of(engine: NativeEngine, request: GenerationRequest) -> GenerationResult:
    answers: queue.Queue[GenerationResult | Exception] = queue.Queue()
    engine.submit(request, answers.put)
    answer = answers.get(timeout=30)
    assert isinstance(answer, GenerationResult)
    return answer


def test_keys_stand_for_everything_before_them() -> None:
    keys = block_keys(np.arange(9), 4, b"")
    assert len(keys) == 2
    assert keys[1:] == block_keys(np.arange(4, 9), 4, keys[0])
    changed = np.arange(9)
    changed[0] = 7
    assert not set(keys) & set(block_keys(changed, 4, b""))
    assert not set(keys) & set(block_keys(np.arange(9), 4, b"another root"))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["start", "finish", "forget"]), st.integers(0, 9), st.integers(1, 5)), max_size=80
)


@given(actions=ACTIONS)
def test_cached_blocks_always_hold_what_their_key_says(actions: list[tuple[str, int, int]]) -> None:
    """Sequences over few distinct prompts come and go; `content` plays the cache's memory."""
    blocks = BlockManager(num_blocks=8, block_size=4)
    content: dict[int, tuple[int, int]] = {}
    held: list[np.ndarray] = []
    for action, number, length in actions:
        if action == "start":
            keys = [bytes([number, index]) for index in range(length)]
            found = blocks.find(keys)
            assert [content[block] for block in found.tolist()] == [(number, i) for i in range(len(found))]
            if length - len(found) + blocks.num_idle(found) > blocks.num_free:
                continue
            blocks.share(found)
            rest = blocks.allocate(length - len(found))
            content.update({block: (number, len(found) + i) for i, block in enumerate(rest.tolist())})
            table = np.concatenate([found, rest])
            blocks.keep_as(table, keys)
            held.append(table)
        elif action == "finish" and held:
            blocks.release(held.pop(number % len(held)))
        elif action == "forget":
            blocks.forget()
        blocks.check_invariants(held)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    blocks = BlockManager(num_blocks=3, block_size=4)
    table = blocks.allocate(3)
    blocks.keep_as(table, [b"a", b"b", b"c"])
    blocks.release(table)
    blocks.allocate(1)
    assert blocks.find([b"a", b"b", b"c"]).tolist() == table[:2].tolist()


def test_a_later_request_computes_only_what_is_new(make_engine: Callable[..., NativeEngine]) -> None:
    engine = make_engine()  # blocks of 4
    prompt = prompt_of(18)
    first = result_of(engine, GenerationRequest(prompt, GREEDY))
    again = result_of(engine, GenerationRequest(prompt, GREEDY, n=3))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
    assert [sample.token_ids for sample in again.samples] == [first.samples[0].token_ids] * 3
    branch = result_of(engine, GenerationRequest(prompt[:10] + prompt_of(8, 1), GREEDY))
    assert branch.num_cached_tokens == 8
    # All of a cached prompt but its last block: the last token must be computed, to draw from.
    assert result_of(engine, GenerationRequest(prompt[:16], GREEDY)).num_cached_tokens == 12
    assert engine.stats.cached_prompt_tokens == 16 + 8 + 12


def test_log_probs_of_a_prompt_are_whole_though_it_is_cached(make_engine: Callable[..., NativeEngine]) -> None:
    engine = make_engine()
    asked = GenerationRequest(prompt_of(18), GREEDY, prompt_logprobs=0)
    first = result_of(engine, asked)
    again = result_of(engine, asked)
    assert first.prompt_logprobs is not None and again.prompt_logprobs is not None
    assert [entry.token_id for entry in again.prompt_logprobs] == asked.prompt_ids[1:]
    expected = [entry.logprob for entry in first.prompt_logprobs]
    assert [entry.logprob for entry in again.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


def test_the_next_turn_shares_what_was_generated(make_engine: Callable[..., NativeEngine]) -> None:
    engine = make_engine()
    prompt = prompt_of(6)
    [sample] = result_of(engine, GenerationRequest(prompt, Sampling(11, seed=1, ignore_eos=True))).samples
    turn = prompt + sample.token_ids + prompt_of(3)
    # 6 + 10 tokens were computed: the last one drawn never was.
    assert result_of(engine, GenerationRequest(turn, GREEDY)).num_cached_tokens == 16


def test_new_weights_forget_the_cache(
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    reference_logprobs: Callable[..., list[float]],
) -> None:
    engine = make_engine()
    prompt = prompt_of(20)
    result_of(engine, GenerationRequest(prompt, GREEDY))
    write_manifest(make_model(seed=1), 1)
    engine.update_weights(make_model(seed=1), 1)
    after = result_of(engine, GenerationRequest(prompt, GREEDY))
    assert after.num_cached_tokens == 0
    [sample] = after.samples
    expected = reference_logprobs(make_model(seed=1), prompt, sample.token_ids)
    assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    engine.reset_prefix_cache()
    assert result_of(engine, GenerationRequest(prompt, GREEDY)).num_cached_tokens == 0


def test_deterministic_engines_share_only_what_cannot_change_a_bit(make_engine: Callable[..., NativeEngine]) -> None:
    request = GenerationRequest(prompt_of(20), GREEDY)
    exact = make_engine(deterministic=True)
    first, again = result_of(exact, request), result_of(exact, request)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 16)
    assert first.samples == again.samples  # floats compared exactly
    other = make_engine("llama", deterministic=True)  # its heads are too small for exact mode
    assert [result_of(other, request).num_cached_tokens for _ in range(2)] == [0, 0]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 4)), min_size=2, max_size=10),
    kv_cache_tokens=st.sampled_from([68, 100, 400]),
    tokens_per_step=st.sampled_from([3, 4096]),
)
def test_logprobs_do_not_depend_on_cache_hits(
    shapes: list[tuple[int, int, int]],
    kv_cache_tokens: int,
    tokens_per_step: int,
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    generate: Generate,
    reference_logprobs: Callable[..., list[float]],
) -> None:
    """Prompts that begin alike, in two rounds, in caches that hold little or much."""
    engine = make_engine(kv_cache_tokens=kv_cache_tokens, tokens_per_step=tokens_per_step)
    stems = [prompt_of(40, stem) for stem in range(3)]
    asked = [
        GenerationRequest(stems[stem][:length], Sampling(6, seed=i, ignore_eos=True), n)
        for i, (stem, length, n) in enumerate(shapes)
    ]
    for half in (asked[: len(asked) // 2], asked):
        for request, samples in zip(half, generate(engine, half), strict=True):
            for sample in samples:
                expected = reference_logprobs(make_model(), request.prompt_ids, sample.token_ids)
                assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    engine.inspect(engine.core.scheduler.check_invariants)
    assert engine.core.scheduler.blocks.num_free == engine.core.scheduler.blocks.num_blocks
    engine.stop()
