"""Completions follow the grammar they were asked for, with random weights and whatever else is going on."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.engine.conftest import ask
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.inference import InferenceConfig
from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer
from tandem.engine.build import build_engine
from tandem.engine.grammars import Grammars
from tandem.engine.protocol import GeneratedSample, GenerationRequest, GenerationResult, Sampling
from tandem.engine.structure import Structure, StructureRefused

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


class Writer:
    """An engine, its tokenizer and its grammars."""

    def __init__(self, model_dir: Path, **options: Any) -> None:
        self.model_dir = model_dir
        self.tokenizer = Tokenizer(model_dir)
        model = {"name": model_dir}
        config = InferenceConfig.model_validate(
            {"seq_len": 512, "block_size": 4, "model": model, "check_invariants": True} | options
        )
        self.engine = build_engine(
            config, self.tokenizer.eos_token_ids, partial(TextStream, self.tokenizer), lambda reason: None
        )
        self.grammars = Grammars(self.tokenizer, self.engine.core.decoder.spec.vocab_size)
        self.engine.start()

    def request(self, kind: Any, text: Any, prompt: str = "Write:", **options: Any) -> GenerationRequest:
        grammar = self.grammars.compile(Structure("test", kind, text if isinstance(text, str) else json.dumps(text)))
        of_request = {name: options.pop(name) for name in ("n", "top_logprobs", "raw_logprobs") if name in options}
        defaults: Any = {"max_tokens": 200, "seed": 0}
        sampling = Sampling(**defaults | options)
        return GenerationRequest(self.tokenizer.encode(prompt), sampling, grammar=grammar, **of_request)

    def texts(self, samples: list[GeneratedSample]) -> list[str | None]:
        """None for what was cut off."""
        return [
            self.tokenizer.decode(sample.token_ids) if sample.finish_reason == "stop" else None for sample in samples
        ]

    def write(self, kind: Any, text: Any, **options: Any) -> list[str | None]:
        return self.texts(ask(self.engine, self.request(kind, text, **options)).result(timeout=120))


@pytest.fixture(scope="module")
def little(tiny_model: Path) -> Iterator[Writer]:
    """A character tokenizer."""
    writer = Writer(tiny_model)
    yield writer
    writer.engine.stop()


@pytest.fixture(scope="module")
def byte_level(smollm2_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writer]:
    """SmolLM2's tokenizer on random weights, with a vocabulary that is larger than the tokenizer's."""
    folder = tmp_path_factory.mktemp("models") / "random"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "qwen3", vocab_size=49160, num_key_value_heads=1, head_dim=16, max_position_embeddings=512, **sizes
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((smollm2_model / name).read_bytes())
    writer = Writer(folder)
    yield writer
    writer.engine.stop()


@pytest.fixture(params=["little", "byte_level"])
def writer(request: pytest.FixtureRequest) -> Writer:
    return request.getfixturevalue(request.param)


NAMES = st.text("abcXYZ_", min_size=1, max_size=5)
BOUNDS = st.integers(-50, 50)


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    strings = st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 4)] * 2
    )
    integers = st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, BOUNDS, st.integers(0, 99)
    )
    enums = st.lists(
        st.none() | st.booleans() | st.integers(-9, 99) | st.text('ab"\\é\n', max_size=3), min_size=1, max_size=4
    )
    plain = st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[a-f]{2,4}$"}, {"const": "x y"}]
    )
    numbers = st.just({"type": "number", "minimum": 0, "maximum": 1})
    return strings | integers | numbers | plain | enums.map(lambda values: {"enum": values})


def extend(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 2},
        inner,
        st.integers(0, 2),
    )
    tables = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    objects = st.builds(
        lambda properties, optional: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[optional:],
            "additionalProperties": False,
        },
        tables,
        st.integers(0, 2),
    )
    return arrays | objects | st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options})


SCHEMAS = st.recursive(leaves(), extend, max_leaves=6).map(
    lambda schema: schema | {"x-guidance": {"whitespace_pattern": "[ \\n]?"}}
)
ATOMS = st.sampled_from(["a", "b", "[a-d]", "[^x]", ".", r"\d", r"\w", r"\s", r"\.", "é?", "/", '"', r"\\", "(?:xy)"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: (
        st.builds(lambda a, b: f"{a}{b}", inner, inner)
        | st.builds(lambda a, b: f"(?:{a}|{b})", inner, inner)
        | st.builds(lambda a, times: f"(?:{a}){times}", inner, st.sampled_from(["?", "{2}", "{0,3}", "{1,2}"]))
    ),
    max_leaves=8,
)
MANY = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.7, 1.0, 5.0]))
def test_json_follows_its_schema(writer: Writer, schema: dict[str, Any], seed: int, temperature: float) -> None:
    try:
        texts = writer.write("json", schema, seed=seed, temperature=temperature, n=3, max_tokens=300)
    except StructureRefused as error:  # the little tokenizer cannot write every text
        assert "no token" in str(error) and "é" in json.dumps(schema, ensure_ascii=False)
        return
    for text in texts:
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


@MANY
@given(regex=REGEXES, seed=st.integers(0, 2**32), top_p=st.sampled_from([1.0, 0.5]), top_k=st.sampled_from([0, 2]))
def test_text_matches_its_regex(writer: Writer, regex: str, seed: int, top_p: float, top_k: int) -> None:
    for text in writer.write("regex", regex, seed=seed, top_p=top_p, top_k=top_k, n=3):
        assert text is not None and re.fullmatch(regex, text), (regex, text)


def test_digits_and_letters_are_what_every_library_takes_for_them(byte_level: Writer) -> None:
    texts = byte_level.write("regex", r"(\d{3}\w{3}){4}", temperature=100.0, n=8)
    assert all(re.fullmatch(r"([0-9]{3}[0-9A-Za-z_]{3}){4}", text or "") for text in texts)


def test_any_object_is_json(writer: Writer) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    texts = [text for seed in range(2) for text in writer.write("json", schema, seed=seed, n=8, max_tokens=150)]
    completed = [json.loads(text) for text in texts if text is not None]
    assert completed and all(isinstance(value, dict) for value in completed)


def test_choices_and_grammars(writer: Writer) -> None:
    choices = ["yes", "no", "not at all", 'say "x\\y"\n']
    found = {text for seed in range(20) for text in writer.write("choice", choices, seed=seed, n=4)}
    assert found <= set(choices) and len(found) >= 3
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,2}/'
    gbnf = 'root ::= number ("+" number)*\nnumber ::= [1-9] [0-9]? [0-9]?'
    for grammar in (lark, gbnf):
        for text in writer.write("grammar", grammar, n=8):
            assert text is None or re.fullmatch(r"[1-9]\d{0,2}(\+[1-9]\d{0,2})*", text)


def test_samples_that_follow_something_and_samples_that_do_not_share_batches(little: Writer) -> None:
    free = GenerationRequest(little.tokenizer.encode("Write:"), Sampling(max_tokens=30, seed=3), n=4)
    alone = ask(little.engine, free).result(timeout=60)
    structured = [little.request("regex", "[0-9]{20,40}", seed=seed, n=3) for seed in range(4)]
    futures = [ask(little.engine, request) for request in (*structured[:2], free, *structured[2:])]
    results = [future.result(timeout=60) for future in futures]
    assert [sample.token_ids for sample in results.pop(2)] == [sample.token_ids for sample in alone]
    assert all(re.fullmatch("[0-9]{20,40}", text or "") for samples in results for text in little.texts(samples))


def test_the_same_seed_writes_the_same_in_any_company(little: Writer) -> None:
    request = little.request("json", PERSON, seed=11, n=2)
    alone = ask(little.engine, request).result(timeout=60)
    others = [little.request("json", PERSON, seed=seed, n=3) for seed in range(5)]
    crowd = [ask(little.engine, each) for each in (*others, request)]
    assert [sample.token_ids for sample in crowd[-1].result(timeout=60)] == [sample.token_ids for sample in alone]


def test_logprobs_are_those_of_the_model_without_the_grammar(
    little: Writer, reference_logprobs: Callable[..., list[float]]
) -> None:
    request = little.request("json", PERSON, temperature=0.5, top_logprobs=2)
    [sample] = ask(little.engine, request).result(timeout=60)
    expected = reference_logprobs(little.model_dir, request.prompt_ids, sample.token_ids, 0.5)
    assert sample.logprobs == pytest.approx(expected, abs=2e-4)
    # The likeliest tokens are the model's own: most of them could not have been drawn.
    assert sample.top_logprobs is not None
    places = zip(sample.token_ids, sample.top_logprobs, strict=True)
    assert any(token not in [other for other, _ in top] for token, top in places)


def test_an_end_comes_where_the_grammar_ends_and_nowhere_else(little: Writer) -> None:
    [sample] = ask(little.engine, little.request("choice", ["abc"])).result(timeout=60)
    assert sample.token_ids == [*little.tokenizer.encode("abc"), little.tokenizer.eos_token_ids[0]]
    assert sample.finish_reason == "stop" and sample.stop_reason is None


def test_other_endings_are_as_ever(little: Writer) -> None:
    [cut] = ask(little.engine, little.request("regex", "[ab]{50}", max_tokens=7)).result(timeout=60)
    assert cut.finish_reason == "length" and len(cut.token_ids) == 7
    [stopped] = ask(little.engine, little.request("regex", "a{5}bc{5}", stop=("bc",))).result(timeout=60)
    assert little.tokenizer.decode(stopped.token_ids) == "aaaaabc" and stopped.stop_reason == "bc"


def test_the_grammar_ends_a_completion_before_min_tokens(little: Writer) -> None:
    [sample] = ask(little.engine, little.request("regex", "[ab]{3}c*", min_tokens=6)).result(timeout=60)
    assert len(sample.token_ids) > 6 and sample.finish_reason == "stop"
    [sample] = ask(little.engine, little.request("choice", ["abc"], min_tokens=6)).result(timeout=60)
    assert little.tokenizer.decode(sample.token_ids) == "abc" and sample.finish_reason == "stop"


def test_penalties_and_biases_choose_among_what_is_allowed(little: Writer) -> None:
    x, y = little.tokenizer.encode("xy")
    bias = ((x, 100.0), (y, 50.0))
    assert little.write("regex", "[a-cy]{4}", logit_bias=bias) == ["yyyy"]
    assert little.write("regex", "[a-c]{4}", frequency_penalty=2.0, temperature=0.0) != ["aaaa"]


def test_samples_that_lose_their_place_go_on_where_they_were(tiny_model: Path) -> None:
    """Few blocks: samples are preempted and computed again; new weights come in the middle."""
    writer = Writer(tiny_model, kv_cache_tokens=96, seq_len=80, max_sequences=16, prefix_caching=False)
    try:
        requests = [writer.request("regex", "([0-9]{3},){12}x", seed=seed, n=3, max_tokens=60) for seed in range(5)]
        futures = [ask(writer.engine, request) for request in requests]
        for version in range(3):
            writer.engine.update_weights(tiny_model, 0)
            assert writer.engine.version == 0, version
        texts = [text for future in futures for text in writer.texts(future.result(timeout=120))]
        assert writer.engine.stats.preemptions > 0
        assert all(re.fullmatch("([0-9]{3},){12}x", text or "") for text in texts) and len(texts) == 15
    finally:
        writer.engine.stop()


@pytest.mark.parametrize("options", [{"deterministic": True}, {"tokens_per_step": 2}, {"max_sequences": 1}])
def test_however_the_engine_batches(tiny_model: Path, options: dict[str, Any]) -> None:
    writer = Writer(tiny_model, **options)
    try:
        futures = [ask(writer.engine, writer.request("json", PERSON, seed=seed, n=3)) for seed in range(3)]
        for future in futures:
            for text in writer.texts(future.result(timeout=120)):
                jsonschema.validate(json.loads(text or ""), PERSON)
    finally:
        writer.engine.stop()


def test_parts_of_a_stream_make_up_the_whole(little: Writer) -> None:
    done: Future[GenerationResult | Exception] = Future()
    parts: dict[int, list[int]] = {0: [], 1: []}
    request = little.request("json", PERSON, n=2)
    little.engine.submit(request, done.set_result, lambda index, part: parts[index].extend(part.token_ids))
    outcome = done.result(timeout=60)
    assert isinstance(outcome, GenerationResult)
    assert [sample.token_ids for sample in outcome.samples] == [parts[0], parts[1]]
    assert outcome.samples[0].token_ids != outcome.samples[1].token_ids


def test_a_structure_that_cannot_go_on_fails_its_request_and_no_other(little: Writer) -> None:
    stuck = ask(little.engine, little.request("regex", "[ab]{3}é", n=2))  # no token can write é
    well = ask(little.engine, little.request("regex", "[ab]{30}"))
    with pytest.raises(StructureRefused, match="no token of this model can come next"):
        stuck.result(timeout=60)
    assert well.result(timeout=60)[0].finish_reason == "stop"


BOMBS: list[tuple[str, Any]] = [
    ("regex", "a{1000000}"),
    ("regex", "((a{1000}){1000}){1000}"),
    ("regex", "(.*a.{1,10000}){50}"),
    ("regex", "(a|b)*a(a|b){200}"),
    ("regex", "(" * 100000 + "a" + ")" * 100000),
    ("grammar", "start: " + "(" * 100000 + '"a"' + ")" * 100000),
    ("grammar", 'start: ((("a" | "b"){1000}){1000}){1000}'),
    ("grammar", 'start: start start | "a" | '),
    ("grammar", "start: A\nA: " + " & ".join(f"/(a{{{prime}}})+/" for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29))),
    ("json", {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}),
    ("json", {"type": "string", "minLength": 10**9}),
    ("json", {"type": "string", "allOf": [{"pattern": f".*a.{{{length}}}b"} for length in range(30, 36)]}),
    ("json", {"type": "integer", "multipleOf": 10**9 + 7}),
    (
        "json",
        {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {"minLength": b}}} for b in range(9)]} for a in range(9)]},
    ),
    ("choice", ["x" * 100_000, "y"]),
    ("choice", ["x" * 300_000]),
]


@pytest.mark.parametrize(("kind", "text"), BOMBS)
def test_a_bomb_neither_holds_up_nor_ends_the_engine(little: Writer, kind: str, text: Any) -> None:
    """It is refused, or its sample is cut off or fails; whoever runs beside it does not wait."""
    beside = ask(little.engine, little.request("regex", "[ab]{100}", max_tokens=110))
    try:
        bomb = ask(little.engine, little.request(kind, text, max_tokens=100))
        assert bomb.result(timeout=60)[0].finish_reason in ("length", "stop")
    except StructureRefused as error:
        assert len(str(error)) < 600
    assert beside.result(timeout=60)[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json", {"type": "foo"}, "Invalid type: foo"),
        ("json", {"not": {"type": "integer"}}, r'Unimplemented keys: \["not"\]'),
        ("json", {"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema"),
        ("json", {"$ref": "#/nowhere"}, "does not exist"),
        ("json", {"$ref": "http://127.0.0.1:1/schema"}, "does not fetch"),
        ("regex", "(a", "unclosed group"),
        ("regex", "a\\", "incomplete escape"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "[^\\s\\S]", "no token of this model can come next"),
        ("regex", "\ud800", "surrogates not allowed"),
        ("grammar", "start: foo", r'at 1\(8\): unknown name: "foo"'),
        ("grammar", "root ::= nope", "Rule 'nope' not found"),
        ("choice", ["é"], "no token of this model can come next"),
        ("choice", ["x" * 300_000], "longer than 262144 characters"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_reason(little: Writer, kind: Any, text: Any, reason: str) -> None:
    with pytest.raises(StructureRefused, match=reason):
        little.request(kind, text)


def test_a_model_without_an_end_has_no_structures(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    tokenizer.eos_token_ids = []
    with pytest.raises(StructureRefused, match="no end-of-sequence token"):
        Grammars(tokenizer, tokenizer.vocab_size).compile(Structure("test", "regex", "a"))


def test_a_grammar_that_is_asked_for_again_is_kept_longest(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.grammars.MAX_KEPT", 2)
    tokenizer = Tokenizer(tiny_model)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    first, second, third = (Structure("test", "regex", text) for text in "abc")
    compiled = grammars.compile(first)
    grammars.compile(second)
    assert grammars.known(first) is compiled
    grammars.compile(third)
    assert grammars.known(first) is compiled and grammars.known(third) is not None and grammars.known(second) is None


def test_masks_are_computed_beside_the_models_step(little: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass begins before they are done: here it waits until their thread has begun."""
    from tandem.engine import grammars

    begun, forward, fill = threading.Event(), little.engine.core.runner.forward, grammars.fill_masks

    def filling(*arguments: Any) -> None:
        begun.set()
        fill(*arguments)

    def slow(*arguments: Any) -> torch.Tensor:
        if not is_first:
            assert begun.wait(60)
        is_first.clear()
        begun.clear()
        return forward(*arguments)

    is_first = [True]  # its mask came with the grammar
    monkeypatch.setattr(grammars, "fill_masks", filling)
    monkeypatch.setattr(little.engine.core.runner, "forward", slow)
    assert re.fullmatch("[ab]{9}", little.write("regex", "[ab]{9}")[0] or "")


def test_nothing_is_done_for_requests_without_a_structure(tiny_model: Path) -> None:
    writer = Writer(tiny_model)
    try:
        plain = GenerationRequest(writer.tokenizer.encode("Write:"), Sampling(max_tokens=9, seed=1), n=2)
        ask(writer.engine, plain).result(timeout=60)
        assert writer.engine.core._constraints._thread is None
        ask(writer.engine, replace(plain, grammar=writer.request("regex", "[ab]{9}").grammar)).result(timeout=60)
        assert writer.engine.core._constraints._thread is not None
    finally:
        writer.engine.stop()
