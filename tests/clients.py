"""Clients that others wrote, used as their users use them, against any server of ours.

Each check takes the server's address, its model and its key. None of them knows which engine answers.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.patience import PATIENCE

TIMEOUT_S = 120 * PATIENCE
REPOSITORY = Path(__file__).parents[1]
QUESTION = "Name three colours of the rainbow."
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Address:
    base_url: str  # without /v1
    model: str
    key: str = "none"

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=self.key, max_retries=0, timeout=TIMEOUT_S)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self.key, max_retries=0, timeout=TIMEOUT_S)


def check_openai_completions(server: Address) -> None:
    with server.client() as client:
        assert server.model in [model.id for model in client.models.list()]
        ask: Any = {"model": server.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
        whole = client.completions.create(**ask, logprobs=2)
        [choice] = whole.choices
        assert "Paris" in choice.text and choice.finish_reason == "length"
        assert choice.logprobs is not None and choice.logprobs.tokens and choice.logprobs.top_logprobs
        assert "".join(choice.logprobs.tokens) == choice.text
        assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens) == 8
        assert whole.usage is not None and whole.usage.completion_tokens == 8
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
        assert len(pieces) > 2 and "".join(pieces) == choice.text
        echoed = client.completions.create(**ask, echo=True).choices[0].text
        assert echoed == ask["prompt"] + choice.text
        several = client.completions.create(**{**ask, "prompt": ["One,", "Two,"], "temperature": 1}, n=2, seed=1)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        stopped = client.completions.create(**ask, stop=["Paris"]).choices[0]
        assert "Paris" not in stopped.text and stopped.finish_reason == "stop"


def check_openai_chat(server: Address) -> None:
    with server.client() as client:
        ask: Any = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        whole = client.chat.completions.create(**ask, max_completion_tokens=24, logprobs=True, top_logprobs=3)
        [choice] = whole.choices
        assert choice.message.role == "assistant" and choice.message.content
        assert choice.logprobs is not None and choice.logprobs.content
        assert len(choice.logprobs.content[0].top_logprobs) == 3
        stream = client.chat.completions.create(
            **ask, max_completion_tokens=24, stream=True, stream_options={"include_usage": True}
        )
        *parts, last = list(stream)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == choice.message.content and parts[0].choices[0].delta.role == "assistant"
        assert parts[-1].choices[0].finish_reason == choice.finish_reason
        assert last.usage is not None and whole.usage is not None
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        parts_content: Any = [{"type": "text", "text": QUESTION}]
        ask["messages"] = [{"role": "user", "content": parts_content}]
        assert client.chat.completions.create(**ask, max_tokens=24).choices[0].message.content == text


def check_openai_async(server: Address) -> None:
    async def check() -> None:
        async with server.async_client() as client:

            async def one(index: int) -> str:
                messages: Any = [{"role": "user", "content": f"Count from {index}."}]
                ask: Any = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 8}
                whole = await client.chat.completions.create(**ask)
                stream = await client.chat.completions.create(**ask, stream=True)
                pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
                assert "".join(pieces) == whole.choices[0].message.content
                return "".join(pieces)

            texts = await asyncio.gather(*(one(index) for index in range(8)))
            assert len(set(texts)) > 1

    asyncio.run(check())


def check_openai_token_extras(server: Address) -> None:
    """Fields that vLLM added to OpenAI's, through the official client."""
    with server.client() as client:
        prompt = client.post(f"{server.base_url}/tokenize", body={"prompt": "The sky is"}, cast_to=object)
        tokens = prompt["tokens"]  # type: ignore[index]
        extras = {
            "return_token_ids": True, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3,
            "ignore_eos": True, "stop_token_ids": [], "prompt_logprobs": 1, "skip_special_tokens": True,
        }  # fmt: skip
        ask: Any = {"model": server.model, "prompt": tokens, "max_tokens": 4, "temperature": 0}
        [choice] = client.completions.create(**ask, extra_body=extras).choices
        found = choice.model_extra or {}
        assert found["prompt_token_ids"] == tokens and len(found["token_ids"]) == 4
        assert found["prompt_logprobs"][0] is None and str(tokens[1]) in found["prompt_logprobs"][1]
        del extras["prompt_logprobs"]
        streamed = [chunk.choices[0] for chunk in client.completions.create(**ask, extra_body=extras, stream=True)]
        told = [token for part in streamed for token in (part.model_extra or {})["token_ids"]]
        assert told == found["token_ids"]
        text = client.post(f"{server.base_url}/detokenize", body={"tokens": tokens}, cast_to=object)
        assert text == {"prompt": "The sky is"}


