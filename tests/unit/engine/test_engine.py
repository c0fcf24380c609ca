"""The native engine against transformers, under schedules that make it chunk, preempt and recompute."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig

from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import EngineError, GeneratedSample, GenerationRequest, Sampling, UnusableWeights
from tandem.models.hf import copy_weights, named_tensors

EOS = 1
Generate = Callable[[NativeEngine, list[GenerationRequest]], list[list[GeneratedSample]]]
HoldAfter = Callable[[NativeEngine, int], threading.Event]
Start = Callable[[NativeEngine, GenerationRequest], "Future[list[GeneratedSample]]"]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(2, 64, length).tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_greedy_tokens_are_those_of_transformers(
    family: str, make_model: Callable[..., Path], make_engine: Callable[..., NativeEngine], generate: Generate
) -> None:
    prompts = [prompt_of(length) for length in (1, 5, 13, 22)]
    engine = make_engine(family)
    sampling = Sampling(max_tokens=12, temperature=0.0)
    results = generate(engine, [GenerationRequest(prompt, sampling) for prompt in prompts])
    model = AutoModelForCausalLM.from_pretrained(make_model(family), dtype=torch.float32).eval()
    greedy = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    for prompt, [sample] in zip(prompts, results, strict=True):
        expected = (
            cast(Any, model).generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :].tolist()
        )
        assert sample.token_ids == expected
        assert sample.finish_reason == ("stop" if expected[-1] == EOS else "length")


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(1, 20),  # max_tokens
        st.integers(1, 5),  # n
        st.sampled_from([0.0, 0.7, 1.0]),
        st.sampled_from([0, 5]),  # top_k
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=REQUESTS,
    tokens_per_step=st.sampled_from([1, 3, 16, 4096]),
    max_sequences=st.sampled_from([2, 7, 64]),
    kv_cache_tokens=st.sampled_from([68, 100, 4096]),
    deterministic=st.booleans(),
)
def test_logprobs_match_transformers_under_any_schedule(
    family: str,
    requests: list[tuple[int, int, int, float, int]],
    tokens_per_step: int,
    max_sequences: int,
    kv_cache_tokens: int,
    deterministic: bool,
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    generate: Generate,
    reference_logprobs: Callable[..., list[float]],
) -> None:
    engine = make_engine(
        family,
        tokens_per_step=tokens_per_step,
        max_sequences=max_sequences,
        kv_cache_tokens=kv_cache_tokens,
        deterministic=deterministic,
    )
    asked = [
        GenerationRequest(prompt_of(length, seed=i), Sampling(max_tokens, temperature, top_k=top_k, seed=i), n)
        for i, (length, max_tokens, n, temperature, top_k) in enumerate(requests)
    ]
    results = generate(engine, asked)
    for request, samples in zip(asked, results, strict=True):
        assert len(samples) == request.n
        for sample in samples:
            expected = reference_logprobs(
                make_model(family), request.prompt_ids, sample.token_ids, request.sampling.temperature
            )
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
            assert sample.versions == [0] * len(sample.token_ids)
            assert len(sample.token_ids) <= request.sampling.max_tokens
    engine.inspect(engine.core.scheduler.check_invariants)
    assert engine.core.scheduler.blocks.num_free == engine.core.scheduler.blocks.num_blocks
    engine.stop()


def test_tokens_do_not_depend_on_preemption(make_engine: Callable[..., NativeEngine], generate: Generate) -> None:
    asked = [
        GenerationRequest(prompt_of(9, i), Sampling(30, seed=i, ignore_eos=True, top_k=i), n=3, kept_tokens=True)
        for i in range(4)
    ]
    roomy = make_engine()
    tight = make_engine(kv_cache_tokens=80)
    preemptions = []
    requeue = tight.core.scheduler._requeue
    tight.core.scheduler._requeue = lambda slot: (preemptions.append(slot), requeue(slot))[1]
    told = [[(s.token_ids, left_of(s)) for s in samples] for samples in generate(tight, asked)]
    assert told == [[(s.token_ids, left_of(s)) for s in samples] for samples in generate(roomy, asked)]
    assert len(preemptions) > 0
    for top_k, samples in enumerate(told):
        assert all(len(left) == top_k for _, of_tokens in samples for left in of_tokens)


def left_of(sample: GeneratedSample) -> list[list[int]]:
    assert sample.kept_tokens is not None and len(sample.kept_tokens) == len(sample.token_ids)
    return [kept.token_ids.tolist() for kept in sample.kept_tokens]


def test_samples_of_a_prompt_are_prefilled_once_and_share_its_blocks(
    make_engine: Callable[..., NativeEngine], generate: Generate
) -> None:
    engine = make_engine()
    forwards: list[tuple[int, int]] = []  # tokens computed and logits made, blocks in use afterwards
    used: list[int] = []
    forward = engine.core.runner.forward

    def record(rows: Any, chunk: Any, wanted: Any) -> torch.Tensor:
        logits = forward(rows, chunk, wanted)
        forwards.append((int(chunk.sum()), len(logits)))
        used.append(engine.core.scheduler.blocks.num_blocks - engine.core.scheduler.blocks.num_free)
        return logits

    engine.core.runner.forward = record
    # 10 tokens in blocks of 4: two full blocks shared by all, the third of each sample its own.
    generate(engine, [GenerationRequest(prompt_of(10), Sampling(3, ignore_eos=True), n=6)])
    assert forwards == [(10, 1), (6, 6), (6, 6)]
    assert used == [2 + 6] * 3


def test_more_samples_than_fit_at_once_all_finish(make_engine: Callable[..., NativeEngine], generate: Generate) -> None:
    engine = make_engine(max_sequences=3, kv_cache_tokens=68)
    [samples] = generate(engine, [GenerationRequest(prompt_of(6), Sampling(5, ignore_eos=True), n=17)])
    assert [len(sample.token_ids) for sample in samples] == [5] * 17


def test_a_seed_repeats_and_samples_differ(make_engine: Callable[..., NativeEngine], generate: Generate) -> None:
    engine = make_engine()
    request = GenerationRequest(prompt_of(6), Sampling(12, seed=7, ignore_eos=True), n=4)
    [first], [again] = generate(engine, [request]), generate(engine, [request])
    assert [s.token_ids for s in first] == [s.token_ids for s in again]
    assert len({tuple(s.token_ids) for s in first}) > 1
    unseeded = GenerationRequest(prompt_of(6), Sampling(12, ignore_eos=True))
    [one], [two] = generate(engine, [unseeded, unseeded])
    assert one.token_ids != two.token_ids


def test_stop_tokens_end_a_sample_and_ignore_eos_does_not(
    make_engine: Callable[..., NativeEngine], generate: Generate
) -> None:
    engine = make_engine()
    prompt = prompt_of(8)
    [[free]] = generate(engine, [GenerationRequest(prompt, Sampling(10, 0.0, ignore_eos=True))])
    assert len(free.token_ids) == 10 and free.finish_reason == "length"
    stop = free.token_ids[4]
    upto = free.token_ids.index(stop) + 1
    sampling = Sampling(10, 0.0, stop_token_ids=(63, stop), ignore_eos=True)
    [[stopped]] = generate(engine, [GenerationRequest(prompt, sampling)])
    assert stopped.token_ids == free.token_ids[:upto] and stopped.finish_reason == "stop"


def test_pause_keeps_requests_waiting_and_resume_answers_them(
    make_engine: Callable[..., NativeEngine], start: Start
) -> None:
    engine = make_engine()
    engine.pause()
    future = start(engine, GenerationRequest(prompt_of(4), Sampling(2, ignore_eos=True)))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.2)
    assert engine.paused
    engine.resume()
    assert len(future.result(timeout=30)[0].token_ids) == 2


def test_a_cancelled_request_frees_its_blocks(
    make_engine: Callable[..., NativeEngine], start: Start, hold_after: HoldAfter
) -> None:
    engine = make_engine()
    blocks = engine.core.scheduler.blocks
    stepped = hold_after(engine, 3)
    cancelled: list[Any] = []
    request_id = engine.submit(GenerationRequest(prompt_of(9), Sampling(40, ignore_eos=True), n=3), cancelled.append)
    assert stepped.wait(30)
    held: list[int] = []
    engine.inspect(lambda: held.append(blocks.num_blocks - blocks.num_free))
    engine.cancel(request_id)
    engine.inspect(engine.core.scheduler.check_invariants)
    assert held[0] > 0 and blocks.num_free == blocks.num_blocks
    assert not cancelled
    engine.resume()
    waiting = start(engine, GenerationRequest(prompt_of(3), Sampling(1)))
    assert len(waiting.result(timeout=30)) == 1


def test_a_failing_engine_answers_everyone(make_engine: Callable[..., NativeEngine], start: Start) -> None:
    engine = make_engine()
    told: list[str] = []
    engine._on_failure = told.append
    engine.pause()
    futures = [start(engine, GenerationRequest(prompt_of(4), Sampling(4))) for _ in range(3)]

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    cast(Any, engine.core.runner).forward = broken
    engine.resume()
    for future in futures:
        with pytest.raises(EngineError, match="out of luck"):
            future.result(timeout=30)
    with pytest.raises(EngineError, match="out of luck"):
        start(engine, GenerationRequest(prompt_of(4), Sampling(4))).result(timeout=30)
    with pytest.raises(EngineError, match="out of luck"):
        engine.pause()
    engine._thread.join(30)
    assert engine.failure is not None and told == [engine.failure]
    engine.core.scheduler.requeue_all()


def test_stopping_answers_what_still_waits(make_engine: Callable[..., NativeEngine], start: Start) -> None:
    engine = make_engine()
    engine.pause()
    future = start(engine, GenerationRequest(prompt_of(4), Sampling(4)))
    engine.stop()
    with pytest.raises(EngineError, match="shutting down"):
        future.result(timeout=30)


def test_logits_that_are_no_numbers_are_an_error_and_poison_nobody_else(
    make_engine: Callable[..., NativeEngine], generate: Generate
) -> None:
    engine = make_engine()
    healthy = GenerationRequest(prompt_of(8), Sampling(6, 0.0, ignore_eos=True))
    before = generate(engine, [healthy])
    tensors = {name: tensor.clone() for name, tensor in named_tensors(engine.core.decoder).items()}

    def diverge() -> None:
        engine.core.decoder.get_parameter("layers.0.mlp.down_proj.weight").fill_(torch.nan)

    engine.inspect(diverge)
    with pytest.raises(UnusableWeights, match="version 0"):
        generate(engine, [GenerationRequest(prompt_of(30), Sampling(6), n=3)])
    engine.inspect(lambda: engine.core.swap_weights(lambda: copy_weights(engine.core.decoder, tensors), 1))
    after = generate(engine, [healthy])
    assert after[0][0].logprobs == before[0][0].logprobs
