"""The native engine against transformers on a real model, SmolLM2-135M-Instruct in float32."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tandem.config.inference import InferenceConfig
from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer
from tandem.engine.build import build_engine
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GenerationRequest, GenerationResult, Sampling

QUESTIONS = [
    "What is the capital of France?", "Write a haiku about autumn.", "Explain gravity to a child.", "2 + 2 =",
    "Translate 'good morning' into Spanish.", "Name three primary colours.", "Why is the sky blue?",
    "Give me a recipe for pancakes.", "Who wrote Hamlet?", "List the planets of the solar system.",
]  # fmt: skip
OPENINGS = [
    "Once upon a time", "def fibonacci(n):", "The quick brown fox", "In 1969, humans", "import numpy as np\n",
    "Dear Sir or Madam,", "SELECT name FROM", "Été à Paris :", "日本の首都は", "1, 1, 2, 3, 5, 8,",
    "<html>\n<body>", "The meaning of life is", "Roses are red,", "To be, or not to be", "E = mc",
    "A list of fruits:\n- apple\n-", "Q: What is 7 times 8?\nA:", "🙂 🙃", "\tindented", "ALL CAPS TEXT",
]  # fmt: skip
NEW_TOKENS = 16
Running = Callable[..., AbstractContextManager[NativeEngine]]
Reference = Callable[[list[int], list[int]], tuple[list[int], list[float]]]
ENDLESS = Sampling(6, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(smollm2_model: Path) -> Tokenizer:
    return Tokenizer(smollm2_model)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Fifty: plain text short and long, and chats with and without a system prompt."""
    chats = [
        tokenizer.encode_chat([*system, {"role": "user", "content": question}], add_generation_prompt=True)
        for question in QUESTIONS
        for system in ([], [{"role": "system", "content": "Answer in one short sentence."}])
    ]
    plain = [tokenizer.encode(text) for text in OPENINGS]
    long = [tokenizer.encode(f"{text} " * (3 + 2 * i)) for i, text in enumerate(QUESTIONS)]
    return chats + plain + long


@pytest.fixture(scope="module")
def reference(smollm2_model: Path) -> Reference:
    """What transformers says of the tokens that follow a prompt: which would have been the likeliest, and the log-probs
    of those that came. The same sequence is computed once, however many schedules it comes from."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_model, dtype=torch.float32).eval()

    @functools.cache
    def read(prompt: tuple[int, ...], following: tuple[int, ...]) -> tuple[list[int], list[float]]:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + following]), logits_to_keep=len(following) + 1).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(following)[:, None])[:, 0]
        return logits.argmax(-1).tolist(), logprobs.tolist()

    return lambda prompt, following: read(tuple(prompt), tuple(following))


@pytest.fixture(scope="module")
def running(smollm2_model: Path, tokenizer: Tokenizer) -> Running:
    """`with running(**options) as engine`: none outlives its block, for each has weights of its own."""

    @contextmanager
    def run(**options: Any) -> Iterator[NativeEngine]:
        base = {"model": {"name": smollm2_model}, "seq_len": 256, "check_invariants": True, "kv_cache_tokens": 8192}
        config = InferenceConfig.model_validate(base | options)
        engine = build_engine(config, tokenizer.eos_token_ids, functools.partial(TextStream, tokenizer), print)
        engine.start()
        yield engine
        engine.stop()

    return run


def generate(engine: NativeEngine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    futures: list[Future[Any]] = [Future() for _ in requests]
    for request, future in zip(requests, futures, strict=True):
        engine.submit(request, future.set_result)
    return [future.result(timeout=300) for future in futures]


def test_greedy_tokens_are_those_of_transformers_on_fifty_prompts(
    running: Running, reference: Reference, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    """Each token is the likeliest after those before it: so are all that transformers would generate, at the cost of
    one pass instead of one for every token."""
    assert len(prompts) == 50
    requests = [GenerationRequest(prompt, Sampling(NEW_TOKENS, 0.0)) for prompt in prompts]
    with running() as engine:
        results = generate(engine, requests)
    reasons = set()
    for prompt, result in zip(prompts, results, strict=True):
        [sample] = result.samples
        likeliest, _ = reference(prompt, sample.token_ids)
        assert sample.token_ids == likeliest
        is_eos = [token in tokenizer.eos_token_ids for token in sample.token_ids]
        assert any(is_eos) == (sample.finish_reason == "stop") and not any(is_eos[:-1])
        assert len(sample.token_ids) == NEW_TOKENS or sample.finish_reason == "stop"
        reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.tuples(st.integers(0, 49), st.integers(1, 3)), min_size=1, max_size=6),
    tokens_per_step=st.sampled_from([7, 32, 8192]),
    max_sequences=st.sampled_from([2, 5, 64]),
    kv_cache_tokens=st.sampled_from([272, 400, 8192]),
    block_size=st.sampled_from([4, 16]),
    deterministic=st.booleans(),
)
def test_logprobs_do_not_depend_on_the_schedule(
    chosen: list[tuple[int, int]],
    tokens_per_step: int,
    max_sequences: int,
    kv_cache_tokens: int,
    block_size: int,
    deterministic: bool,
    running: Running,
    reference: Reference,
    prompts: list[list[int]],
) -> None:
    """Batch sizes, chunks, preemptions, and in the second round cache hits."""
    requests = [GenerationRequest(prompts[at], ENDLESS, n) for at, n in chosen]
    with running(
        tokens_per_step=tokens_per_step,
        max_sequences=max_sequences,
        kv_cache_tokens=kv_cache_tokens,
        block_size=block_size,
        deterministic=deterministic,
    ) as engine:
        rounds = [generate(engine, requests), generate(engine, requests)]
    for results in rounds:
        for request, result in zip(requests, results, strict=True):
            for sample in result.samples:
                _, expected = reference(request.prompt_ids, sample.token_ids)
                assert sample.logprobs == pytest.approx(expected, abs=1e-4)


def test_bfloat16_stays_near_float32(running: Running, smollm2_model: Path, prompts: list[list[int]]) -> None:
    requests = [GenerationRequest(prompt, Sampling(1), prompt_logprobs=0) for prompt in prompts[:8]]
    with running() as exact, running(model={"name": smollm2_model, "dtype": "bfloat16"}) as rounded:
        pairs = list(zip(generate(exact, requests), generate(rounded, requests), strict=True))
    for one, other in pairs:
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        tokens = zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
        differences = [abs(a.logprob - b.logprob) for a, b in tokens]
        assert sum(differences) / len(differences) < 0.1
