"""/v1/chat/completions: messages to prompts, tools, and the answer in both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import EOS, write_byte_tokenizer, write_tokenizer
from tests.unit.serving.http.fake_engine import FakeEngine
from tests.unit.serving.http.sse import choices, chunks

from tandem.data.tokenizer import Tokenizer
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions

USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'


def chat(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": USER} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"messages": USER} | body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.asked[-1].prompt_ids)


def test_an_answer_in_openai_shape(client: TestClient) -> None:
    answer = chat(
        client, logprobs=True, top_logprobs=2, return_token_ids=True, max_completion_tokens=2, prompt_logprobs=0
    )
    assert answer["object"] == "chat.completion" and len(answer["prompt_token_ids"]) == 18
    assert len(answer["prompt_logprobs"]) == 18 and answer["prompt_logprobs"][0] is None
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "he"} and choice["finish_reason"] == "length"
    assert choice["token_ids"] == [73, 70] and choice["weight_versions"] == [3, 3]
    assert choice["logprobs"]["content"][0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "i", "logprob": -1.5, "bytes": [105]},
        ],
    }


def test_half_a_character_has_its_bytes(tmp_path: Path) -> None:
    """A character may be spread over several tokens, none of which has a text of its own."""
    byte_tokens = write_byte_tokenizer(tmp_path)
    spread = byte_tokens.encode("é🙂")
    engine = FakeEngine(byte_tokens, lambda request, index: [*spread, EOS])
    with TestClient(create_app(engine, byte_tokens, tmp_path, ApiOptions(300, 512))) as client:
        [choice] = chat(client, logprobs=True, top_logprobs=1)["choices"]
    *content, end = choice["logprobs"]["content"]
    assert len(content) == 6 and {entry["token"] for entry in content} == {"\ufffd"}
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é🙂"
    assert content[0]["top_logprobs"][0]["bytes"] == content[0]["bytes"] == [0xC3]
    assert bytes(end["bytes"]) == b"<eos>"


def test_a_stream_tells_role_text_and_end(client: TestClient) -> None:
    found = chunks(
        client.post("/v1/chat/completions", json={"messages": USER, "stream": True, "return_token_ids": True})
    )
    assert "prompt_token_ids" in found[0] and all("prompt_token_ids" not in chunk for chunk in found[1:])
    parts = choices(found)
    assert parts[0]["delta"]["role"] == "assistant" and all("role" not in part["delta"] for part in parts[1:])
    assert "".join(part["delta"].get("content", "") for part in parts) == "hello world!"
    assert parts[-1]["finish_reason"] == "stop"
    assert parts[-1]["token_ids"][-1] == EOS


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({}, "user:hi|assistant:"),
        ({"add_generation_prompt": False}, "user:hi|"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "user:hi|assistant:(glad)"),
        ({"add_special_tokens": True}, "user:hi|assistant:"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         "user:a\nb|assistant:"),
        ({"messages": [{"role": "developer", "content": "be"}]}, "system:be|assistant:"),
        ({"messages": [*USER, {"role": "assistant", "content": " so it"}], "continue_final_message": True},
         "user:hi|assistant: so it"),
        ({"messages": [*USER, {"role": "assistant", "content": "go on "}], "continue_final_message": True,
          "add_generation_prompt": False}, "user:hi|assistant:go on "),
        ({"messages": [{"role": "user", "content": "x" * 30}], "truncate_prompt_tokens": 12}, "x|assistant:"),
        ({"tools": [WEATHER], "tool_choice": "none"}, "user:hi|assistant:"),
        ({"tools": []}, "user:hi|assistant:"),
    ],
)  # fmt: skip
def test_messages_become_a_prompt(client: TestClient, engine: FakeEngine, body: dict[str, Any], prompt: str) -> None:
    chat(client, **body)
    assert prompt_of(engine) == prompt


def test_tools_and_their_answers_are_shown_to_the_model(client: TestClient, engine: FakeEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    chat(client, messages=messages, tools=[WEATHER])
    shown = prompt_of(engine)
    assert shown.startswith("tools:" + json.dumps(WEATHER))
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>' in shown
    assert shown.endswith("tool:sunny#c1|assistant:")


def says(engine: FakeEngine, text: str) -> None:
    engine.script = lambda request, index: [*engine.tokenizer.encode(text.replace("Łódź", "Ulm")), EOS]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, None, ["weather"]),
        (f"Let me look.\n{CALL}", "Let me look.\n", ["weather"]),
        (f"{CALL}\n{CALL}", None, ["weather", "weather"]),
        (f"{CALL}\n\nthere", "there", ["weather"]),
        (CALL.removesuffix("</tool_call>"), None, ["weather"]),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("a < b <tool", "a < b <tool", []),
        ("hello", "hello", []),
    ],
)
def test_calls_are_read_whole_and_streamed_alike(
    client: TestClient, engine: FakeEngine, text: str, content: str | None, names: list[str]
) -> None:
    says(engine, text)
    [choice] = chat(client, tools=[WEATHER])["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == names
    assert choice["finish_reason"] == ("tool_calls" if names else "stop")
    if names:
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Ulm"}

    body = {"messages": USER, "tools": [WEATHER], "stream": True}
    parts = choices(chunks(client.post("/v1/chat/completions", json=body)))
    assert "".join(part["delta"].get("content", "") for part in parts) == (content or "")
    calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(names)))
    assert [call["function"] for call in calls] == [call["function"] for call in message.get("tool_calls", [])]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_one_call_at_a_time_on_request(client: TestClient, engine: FakeEngine) -> None:
    says(engine, CALL + CALL)
    [choice] = chat(client, tools=[WEATHER], parallel_tool_calls=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    body = {"messages": USER, "tools": [WEATHER], "stream": True, "parallel_tool_calls": False}
    parts = choices(chunks(client.post("/v1/chat/completions", json=body)))
    assert sum(len(part["delta"].get("tool_calls", [])) for part in parts) == 1


def test_calls_are_text_where_no_tools_are_given(client: TestClient, engine: FakeEngine) -> None:
    says(engine, CALL)
    assert "<tool_call>" in chat(client)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", "required"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
         "tool_choice", "among"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
         "tool_choice", "leaves no text"),
        ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "contradicts"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools", "strict"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools", "name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages", "should be 'text'"),
        ({"messages": [{"role": "user"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages", "assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}]}, "messages", "not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[]"}}]}]}, "messages", "object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]}, "messages", "tool_call_id"),
        ({"messages": []}, "messages", "at least 1"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "contradict"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": ""}]},
         "continue_final_message", "content"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differ"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"functions": []}, "functions", "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
        ({"logprobs_mode": "processed"}, "logprobs_mode", "raw"),
        ({"min_tokens": 10, "max_tokens": 5}, "min_tokens", "max_tokens"),
        ({"logit_bias": {"900": 1}}, "logit_bias", "vocabulary"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "100"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    client: TestClient, body: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(client, **body)
    assert error["param"] == param and message in error["message"], error


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0].content }}", "has no tools"),
        ("{{ tools }}{{ messages[0].content }}", "cannot read"),
        ("{{ tools }}<tool_call><function=f>", "cannot read"),
    ],
)
def test_tools_of_models_that_have_none(tmp_path: Path, template: str, why: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "model", template)
    with TestClient(
        create_app(FakeEngine(tokenizer, lambda r, i: [EOS]), tokenizer, tmp_path, ApiOptions(99, 64))
    ) as client:
        error = refusal(client, tools=[WEATHER])
        assert error["param"] == "tools" and why in error["message"]
        chat(client, tools=[WEATHER], tool_choice="none")


def test_the_template_for_tools_shows_them(tmp_path: Path) -> None:
    """Only a named template has tools; conversations without them use the default one."""
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    own = write_tokenizer(tmp_path / "model", named)
    engine = FakeEngine(own, lambda request, index: [*own.encode("hi"), EOS])
    with TestClient(create_app(engine, own, tmp_path, ApiOptions(99, 512))) as client:
        chat(client)
        assert prompt_of(engine) == "plain"
        chat(client, tools=[WEATHER])
        assert "weather" in prompt_of(engine)
        chat(client, tools=[WEATHER], tool_choice="none")
        assert prompt_of(engine) == "plain"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"name": "f", "parameters": {"a": 1}}', ["f"]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ["f", "g"]),
        (' [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', ["f", "g"]),
        ('{"name": 3}', []),
        ("{broken", []),
        ("plain {} text", []),
    ],
)
def test_calls_that_are_the_whole_text(tmp_path: Path, tokenizer: Tokenizer, text: str, names: list[str]) -> None:
    """As Llama 3 and Mistral write them."""
    own = write_tokenizer(tmp_path / "model", "{{ tools }}<|python_tag|>{{ messages[0].content }}")
    engine = FakeEngine(own, lambda request, index: [*own.encode(text), EOS])
    with TestClient(create_app(engine, own, tmp_path, ApiOptions(99, 512))) as client:
        [choice] = chat(client, tools=[WEATHER])["choices"]
        assert [call["function"]["name"] for call in choice["message"].get("tool_calls", [])] == names
        assert names or choice["message"]["content"] == text
        body = {"messages": USER, "tools": [WEATHER], "stream": True}
        parts = choices(chunks(client.post("/v1/chat/completions", json=body)))
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [call["function"]["name"] for call in calls] == names
        assert names or "".join(part["delta"].get("content", "") for part in parts) == text
