"""Penalties, biases, ends that must wait, stop strings, log-probs of prompts and alternatives: what a request asks
for, against transformers or against the rule spelled out."""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tandem.data.text_stream import TextStream
from tandem.engine import prompt_logprobs
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GeneratedSample, GenerationRequest, GenerationResult, Sampling
from tandem.engine.stops import StopStrings
from tandem.serving.http.prompts import LEAST_TEMPERATURE

EOS, SPECIAL = 1, 63
PROMPT = [5, 9, 33, 12, 60, 7, 21, 40, 11]
MakeEngine = Callable[..., NativeEngine]


def run(engine: NativeEngine, request: GenerationRequest) -> GenerationResult:
    answers: queue.Queue[Any] = queue.Queue()
    engine.submit(request, answers.put)
    answer = answers.get(timeout=30)
    assert isinstance(answer, GenerationResult), answer
    return answer


def complete(engine: NativeEngine, sampling: Sampling) -> GeneratedSample:
    return run(engine, GenerationRequest(PROMPT, sampling)).samples[0]


@pytest.fixture
def logits_of(make_model: Callable[..., Path]) -> Callable[[list[int]], np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32).eval()

    def compute(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    return compute


def test_repetition_penalty_is_that_of_transformers(make_model: Callable[..., Path], make_engine: MakeEngine) -> None:
    sample = complete(make_engine(), Sampling(12, 0.0, repetition_penalty=1.4, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32).eval()
    greedy = GenerationConfig(max_new_tokens=12, do_sample=False, repetition_penalty=1.4, pad_token_id=0)
    greedy.eos_token_id = None
    model.generation_config.eos_token_id = None
    expected = cast(Any, model).generate(torch.tensor([PROMPT]), generation_config=greedy)[0, len(PROMPT) :].tolist()
    assert sample.token_ids == expected
    assert sample.token_ids != complete(make_engine(), Sampling(12, 0.0, ignore_eos=True)).token_ids


@pytest.mark.parametrize("penalty", [1e-45, 1e-30, 1e-5, 100.0])
@pytest.mark.parametrize("temperature", [0.0, LEAST_TEMPERATURE, 1.0, 100.0])
def test_extreme_penalties_and_temperatures_still_choose_among_tokens(
    make_engine: MakeEngine, penalty: float, temperature: float
) -> None:
    """A penalty far below 1 makes what was said before all but certain, one far above rules it out."""
    sampling = Sampling(4, temperature, repetition_penalty=penalty, min_p=1.0, seed=3, ignore_eos=True)
    sample = complete(make_engine(), sampling)
    seen = set(PROMPT)
    for token, logprob in zip(sample.token_ids, sample.logprobs, strict=True):
        assert np.isfinite(logprob)
        assert (token in seen) == (penalty < 1)
        seen.add(token)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-1.0, 0.4)])
def test_presence_and_frequency_penalties_count_the_completion(
    presence: float, frequency: float, make_engine: MakeEngine, logits_of: Callable[[list[int]], np.ndarray]
) -> None:
    sampling = Sampling(14, 0.0, presence_penalty=presence, frequency_penalty=frequency, ignore_eos=True)
    sample = complete(make_engine(), sampling)
    for i, token in enumerate(sample.token_ids):
        generated = sample.token_ids[:i]
        logits = logits_of(PROMPT + generated)[-1]
        counts = np.bincount(generated, minlength=64)
        assert token == (logits - presence * (counts > 0) - frequency * counts).argmax()
    # The log-probs reported are the model's own.
    logits = torch.from_numpy(logits_of(PROMPT + sample.token_ids)[len(PROMPT) - 1 : -1])
    own = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    assert sample.logprobs == pytest.approx(own.tolist(), abs=1e-4)


def test_a_bias_forces_and_forbids_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert complete(engine, Sampling(5, seed=1, logit_bias=((17, 100.0),))).token_ids == [17] * 5
    free = complete(engine, Sampling(8, 0.0, ignore_eos=True)).token_ids
    forbidden = complete(engine, Sampling(8, 0.0, logit_bias=((free[0], -100.0),), ignore_eos=True)).token_ids
    assert free[0] not in forbidden


def test_no_end_before_min_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    to_the_end = ((EOS, 50.0), (30, 40.0))
    early = complete(engine, Sampling(9, 0.0, logit_bias=to_the_end))
    assert (early.token_ids, early.finish_reason, early.stop_reason) == ([EOS], "stop", None)
    late = complete(engine, Sampling(9, 0.0, logit_bias=to_the_end, min_tokens=4))
    assert late.token_ids == [30] * 4 + [EOS]
    stop_id = complete(engine, Sampling(9, 0.0, logit_bias=((30, 50.0),), stop_token_ids=(30,), min_tokens=3))
    assert len(stop_id.token_ids) == 4 and 30 not in stop_id.token_ids[:3]
    assert (stop_id.token_ids[3], stop_id.stop_reason) == (30, 30)


def test_rows_of_one_batch_keep_their_own_options(make_engine: MakeEngine) -> None:
    engine = make_engine()
    options = [
        Sampling(10, 0.0, ignore_eos=True),
        Sampling(10, 0.0, repetition_penalty=1.6, ignore_eos=True),
        Sampling(10, 0.0, frequency_penalty=2.0, ignore_eos=True),
        Sampling(10, 0.0, logit_bias=((3, 9.0),), min_tokens=4),
        Sampling(10, 0.8, min_p=0.2, seed=3, ignore_eos=True),
    ]
    alone = [complete(engine, sampling).token_ids for sampling in options]
    answers: queue.Queue[Any] = queue.Queue()
    engine.pause()
    for i, sampling in enumerate(options):
        engine.submit(GenerationRequest(PROMPT, sampling), lambda result, i=i: answers.put((i, result)))
    engine.resume()
    together = dict(answers.get(timeout=30) for _ in options)
    assert [together[i].samples[0].token_ids for i in range(len(options))] == alone


