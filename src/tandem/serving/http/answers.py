"""Completed samples as OpenAI's response bodies: plain dicts, since validating our own output would cost
more than generating it on a small model.

One class for each route. `choice` is a whole sample; `chunks` follows one sample of a stream, part by part.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem.data.tokenizer import Tokenizer
from tandem.data.tool_calls import CallFormat, Found
from tandem.engine.protocol import GeneratedSample, GenerationRequest, GenerationResult
from tandem.serving.http.logprobs import TokenName, chat_logprobs, prompt_logprobs_by_id, text_logprobs
from tandem.serving.http.offsets import TextOffsets
from tandem.serving.http.prompts import as_prompts, uses_tools
from tandem.serving.http.text import GrowingText, TokenTexts, completion_text
from tandem.types.chat import ChatCompletionRequest
from tandem.types.openai import CompletionRequest, GenerationOptions

Choice = dict[str, Any]
NOTHING = GeneratedSample([], [], [], None, top_logprobs=[])
NO_TEXTS: dict[str, Any] = {"tokens": [], "top_logprobs": None, "text_offset": []}


class TextAnswers:
    """/v1/completions."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts, body: CompletionRequest) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.name: TokenName = texts.number if body.return_tokens_as_token_ids else texts.token
        self.with_top = bool(body.logprobs)
        self.lengths = texts.lengths[body.skip_special_tokens]

    def choice(
        self, index: int, request: GenerationRequest, result: GenerationResult, sample: GeneratedSample
    ) -> Choice:
        body = self.body
        text = whole_text(self.tokenizer, sample, body) if body.detokenize else ""
        echoed = self.prompt_text(request) if body.echo else ""
        logprobs = None
        if body.logprobs is not None and not body.detokenize:
            logprobs = NO_TEXTS | {"token_logprobs": sample.logprobs}
        elif body.logprobs is not None:
            prompt = request.prompt_ids if body.echo else []
            logprobs = text_logprobs(
                self.name,
                sample,
                [*self.prompt_offsets(prompt, echoed), *self.offsets(len(echoed)).push(sample.token_ids)],
                prompt=prompt,
                prompt_logprobs=result.prompt_logprobs or (),
                with_top=self.with_top,
            )
        choice = {
            "index": index,
            "text": echoed + text,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_by_id(self.name, result.prompt_logprobs or [])
        if body.return_token_ids:
            choice |= {"token_ids": sample.token_ids, "weight_versions": sample.versions}
            choice["prompt_token_ids"] = request.prompt_ids
        return choice | kept_tokens(sample)

    def extras(self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> dict[str, Any]:
        """What an answer has apart from the choices."""
        return {}

    def kept(self, sample: GeneratedSample) -> GeneratedSample:
        """With max_tokens = 0 the engine's one token is left out."""
        if self.body.max_tokens > 0:
            return sample
        return replace(NOTHING, finish_reason=sample.finish_reason and "length", kept_tokens=sample.kept_tokens and [])

    def offsets(self, start: int = 0) -> TextOffsets:
        return TextOffsets(self.lengths, start)

    def prompt_offsets(self, prompt_ids: list[int], text: str) -> list[int]:
        """A text that was given need not be what its tokens decode to: the tokenizer may change it first, or it may
        hold special tokens."""
        if text == self.tokenizer.decode(prompt_ids, skip_special_tokens=self.body.skip_special_tokens):
            return self.offsets().push(prompt_ids)
        return self.tokenizer.encode_with_starts(text, add_special_tokens=self.body.add_special_tokens)[1]

    def prompt_text(self, request: GenerationRequest) -> str:
        prompt = as_prompts(self.body.prompt)[request.first_index // request.n]
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        return self.tokenizer.decode(request.prompt_ids, skip_special_tokens=self.body.skip_special_tokens)

    def chunks(self, request: GenerationRequest) -> "TextChunks":
        return TextChunks(self, request)


class TextChunks:
    """One sample of a stream of /v1/completions."""

    def __init__(self, answers: TextAnswers, request: GenerationRequest) -> None:
        self.answers = answers
        self.request = request
        self._text = growing_text(answers.tokenizer, answers.body)
        self._offsets = answers.offsets()
        self._is_first = True

    def next(self, index: int, part: GeneratedSample) -> Choice | None:
        """The choice of the next chunk; None if there is nothing to tell."""
        body = self.answers.body
        text = self._text.push(part)
        if self._is_first and body.echo:
            text = self.answers.prompt_text(self.request) + text
        asks_tokens = body.return_token_ids or body.return_kept_token_ids or body.logprobs is not None
        if not (text or part.finish_reason or asks_tokens):
            return None
        logprobs = None
        if body.logprobs is not None:
            offsets = self._offsets.push(part.token_ids)
            logprobs = text_logprobs(self.answers.name, part, offsets, with_top=self.answers.with_top)
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if body.return_token_ids:
            choice |= {"token_ids": part.token_ids, "weight_versions": part.versions}
            if self._is_first:
                choice["prompt_token_ids"] = self.request.prompt_ids
        self._is_first = False
        return choice | kept_tokens(part)


class ChatAnswers:
    """/v1/chat/completions."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, tokenizer: Tokenizer, texts: TokenTexts, body: ChatCompletionRequest, make_reader: CallFormat | None
    ) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.name: TokenName = texts.number if body.return_tokens_as_token_ids else texts.token
        self.bytes_of = texts.bytes
        self.make_reader = make_reader if uses_tools(body) else None

    def choice(
        self, index: int, request: GenerationRequest, result: GenerationResult, sample: GeneratedSample
    ) -> Choice:
        body = self.body
        text = whole_text(self.tokenizer, sample, body)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        reason: str | None = sample.finish_reason
        if self.make_reader is not None:
            reader = self.make_reader()
            (content, calls), (rest, late_calls) = reader.push(text), reader.finish()
            calls = (calls + late_calls)[: None if body.parallel_tool_calls else 1]
            if calls:
                message["content"] = content + rest or None
                message["tool_calls"] = [call.as_message() for call in calls]
                reason = "tool_calls" if reason == "stop" else reason
        choice = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self.name, self.bytes_of, sample) if body.logprobs else None,
            "finish_reason": reason,
            "stop_reason": sample.stop_reason,
        }
        if body.return_token_ids:
            choice |= {"token_ids": sample.token_ids, "weight_versions": sample.versions}
        return choice | kept_tokens(sample)

    def extras(self, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]) -> dict[str, Any]:
        """What an answer has apart from the choices."""
        extras: dict[str, Any] = {}
        if self.body.return_token_ids:
            extras["prompt_token_ids"] = requests[0].prompt_ids
        if self.body.prompt_logprobs is not None and results:
            extras["prompt_logprobs"] = prompt_logprobs_by_id(self.name, results[0].prompt_logprobs or [])
        return extras

    def kept(self, sample: GeneratedSample) -> GeneratedSample:
        return sample

    def chunks(self, request: GenerationRequest) -> "ChatChunks":
        return ChatChunks(self)


class ChatChunks:
    """One sample of a stream of /v1/chat/completions."""

    def __init__(self, answers: ChatAnswers) -> None:
        self.answers = answers
        self._text = growing_text(answers.tokenizer, answers.body)
        self._reader = answers.make_reader() if answers.make_reader is not None else None
        self._num_calls = 0
        self._is_first = True

    def next(self, index: int, part: GeneratedSample) -> Choice | None:
        """The choice of the next chunk; None if there is nothing to tell."""
        body = self.answers.body
        content, calls = self._read(self._text.push(part), ended=part.finish_reason is not None)
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if self._is_first else {}
        if content:
            delta["content"] = content
        if not body.parallel_tool_calls:
            calls = calls[: 1 - self._num_calls]
        if calls:
            delta["tool_calls"] = [{"index": self._num_calls + i, **call.as_message()} for i, call in enumerate(calls)]
        self._num_calls += len(calls)
        self._is_first = False
        asks_tokens = body.return_token_ids or body.return_kept_token_ids or body.logprobs
        if not (delta or part.finish_reason or asks_tokens):
            return None
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(self.answers.name, self.answers.bytes_of, part) if body.logprobs else None,
            "finish_reason": "tool_calls" if part.finish_reason == "stop" and self._num_calls else part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if body.return_token_ids:
            choice |= {"token_ids": part.token_ids, "weight_versions": part.versions}
        return choice | kept_tokens(part)

    def _read(self, text: str, *, ended: bool) -> Found:
        if self._reader is None:
            return text, []
        content, calls = self._reader.push(text)
        if ended:
            rest, late_calls = self._reader.finish()
            return content + rest, calls + late_calls
        return content, calls


Answers = TextAnswers | ChatAnswers


def kept_tokens(sample: GeneratedSample) -> Choice:
    """Where they were asked for, and the engine can tell."""
    if sample.kept_tokens is None:
        return {}
    token_ids, logprobs = zip(*sample.kept_tokens, strict=True) if sample.kept_tokens else ((), ())
    return {"kept_token_ids": [ids.tolist() for ids in token_ids], "kept_logprobs": logprobs}


def whole_text(tokenizer: Tokenizer, sample: GeneratedSample, body: GenerationOptions) -> str:
    skip, keep = body.skip_special_tokens, body.include_stop_str_in_output
    return completion_text(tokenizer, sample, skip_special=skip, keep_stop=keep)


def growing_text(tokenizer: Tokenizer, body: GenerationOptions) -> GrowingText:
    return GrowingText(
        tokenizer, body.stops, skip_special=body.skip_special_tokens, keep_stop=body.include_stop_str_in_output
    )


def envelope(answers: Answers, kind: str, model: str) -> dict[str, Any]:
    """What every body and every chunk of one answer begins with."""
    number = answers.body.request_id or os.urandom(16).hex()
    return {"id": f"{answers.id_prefix}-{number}", "object": kind, "created": int(time.time()), "model": model}


def usage(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def whole_answer(
    answers: Answers, model: str, requests: Sequence[GenerationRequest], results: Sequence[GenerationResult]
) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices: list[Choice] = []
    num_completion = 0
    for request, result in zip(requests, results, strict=True):
        for sample in result.samples:
            kept = answers.kept(sample)
            num_completion += len(kept.token_ids)
            choices.append(answers.choice(len(choices), request, result, kept))
    num_prompt = sum(len(request.prompt_ids) for request in requests)
    num_cached = sum(result.num_cached_tokens for result in results)
    return {
        **envelope(answers, answers.kind, model),
        "choices": choices,
        "usage": usage(num_prompt, num_completion, num_cached),
        **answers.extras(requests, results),
    }
