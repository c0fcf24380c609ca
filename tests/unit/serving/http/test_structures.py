"""Structured outputs through the API: how they are asked for, what is refused, and what a real engine then writes."""

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import CHARACTERS, hello_engine, write_tokenizer
from tests.unit.serving.http.fake_engine import FakeEngine
from tests.unit.serving.http.sse import choices, chunks
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.inference import InferenceConfig
from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer
from tandem.engine.build import build_engine
from tandem.engine.grammars import Grammar, Grammars
from tandem.engine.structure import Structure, StructureRefused
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.serving.http.structures import Structures

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Ulm", "Rom"]}},
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
TEMPLATES = {
    "tagged": "{{ tools }}<tool_call></tool_call>{{ messages[0].content }}",
    "leading": "{{ tools }}<|python_tag|>{{ messages[0].content }}",
    "listed": "{{ tools }}[TOOL_CALLS]{{ messages[0].content }}",
}
USER = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "forecast"}}
COMPLETE = {"prompt": "Write:", "max_tokens": 60, "seed": 1}


@pytest.fixture(scope="module", params=TEMPLATES)
def writing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A native engine with random weights behind the API."""
    folder = tmp_path_factory.mktemp("models") / "random"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=1 + len(CHARACTERS),
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        **sizes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = write_tokenizer(folder, TEMPLATES[request.param])
    options = {"model": {"name": folder}, "seq_len": 1024, "check_invariants": True}
    engine = build_engine(
        InferenceConfig.model_validate(options),
        tokenizer.eos_token_ids,
        partial(TextStream, tokenizer),
        lambda reason: None,
    )
    engine.start()
    grammars = Grammars(tokenizer, config.vocab_size)
    with TestClient(create_app(engine, tokenizer, folder, ApiOptions(config.vocab_size, 1024), grammars)) as client:
        yield client


def message_of(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 400} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def check_call(call: dict[str, Any]) -> str:
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "forecast":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert name == "stop" and arguments == {}
    return name


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_written_and_read(writing: TestClient, parallel: bool) -> None:
    names: list[str] = []
    for seed in range(6):
        choice = message_of(writing, tools=TOOLS, tool_choice="required", seed=seed, parallel_tool_calls=parallel)
        if choice["finish_reason"] != "length":
            calls = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
            assert parallel or len(calls) == 1
            names += [check_call(call) for call in calls]
    assert set(names) == {"forecast", "stop"}


def test_a_named_call_is_that_one_also_in_a_stream(writing: TestClient) -> None:
    body = {"tools": TOOLS, "tool_choice": NAMED, "seed": 3}
    choice = message_of(writing, **body)
    [call] = choice["message"]["tool_calls"]
    assert check_call(call) == "forecast"
    streamed = {"messages": USER, "max_tokens": 400, "stream": True, **body}
    parts = choices(chunks(writing.post("/v1/chat/completions", json=streamed)))
    [told] = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert told["function"] == call["function"] and parts[-1]["finish_reason"] == "tool_calls"


def test_with_tools_an_answer_is_a_call_or_has_its_format(writing: TestClient) -> None:
    whole = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    kinds = set()
    for seed in range(12):
        choice = message_of(writing, tools=TOOLS, response_format=whole, seed=seed, parallel_tool_calls=False)
        message = choice["message"]
        kinds.add("tool_calls" in message)
        if "tool_calls" in message:
            check_call(message["tool_calls"][0])
        else:
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert kinds == {True, False}


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{5}"}}, "[ab]{5}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x"{3} "y"'}}, "xxxy"),
        ({"structured_outputs": {"json": {"type": "integer", "maximum": 7, "minimum": 5}}}, "[567]"),
        ({"structured_outputs": {"json": '{"enum": [[1, 2]]}', "disable_any_whitespace": True}}, r"\[1,2\]"),
        (
            {"structured_outputs": {"json": {"enum": [[1, 2]]}, "whitespace_pattern": "  "}},
            r"\[ {,2}1 {,2}, {,2}2 {,2}\]",
        ),
        ({"guided_regex": "a|b"}, "a|b"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_grammar": 'root ::= "p" "q"'}, "pq"),
        ({"guided_json": {"const": True}}, "true"),
    ],
)
def test_text_in_all_its_forms(writing: TestClient, body: dict[str, Any], pattern: str) -> None:
    answer = writing.post("/v1/completions", json=COMPLETE | body | {"n": 3, "logprobs": 1})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"
    parts = choices(chunks(writing.post("/v1/completions", json=COMPLETE | body | {"stream": True})))
    assert re.fullmatch(pattern, "".join(part["text"] for part in parts))


def test_an_object_of_any_kind(writing: TestClient) -> None:
    body = {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}, "n": 20, "max_tokens": 300}
    found = writing.post("/v1/completions", json=COMPLETE | body).json()["choices"]
    completed = [json.loads(choice["text"]) for choice in found if choice["finish_reason"] == "stop"]
    assert completed and all(isinstance(value, dict) for value in completed)


def test_a_structure_that_leads_nowhere_is_told_also_in_a_stream(writing: TestClient) -> None:
    body = COMPLETE | {"structured_outputs": {"regex": "[ab]{4}ü"}}
    answer = writing.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "structure_refused"
    *_, last = chunks(writing.post("/v1/completions", json=body | {"stream": True}))
    assert "no token of this model can come next" in last["error"]["message"]
    assert writing.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type: foo"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "give one of them"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "give one of them"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "contradicts"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "0 are given"),
        ({"structured_outputs": {"json": {"a": 1}, "structural_tag": "x"}}, "structured_outputs", "use tools"),
        ({"guided_grammar": "x" * 300_000}, "guided_grammar", "longer than"),
        ({"guided_choice": ["\ud800"]}, "guided_choice", ""),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, body: dict[str, Any], param: str, message: str) -> None:
    answer = client.post(
        "/v1/completions", content=json.dumps({"prompt": "a"} | body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("why", ["it needs llguidance: pip install 'tandem-rl[structured]'", "not with this engine"])
def test_without_the_library_only_structures_are_refused(
    tokenizer: Tokenizer, api_options: ApiOptions, why: str
) -> None:
    with TestClient(create_app(hello_engine(tokenizer), tokenizer, Path("/m/little"), api_options, why)) as client:
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert message_of(client, response_format={"type": "text"}, tools=TOOLS[1:])["message"]["content"]
        for field, value in {"response_format": {"type": "json_object"}, "guided_regex": "a"}.items():
            error = client.post("/v1/completions", json={"prompt": "a", field: value}).json()["error"]
            assert error["param"] == field and why in error["message"]


class SlowGrammars:
    """Compiles until it is told to stop."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def known(self, structure: Structure) -> Grammar | None:
        return None

    def compile(self, structure: Structure) -> Grammar:
        self.go.wait()
        raise StructureRefused("at last")


def test_what_takes_too_long_to_compile_is_refused_and_holds_up_nobody(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: Any = SlowGrammars()
    monkeypatch.setattr(Structures, "compile", Structures(slow, max_compile_s=0.3).compile)
    try:
        answers = [client.post("/v1/completions", json={"prompt": "a", "guided_regex": "a"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [400, 400, 429]  # two threads compile, the third waits
        assert "more than 0.3 s" in answers[0].json()["error"]["message"]
        assert answers[2].headers["retry-after"]
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    finally:
        slow.go.set()


def test_the_same_structure_is_compiled_once(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Structure] = []
    compile_one = Grammars.compile

    def counted(self: Grammars, structure: Structure) -> Grammar:
        compiled.append(structure)
        return compile_one(self, structure)

    monkeypatch.setattr(Grammars, "compile", counted)
    for regex in ("a+", "a+", "b+", "a+"):
        client.post("/v1/completions", json={"prompt": ["x", "y"], "guided_regex": regex})
    assert [structure.text for structure in compiled] == ["a+", "b+"]
    assert engine.asked[0].grammar is engine.asked[-1].grammar is not None
    assert engine.asked[0].grammar is not engine.asked[4].grammar
