"""Completed samples as OpenAI's response bodies: plain dicts, since validating our own output would cost
more than generating it on a small model."""

import time
import uuid
from typing import Any

import orjson
from starlette.responses import Response

from tandem.data.tokenizer import Tokenizer
from tandem.inference.engine import GeneratedSample


class Answer(Response):
    """A JSON body; what is not a number leaves the server as null, so that every client can read it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class TokenTexts:
    """Token ids as text; single tokens are looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: dict[int, str] = {}

    def completion(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def token(self, token: int) -> str:
        text = self._tokens.get(token)
        if text is None:
            text = self._tokens[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


def error_answer(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Answer:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return Answer({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


def completion_choice(
    texts: TokenTexts, sample: GeneratedSample, prompt_ids: list[int], *, logprobs: bool, token_ids: bool
) -> dict[str, Any]:
    """One choice of /v1/completions, but for its index."""
    choice: dict[str, Any] = {
        "text": completion_text(texts, sample),
        "finish_reason": sample.finish_reason,
        "logprobs": _completion_logprobs(texts, sample) if logprobs else None,
    }
    return choice | _token_extras(sample, prompt_ids) if token_ids else choice


def chat_choice(
    texts: TokenTexts, sample: GeneratedSample, prompt_ids: list[int], *, logprobs: bool, token_ids: bool
) -> dict[str, Any]:
    """One choice of /v1/chat/completions, but for its index."""
    choice: dict[str, Any] = {
        "message": {"role": "assistant", "content": completion_text(texts, sample)},
        "finish_reason": sample.finish_reason,
        "logprobs": {"content": _chat_logprobs(texts, sample)} if logprobs else None,
    }
    return choice | _token_extras(sample, prompt_ids) if token_ids else choice


def envelope(kind: str, model: str, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage,
    }


def usage(prompts: list[list[int]], results: list[list[GeneratedSample]]) -> dict[str, int]:
    prompt_tokens = sum(len(prompt) for prompt in prompts)
    completion_tokens = sum(len(sample.token_ids) for samples in results for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def completion_text(texts: TokenTexts, sample: GeneratedSample) -> str:
    """Without the token that ended it."""
    ended = sample.finish_reason == "stop"
    return texts.completion(sample.token_ids[:-1] if ended else sample.token_ids)


def _token_extras(sample: GeneratedSample, prompt_ids: list[int]) -> dict[str, Any]:
    return {"token_ids": sample.token_ids, "prompt_token_ids": prompt_ids, "weight_versions": sample.versions}


def _completion_logprobs(texts: TokenTexts, sample: GeneratedSample) -> dict[str, Any]:
    tokens = [texts.token(token) for token in sample.token_ids]
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": sample.logprobs,
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _chat_logprobs(texts: TokenTexts, sample: GeneratedSample) -> list[dict[str, Any]]:
    tokens = [texts.token(token) for token in sample.token_ids]
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, sample.logprobs, strict=True)
    ]