def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = complete(engine, Sampling(12, 0.7, seed=2, ignore_eos=True)).token_ids
    text = "".join(chr(ord("A") + token) for token in free)
    stop = text[4:7]
    sample = complete(engine, Sampling(12, 0.7, seed=2, stop=("never seen", stop), ignore_eos=True))
    assert sample.token_ids == free[: text.index(stop) + 3]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


@pytest.mark.parametrize(("skip", "num_tokens", "reason"), [(False, 1, "stop"), (True, 4, "length")])
def test_a_stop_string_is_looked_for_in_the_text_that_is_answered(
    skip: bool, num_tokens: int, reason: str, make_engine: MakeEngine
) -> None:
    text = chr(ord("A") + SPECIAL)
    sampling = Sampling(4, 0.0, logit_bias=((SPECIAL, 100.0),), stop=(text,), skip_special_tokens=skip)
    sample = complete(make_engine(), sampling)
    assert (sample.token_ids, sample.finish_reason) == ([SPECIAL] * num_tokens, reason)


class Spelled:
    """Tokens are given texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.texts[token] for token in token_ids)


@pytest.mark.parametrize(
    ("texts", "stops", "min_tokens", "expected"),
    [
        (["a", "b", "cd"], ("bc",), 0, [None, None, "bc"]),
        (["ab", "ab"], ("ab",), 1, [None, "ab"]),
        (["ab", "x", "y"], ("ab", "long stop"), 1, [None, None, None]),
        (["one two"], ("two", "one"), 0, ["one"]),
        (["x", "x"], ("x",), 0, ["x", "x"]),
    ],
)
def test_stop_strings_across_tokens(
    texts: list[str], stops: tuple[str, ...], min_tokens: int, expected: list[str | None]
) -> None:
    tokenizer: Any = Spelled(texts)
    watch = StopStrings(TextStream(tokenizer), stops, min_tokens)
    assert [watch.push(token) for token in range(len(texts))] == expected


@pytest.mark.parametrize("options", [{}, {"tokens_per_step": 4}, {"kv_cache_tokens": 68}])
def test_prompt_logprobs_are_those_of_the_model(
    options: dict[str, int],
    make_engine: MakeEngine,
    logits_of: Callable[[list[int]], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", 64 * 3)  # three tokens at a time
    engine = make_engine(**options)
    run(engine, GenerationRequest(PROMPT, Sampling(2)))  # what is cached must not be skipped
    result = run(engine, GenerationRequest(PROMPT, Sampling(3, 0.5), n=2, prompt_logprobs=2))
    expected = torch.from_numpy(logits_of(PROMPT)).log_softmax(-1)[:-1]
    scored = result.prompt_logprobs
    assert scored is not None and [entry.token_id for entry in scored] == PROMPT[1:]
    for entry, row in zip(scored, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert entry.rank == (row > row[entry.token_id]).sum() + 1
        values, tokens = row.topk(2)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_long_prompt_never_makes_all_its_logits(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    made: list[int] = []
    logits = engine.core.decoder.logits
    monkeypatch.setattr(engine.core.decoder, "logits", lambda hidden: (made.append(len(hidden)), logits(hidden))[1])
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", 64 * 5)
    run(engine, GenerationRequest(list(range(2, 52)), Sampling(1), prompt_logprobs=0))
    assert max(made) == 5 and sum(made) == 49 + 1


def test_alternatives_of_every_token(make_engine: MakeEngine, logits_of: Callable[[list[int]], np.ndarray]) -> None:
    engine = make_engine()
    result = run(engine, GenerationRequest(PROMPT, Sampling(4, 0.5, seed=1, ignore_eos=True), top_logprobs=3))
    [sample] = result.samples
    assert sample.top_logprobs is not None
    logits = torch.from_numpy(logits_of(PROMPT + sample.token_ids)[len(PROMPT) - 1 : -1])
    for row, top in zip((logits / 0.5).log_softmax(-1), sample.top_logprobs, strict=True):
        values, tokens = row.topk(3)
        assert [token for token, _ in top] == tokens.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


def test_parts_are_the_whole(make_engine: MakeEngine) -> None:
    engine = make_engine()
    parts: dict[int, list[GeneratedSample]] = {}
    answers: queue.Queue[Any] = queue.Queue()
    request = GenerationRequest(PROMPT, Sampling(7, seed=4, ignore_eos=True), n=3, top_logprobs=1)
    engine.submit(request, answers.put, lambda index, part: parts.setdefault(index, []).append(part))
    result = answers.get(timeout=30)
    for index, whole in enumerate(result.samples):
        told = parts[index]
        assert [token for part in told for token in part.token_ids] == whole.token_ids
        assert [value for part in told for value in part.logprobs] == pytest.approx(whole.logprobs)
        assert [value for part in told for value in part.versions] == whole.versions
        assert [top for part in told for top in part.top_logprobs or []] == whole.top_logprobs
        assert [part.finish_reason for part in told] == [None] * 6 + ["length"]
