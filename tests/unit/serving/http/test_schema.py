"""The OpenAPI document is true: what it lists is accepted or refused as it says, and nothing else is accepted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import hello_engine

from tandem.data.tokenizer import Tokenizer
from tandem.engine.grammars import Grammars
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.serving.http.errors import REFUSED
from tandem.types.chat import ChatCompletionRequest
from tandem.types.openai import CompletionRequest

MODELS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
FIELDS = [(path, field) for path, model in MODELS.items() for field in model.model_fields]
# Where a schema alone does not tell a value that works.
GOOD: dict[str, Any] = {
    "model": "little",
    "logit_bias": {"5": 1.5},
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"mood": "glad"},
    "request_id": "mine",
    "stop_token_ids": [5],
    "truncate_prompt_tokens": 2,
    "stream_options": {"include_usage": True},
    "best_of": 1,
    "prompt": [1, 2],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "integer"},
    "guided_grammar": 'start: "a"',
    "guided_choice": ["a", "b"],
    "tool_choice": "required",
}
ALSO: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 5},
    "detokenize": {"return_token_ids": True},
    "tool_choice": {"tools": GOOD["tools"]},
}
WRONG: dict[str, Any] = {"string": 3.5, "integer": "x", "number": "x", "boolean": "x", "object": 3, "array": 3}


@pytest.fixture(scope="module")
def client(tokenizer: Tokenizer, api_options: ApiOptions) -> Iterator[TestClient]:
    """One for all of these tests: none of them changes what is served."""
    grammars = Grammars(tokenizer, api_options.vocab_size)
    app = create_app(hello_engine(tokenizer), tokenizer, Path("/models/little"), api_options, grammars)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, path: str, **body: Any) -> tuple[int, Any]:
    answer = client.post(path, json=NEEDED[path] | body)
    return answer.status_code, None if body.get("stream") and answer.status_code == 200 else answer.json()


def schema_of(client: TestClient, path: str, field: str) -> dict[str, Any]:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return schemas[body.rpartition("/")[2]]["properties"][field]


def good_value(entry: dict[str, Any]) -> Any:
    """A value the schema of a field allows; not its default, where it allows another."""
    if "anyOf" in entry:
        return good_value(entry["anyOf"][0])
    if "const" in entry:
        return entry["const"]
    if "enum" in entry:
        return entry["enum"][-1]
    return {"integer": 2, "number": 0.5, "boolean": True, "string": "x", "array": [], "object": {}}[entry["type"]]


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_every_field_is_what_the_document_says(client: TestClient, path: str, field: str) -> None:
    entry = schema_of(client, path, field)
    value = GOOD[field] if field in GOOD else good_value(entry)
    status, answer = post(client, path, **ALSO.get(field, {}), **{field: value})
    assert status == 200, answer
    if field not in NEEDED[path]:
        assert {"type": "null"} in entry["anyOf"] and post(client, path, **{field: None})[0] == 200
    forms = entry.get("anyOf", [entry])
    kinds = {form.get("type", "object") for form in forms}
    wrong = next(value for kind, value in WRONG.items() if kind in kinds)
    if "object" in kinds and "string" in kinds:
        wrong = 3.5
    status, answer = post(client, path, **{field: wrong})
    assert status == 400 and answer["error"]["param"] == field, answer
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize("field", [*REFUSED, "anything"])
def test_other_fields_are_refused_by_name(client: TestClient, path: str, field: str) -> None:
    for value in ("x", None):  # null is no way to send a field that is not known
        status, answer = post(client, path, **{field: value})
        assert status == 400 and answer["error"]["param"] == field
        assert REFUSED.get(field, "unknown field") in answer["error"]["message"]


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_object", "schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {"structural_tag": "{}"}),
        ("structured_outputs", {"regex": "a", "disable_any_whitespace": True}),
        ("structured_outputs", {"json": "[1]"}),
        ("structured_outputs", {"json": "{"}),
        ("guided_choice", []),
        ("priority", 1),
        ("store", True),
        ("service_tier", "flex"),
        ("spaces_between_special_tokens", False),
        ("n", 0),
        ("top_p", 0),
        ("temperature", -1),
        ("seed", 2**64),
        ("stop", ["a"] * 65),
        ("stop", ""),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("request_id", "two words"),
        ("stop_token_ids", [99999]),
        ("min_tokens", 10**30),
    ],
)
def test_values_beyond_what_is_supported_are_refused(client: TestClient, path: str, field: str, value: Any) -> None:
    status, answer = post(client, path, **{field: value})
    assert status == 400 and answer["error"]["param"] == field, answer


def test_errors_are_documented_in_their_own_shape(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert "HTTPValidationError" not in document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
    described = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "404", "413", "429", "500", "503"} <= set(described)


def test_every_route_has_a_schema_for_its_answer_and_names_its_statuses(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {"200", "400", "413", "500"} <= set(operation["responses"]), path
            for status, answer in operation["responses"].items():
                assert answer["description"] or status == "200"
                for content in answer["content"].values():
                    jsonschema.Draft202012Validator.check_schema(content["schema"])
                    assert content["schema"], (path, status)


CHAT_ANSWER = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "prompt_logprobs": 1}
ASKED: list[tuple[str, str, dict[str, Any] | None, int]] = [
    ("get", "/health", None, 200),
    ("get", "/version", None, 200),
    ("get", "/is_paused", None, 200),
    ("get", "/tokenizer_info", None, 200),
    ("get", "/v1/models", None, 200),
    ("get", "/v1/models/little", None, 200),
    ("get", "/v1/models/large", None, 404),
    ("get", "/health?deep=1", None, 400),
    ("post", "/tokenize", {"prompt": "ab"}, 200),
    ("post", "/tokenize", {"prompt": "ab", "return_token_strs": True}, 200),
    ("post", "/tokenize", {"prompt": "ab", "model": "large"}, 404),
    ("post", "/detokenize", {"tokens": [5]}, 200),
    ("post", "/v1/completions", NEEDED["/v1/completions"] | {"max_tokens": 3}, 200),
    (
        "post",
        "/v1/completions",
        NEEDED["/v1/completions"] | {"logprobs": 1, "echo": True, "return_token_ids": True},
        200,
    ),
    (
        "post",
        "/v1/completions",
        NEEDED["/v1/completions"]
        | {"logprobs": 0, "detokenize": False, "return_token_ids": True, "top_k": 3, "return_kept_token_ids": True},
        200,
    ),
    ("post", "/v1/completions", NEEDED["/v1/completions"] | {"model": "large"}, 404),
    ("post", "/v1/chat/completions", NEEDED["/v1/chat/completions"] | CHAT_ANSWER, 200),
    ("post", "/claim", {"run": "mine", "lease": "0" * 16}, 200),
    ("post", "/claim", {"run": "mine", "lease": "short"}, 400),
    ("post", "/release", {"lease": "0" * 16}, 200),
    ("post", "/pause", None, 200),
    ("post", "/resume", None, 200),
    ("post", "/reset_prefix_cache", None, 200),
    ("post", "/update_weights", {"path": "/nowhere", "version": 1}, 400),
    ("post", "/unload_lora_adapter", {"lora_name": "none"}, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ASKED)
def test_answers_are_what_the_document_says(
    client: TestClient, method: str, path: str, body: dict[str, Any] | None, status: int
) -> None:
    document = client.get("/openapi.json").json()
    answer = client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    route = path.partition("?")[0]
    route = route if route in document["paths"] else "/v1/models/{model}"
    described = document["paths"][route][method]["responses"][str(status)]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), described | {"components": document["components"]})


def test_health_may_be_asked_for_without_its_answer(client: TestClient) -> None:
    answer = client.head("/health")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted(
    {field for _, field in FIELDS}
    | set(REFUSED)
    | {"path", "version", "mode", "lora_name", "lora_path", "tokens", "run", "lease", "place"}
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), JSON, max_size=6)
PATHS = [
    *MODELS,
    "/tokenize",
    "/detokenize",
    "/claim",
    "/release",
    "/update_weights",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/pause",
]


@settings(max_examples=400)
@given(path=st.sampled_from(PATHS), body=BODIES | JSON, valid=st.booleans())
def test_no_body_makes_the_server_fail(client: TestClient, path: str, body: Any, valid: bool) -> None:
    if valid and isinstance(body, dict):
        body = {**NEEDED.get(path, {}), "stream": False, **body}
    content = json.dumps(body, ensure_ascii=True).encode()
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100000, b'{"prompt": "a"', b'{"a":' * 5000, b"9" * 10000],
)
@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_no_request(client: TestClient, path: str, content: bytes) -> None:
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    expected = (200,) if path == "/pause" and content in (b"", b"null") else (400,)
    assert answer.status_code in expected, answer.text


def test_a_body_that_is_not_declared_as_json(client: TestClient) -> None:
    answer = client.post("/v1/completions", content=b'{"prompt": "a"}')
    assert answer.status_code == 415 and "Content-Type" in answer.json()["error"]["message"]