def check_openai_errors(server: Address) -> None:
    with server.client() as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=messages)
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=server.model, messages=messages, temperature=-1)
        assert refused.value.body is not None
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=server.model, prompt="a", max_tokens=10**9)
    if server.key != "none":
        with (
            Address(server.base_url, server.model, "wrong").client() as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


def check_openai_tools(server: Address) -> None:
    """A whole conversation with a tool, on the scripted model: a call, its answer, the model's words on it."""
    with server.client() as client:
        messages: list[Any] = [{"role": "user", "content": "How is the weather in Lodz?"}]
        ask: Any = {"model": server.model, "tools": [WEATHER], "tool_choice": "auto", "temperature": 0}
        [choice] = client.chat.completions.create(**ask, messages=messages).choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Łódź"}
        assert (choice.message.content or "").strip() == "Let me look."

        with client.chat.completions.stream(**ask, messages=messages) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls
        assert streamed.message.tool_calls[0].function.name == "get_weather"
        assert json.loads(streamed.message.tool_calls[0].function.arguments) == {"city": "Łódź"}

        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        [choice] = client.chat.completions.create(**ask, messages=messages).choices
        assert choice.message.content == "It is sunny in Łódź." and not choice.message.tool_calls
        [choice] = client.chat.completions.create(**{**ask, "tool_choice": "none"}, messages=messages[:1]).choices
        assert choice.message.content == "Hello there, 世界!"


class Capital(pydantic.BaseModel):
    country: Literal["France", "Peru"]
    letters: int = pydantic.Field(ge=1, le=20)


def check_openai_structured(server: Address) -> None:
    """Answers that follow a schema, a regex, a list; whole and streamed."""
    with server.client() as client:
        messages: Any = [{"role": "user", "content": "Name a country, and how many letters its capital has, as JSON."}]
        ask: Any = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 100}
        [choice] = client.chat.completions.parse(**ask, response_format=Capital).choices
        assert choice.message.parsed is not None and choice.finish_reason == "stop"
        schema = {"name": "capital", "schema": Capital.model_json_schema(), "strict": True}
        as_json: Any = {"type": "json_schema", "json_schema": schema}
        stream = client.chat.completions.create(**ask, response_format=as_json, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert Capital.model_validate_json(text) == choice.message.parsed

        [choice] = client.chat.completions.create(**ask, response_format={"type": "json_object"}).choices
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content or ""), dict)
        regex = {"structured_outputs": {"regex": r"[A-Z][a-z]{2,9}, \d{4}"}}
        several = client.chat.completions.create(**ask | {"temperature": 1, "n": 3, "seed": 1}, extra_body=regex)
        for choice in several.choices:
            assert re.fullmatch(r"[A-Z][a-z]{2,9}, \d{4}", choice.message.content or ""), choice.message.content
        for body in ({"structured_outputs": {"choice": ["Lima", "Oslo"]}}, {"guided_choice": ["Lima", "Oslo"]}):
            [choice] = client.chat.completions.create(**ask, extra_body=body).choices
            assert choice.message.content in ("Lima", "Oslo")
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**ask, extra_body={"structured_outputs": {"regex": "(a"}})


def check_openai_enforced_tools(server: Address) -> None:
    """Calls that the scripted model would not have made by itself."""
    days = {"type": "integer", "minimum": 1, "maximum": 9}
    parameters = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}, "days": days}}
    parameters |= {"required": ["city", "days"], "additionalProperties": False}
    forecast: Any = {"type": "function", "function": {"name": "forecast", "parameters": parameters}}
    other: Any = {"type": "function", "function": {"name": "stop"}}
    named: Any = {"type": "function", "function": {"name": "forecast"}}
    with server.client() as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        ask: Any = {"model": server.model, "messages": messages, "temperature": 1, "parallel_tool_calls": False}
        for choose, offered in (("required", [forecast]), (named, [forecast, other])):
            asked: Any = {**ask, "tools": offered, "tool_choice": choose}
            [choice] = client.chat.completions.create(**asked).choices
            assert choice.message.tool_calls
            for call in choice.message.tool_calls:
                assert call.type == "function" and call.function.name == "forecast"
                arguments = json.loads(call.function.arguments)
                assert arguments["city"] in ("Ulm", "Rom") and arguments["days"] in range(1, 10)


def run_lm_eval(
    server: Address, task: str, folder: Path, *, chat: bool, tokenizer: str | None = None
) -> dict[str, Any]:
    """Results of a task in tests/lm_eval, by lm-eval's own command. Some servers do not serve their tokenizer."""
    route = "v1/chat/completions" if chat else "v1/completions"
    arguments = {
        "model": server.model,
        "base_url": f"{server.base_url}/{route}",
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 512,
        "auth_token": server.key,
    }
    if tokenizer is not None:
        arguments |= {"tokenizer": tokenizer, "tokenizer_backend": "huggingface"}
    command = [
        *(sys.executable, "tests/lm_eval/command.py", "run"),
        *("--model", "local-chat-completions" if chat else "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--include_path", "tests/lm_eval", "--tasks", task, "--batch_size", "1"),
        *("--output_path", str(folder / "out"), "--log_samples"),
        *(["--apply_chat_template"] if chat else []),
    ]
    environment = os.environ | {
        "OPENAI_API_KEY": server.key,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300 * PATIENCE, env=environment, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [results] = (folder / "out").rglob("results*.json")
    return json.loads(results.read_text())["results"][task]
