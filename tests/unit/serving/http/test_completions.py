"""/v1/completions: what is asked of the engine, and what becomes of its answer."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import EOS, SEQ_LEN, write_byte_tokenizer
from tests.unit.serving.http.fake_engine import FakeEngine
from tests.unit.serving.http.sse import choices, chunks
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers, processors

from tandem.data.tokenizer import Tokenizer
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-45, 1e-38, 1e-6, 9.9e-6])
def test_a_temperature_next_to_nothing_is_none(client: TestClient, engine: FakeEngine, temperature: float) -> None:
    assert client.post("/v1/completions", json={"prompt": "a", "temperature": temperature}).status_code == 200
    assert engine.asked[-1].sampling.temperature == 0
    assert client.post("/v1/completions", json={"prompt": "a", "temperature": 1e-5}).status_code == 200
    assert engine.asked[-1].sampling.temperature == 1e-5


def test_the_text_ends_before_the_end_token(client: TestClient) -> None:
    answer = complete(client)
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "hello world!",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 13,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize(
    ("options", "text", "reason", "stop_reason"),
    [
        ({"stop": "wor"}, "hello ", "stop", "wor"),
        ({"stop": ["nowhere", "o w"]}, "hell", "stop", "o w"),
        ({"stop": "wor", "include_stop_str_in_output": True}, "hello wor", "stop", "wor"),
        ({"stop": "l", "min_tokens": 5}, "hello wor", "stop", "l"),
        ({"stop_token_ids": [88]}, "hello ", "stop", 88),
        ({"stop_token_ids": [88], "include_stop_str_in_output": True}, "hello w", "stop", 88),
        ({"max_tokens": 4}, "hell", "length", None),
        ({"ignore_eos": True, "max_tokens": 15}, "hello world!mo", "length", None),
        ({"ignore_eos": True, "max_tokens": 15, "skip_special_tokens": False}, "hello world!<eos>mo", "length", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "hello world!<eos>", "stop", None),
        ({"ignore_eos": True, "stop": "!<eos>", "skip_special_tokens": False}, "hello world", "stop", "!<eos>"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_where_a_completion_ends(
    client: TestClient, options: dict[str, Any], text: str, reason: str, stop_reason: Any, stream: bool
) -> None:
    if not stream:
        [choice] = complete(client, **options)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop_reason)
        return
    body = {"prompt": "abc", "max_tokens": 20, "stream": True} | options
    found = choices(chunks(client.post("/v1/completions", json=body)))
    assert "".join(choice["text"] for choice in found) == text
    assert [choice["finish_reason"] for choice in found] == [None] * (len(found) - 1) + [reason]
    assert found[-1]["stop_reason"] == stop_reason


def test_every_option_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": -0.4, "seed": 11, "min_tokens": 2, "stop_token_ids": [9], "stop": ["x", "y"],
        "ignore_eos": True, "max_tokens": 5, "skip_special_tokens": False,
    }  # fmt: skip
    complete(client, **sampling, logit_bias={"5": -100}, n=3, logprobs=4, prompt_logprobs=2, logprobs_mode="raw")
    [request] = engine.asked
    given = vars(request.sampling)
    assert given == sampling | {"stop_token_ids": (9,), "stop": ("x", "y"), "logit_bias": ((5, -100.0),)}
    assert (request.n, request.top_logprobs, request.prompt_logprobs, request.raw_logprobs) == (3, 4, 2, True)
    complete(client)
    assert vars(engine.asked[1].sampling)["temperature"] == 1.0 and not engine.asked[1].raw_logprobs


@pytest.mark.parametrize("prompt", ["abc", ["abc", "de"], [1, 2, 3], [[1, 2, 3], [4, 5]]])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_in_all_forms(client: TestClient, engine: FakeEngine, prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "n": 2, "max_tokens": 3, "return_token_ids": True, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    found = chunks(answer) if stream else [answer.json()]
    every = sorted((choice for chunk in found for choice in chunk["choices"]), key=lambda choice: choice["index"])
    assert {choice["index"] for choice in every} == set(range(4 if several else 2))
    assert [request.first_index for request in engine.asked] == ([0, 2] if several else [0])
    first = [choice["prompt_token_ids"] for choice in every if "prompt_token_ids" in choice]
    assert first == [list(request.prompt_ids) for request in engine.asked for _ in range(2)]
    for index in range(2):
        told = [choice for choice in every if choice["index"] == index]
        assert [token for choice in told for token in choice["token_ids"]] == [73, 70, 77]
        assert [version for choice in told for version in choice["weight_versions"]] == [3, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_kept_tokens_come_with_every_token(client: TestClient, path: str, body: dict[str, Any], stream: bool) -> None:
    asked = body | {"max_tokens": 3, "stream": stream, "return_token_ids": True}
    answer = client.post(path, json=asked | {"return_kept_token_ids": True})
    every = [choice for chunk in (chunks(answer) if stream else [answer.json()]) for choice in chunk["choices"]]
    tokens = [token for choice in every for token in choice["token_ids"]]
    assert len(tokens) == 3
    assert [kept for choice in every for kept in choice["kept_token_ids"]] == [[1, token] for token in tokens]
    assert [logprob for choice in every for logprob in choice["kept_logprobs"]] == [-0.25] * 3
    assert "kept_token_ids" not in client.post(path, json=asked).text


def test_an_answer_without_text(client: TestClient) -> None:
    asked: dict[str, Any] = {"max_tokens": 3, "n": 2, "logprobs": 0, "return_token_ids": True}
    with_text, without = complete(client, **asked), complete(client, **asked, detokenize=False)
    for one, other in zip(with_text["choices"], without["choices"], strict=True):
        told = one["logprobs"] | {"tokens": [], "text_offset": []}
        assert one["text"] and other == one | {"text": "", "logprobs": told}
    assert without["usage"] == with_text["usage"]


@pytest.mark.parametrize("option", [{"stream": True}, {"echo": True}, {"logprobs": 2}, {"prompt_logprobs": 1}])
def test_text_is_refused_where_there_is_to_be_none(client: TestClient, option: dict[str, Any]) -> None:
    body = {"prompt": "abc", "detokenize": False, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body | option)
    assert answer.status_code == 400 and f"with {next(iter(option))}" in answer.json()["error"]["message"]
    answer = client.post("/v1/completions", json={"prompt": "abc", "detokenize": False})
    assert answer.status_code == 400 and "return_token_ids" in answer.json()["error"]["message"]


def test_logprobs_with_alternatives(client: TestClient) -> None:
    [choice] = complete(client, max_tokens=2, logprobs=2)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["h", "e"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"h": -0.5, "i": -1.5}, {"e": -0.5, "f": -1.5}],
        "text_offset": [0, 1],
    }
    [choice] = complete(client, max_tokens=2, logprobs=0, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:73", "token_id:70"] and choice["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_numbers", [False, True])
def test_offsets_point_into_the_text_behind_a_character_of_several_tokens(
    tmp_path: Path, stream: bool, as_numbers: bool
) -> None:
    byte_tokens = write_byte_tokenizer(tmp_path)
    spread = byte_tokens.encode("é🙂b")
    engine = FakeEngine(byte_tokens, lambda request, index: [*spread, EOS])
    body = {"prompt": "a", "max_tokens": 20, "logprobs": 0, "stream": stream, "return_tokens_as_token_ids": as_numbers}
    with TestClient(create_app(engine, byte_tokens, tmp_path, ApiOptions(300, 512))) as client:
        answer = client.post("/v1/completions", json=body)
        found = choices(chunks(answer)) if stream else answer.json()["choices"]
        [echoed] = complete(client, prompt="é", echo=True, logprobs=1)["choices"]
    assert "".join(choice["text"] for choice in found) == "é🙂b"
    offsets = [offset for choice in found for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 3]
    assert echoed["text"] == "éé🙂b" and echoed["logprobs"]["text_offset"] == [0, 0, *(1 + at for at in offsets)]


def test_offsets_point_into_an_echoed_prompt_that_its_tokens_do_not_decode_to(tmp_path: Path) -> None:
    """The tokenizer composes characters, puts a token before the text and one behind it, and the text names one."""
    write_byte_tokenizer(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.normalizer = normalizers.NFC()
    fast.post_processor = processors.TemplateProcessing(single="<eos> $A <eos>", special_tokens=[("<eos>", EOS)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    engine = FakeEngine(tokenizer, lambda request, index: tokenizer.encode("yz"))
    with TestClient(create_app(engine, tokenizer, tmp_path, ApiOptions(300, 512))) as client:
        asked: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 2}
        [choice] = complete(client, prompt="e\u0301<eos>x", **asked)["choices"]
        [plain] = complete(client, prompt="e\u0301<eos>x", add_special_tokens=False, **asked)["choices"]
    assert choice["text"] == plain["text"] == "e\u0301<eos>xyz"
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 2, 7, 8, 8, 9]
    assert plain["logprobs"]["text_offset"] == [0, 0, 2, 7, 8, 9]


def test_streamed_logprobs_are_those_of_the_whole(client: TestClient) -> None:
    [whole] = complete(client, logprobs=1)["choices"]
    body = {"prompt": "abc", "max_tokens": 20, "logprobs": 1, "stream": True}
    found = choices(chunks(client.post("/v1/completions", json=body)))
    for key, values in whole["logprobs"].items():
        assert [value for choice in found for value in choice["logprobs"][key]] == values


def test_echo_puts_the_prompt_first(client: TestClient, engine: FakeEngine) -> None:
    [choice] = complete(client, echo=True)["choices"]
    assert choice["text"] == "abchello world!" and engine.asked[0].prompt_logprobs is None
    [choice] = complete(client, echo=True, prompt=[66, 67], max_tokens=1, logprobs=1)["choices"]
    assert choice["text"] == "abh"
    assert choice["logprobs"]["tokens"] == ["a", "b", "h"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {" ": -0.25, "b": -1.0}, {"h": -0.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    found = choices(chunks(client.post("/v1/completions", json={"prompt": "abc", "echo": True, "stream": True})))
    assert "".join(choice["text"] for choice in found) == "abchello world!"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_a_completion(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "stream": stream}
    if stream:
        found = choices(chunks(client.post("/v1/completions", json=body)))
        assert "".join(choice["text"] for choice in found) == "abc" and found[-1]["finish_reason"] == "length"
        return
    answer = complete(client, **body, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert answer["usage"]["completion_tokens"] == 0 and engine.asked[0].sampling.max_tokens == 1


def test_prompt_logprobs_in_the_shape_of_vllm(client: TestClient) -> None:
    [choice] = complete(client, prompt_logprobs=1)["choices"]
    entry = {"1": {"logprob": -0.25, "rank": 1, "decoded_token": " "}}
    assert choice["prompt_logprobs"] == [
        None,
        entry | {"67": {"logprob": -1.0, "rank": 2, "decoded_token": "b"}},
        entry | {"68": {"logprob": -1.0, "rank": 2, "decoded_token": "c"}},
    ]


def test_prompts_are_truncated_from_the_left(client: TestClient, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    complete(client, truncate_prompt_tokens=2)
    assert tokenizer.decode(engine.asked[0].prompt_ids) == "bc"
    complete(client, prompt="x" * 2000, truncate_prompt_tokens=-1)
    assert len(engine.asked[1].prompt_ids) == SEQ_LEN - 20


def test_usage_in_streams(client: TestClient) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "n": 2}
    usual = chunks(client.post("/v1/completions", json=body))
    assert all("usage" not in chunk for chunk in usual)
    body["stream_options"] = {"include_usage": True}
    *parts, last = chunks(client.post("/v1/completions", json=body))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert all(chunk["usage"] is None for chunk in parts)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = chunks(client.post("/v1/completions", json=body))
    assert [chunk["usage"]["completion_tokens"] for chunk in parts] == [1, 2, 3, 4, 5, 6]


def test_one_id_for_a_whole_answer(client: TestClient) -> None:
    assert complete(client, request_id="mine")["id"] == "cmpl-mine"
    found = chunks(client.post("/v1/completions", json={"prompt": "abc", "stream": True}))
    assert len({chunk["id"] for chunk in found}) == 1


def test_a_request_chooses_an_adapter_by_its_name(client: TestClient, engine: FakeEngine) -> None:
    engine.adapters["brave"] = "/adapters/brave"
    assert complete(client, model="brave")["model"] == "brave"
    assert complete(client, model="little")["model"] == "/models/little"
    assert [request.adapter for request in engine.asked] == ["brave", None]
    missing = client.post("/v1/completions", json={"prompt": "abc", "model": "timid"})
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["/models/little", "brave"]
    assert client.get("/v1/models/brave").json()["parent"] == "/models/little"


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_engine_refuses_is_refused_by_name(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    def refuse_second(request: Any, *listeners: Any) -> int:
        if request.first_index:
            raise ValueError("min_p = 0.5: this engine cannot do that")
        return submit(request, *listeners)

    submit, engine.submit = engine.submit, refuse_second  # type: ignore[method-assign]
    engine.go.clear()
    answer = client.post("/v1/completions", json={"prompt": ["a", "b"], "min_p": 0.5, "stream": stream})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "min_p"
    assert engine.cancelled == [1], "what was submitted before is taken back"


def test_an_engine_that_fails(client: TestClient, engine: FakeEngine) -> None:
    engine.error_after = 0
    for stream in (False, True):
        answer = client.post("/v1/completions", json={"prompt": "abc", "stream": stream})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_failed"
    engine.error_after = 2
    *parts, error = chunks(client.post("/v1/completions", json={"prompt": "abc", "stream": True}))
    assert len(parts) == 2 and error["error"]["message"] == "out of luck"


def test_a_sample_whose_end_no_part_tells(client: TestClient, engine: FakeEngine) -> None:
    engine.tells_end = False
    engine.script = lambda request, index: [73] * (1 + index) + [EOS]
    found = chunks(client.post("/v1/completions", json={"prompt": "abc", "stream": True, "n": 3}))
    texts = ["".join(choice["text"] for choice in choices(found, index)) for index in range(3)]
    assert texts == ["h", "hh", "hhh"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop": 5}, "stop: Input should be a valid string, or Input should be a valid list"),
        ({"stop": ["a", 5]}, "stop.1: Input should be a valid string"),
        (
            {"stop": ["a"] * 65},
            "stop: Input should be a valid string, or List should have at most 64 items after validation, not 65",
        ),
        (
            {"structured_outputs": {"json": True}},
            "structured_outputs.json: Input should be a valid dictionary, or Input should be a valid string",
        ),
        ({"response_format": {"type": "json_schema"}}, "field 'response_format.json_schema' is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "field 'response_format.json_schema.schema' is missing",
        ),
        ({"response_format": {"type": "json_object", "strict": 1}}, "unknown field 'response_format.strict'"),
    ],
)
def test_a_field_of_several_forms_is_refused_by_its_own_name(
    client: TestClient, wrong: dict[str, Any], message: str
) -> None:
    answer = client.post("/v1/completions", json={"prompt": "abc"} | wrong)
    assert answer.status_code == 400
    assert (answer.json()["error"]["message"], answer.json()["error"]["param"]) == (message, next(iter(wrong)))
