"""An engine that says what a script tells it to, one token a step, in a thread of its own."""

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np

from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import (
    EngineError,
    EngineStats,
    GeneratedSample,
    GenerationRequest,
    GenerationResult,
    KeptTokens,
    OnDone,
    OnPart,
    PromptLogprob,
    UpdateMode,
)
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused

Script = Callable[[GenerationRequest, int], list[int]]
"""The tokens the model would go on to write, for one sample."""


class FakeEngine:
    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.version = 3
        self.paused = False
        self.failure: str | None = None
        self.stats = EngineStats()
        self.adapters: dict[str, str] = {}
        self.asked: list[GenerationRequest] = []
        self.open: set[int] = set()
        self.cancelled: list[int] = []
        self.calls: list[tuple] = []
        self.go = threading.Event()  # cleared: the engine holds still
        self.go.set()
        self.error_after: int | None = None  # tokens, after which requests fail
        self.step_s = 0.0
        self.tells_end = True  # with the last part; else with the result alone
        self._ids = count(1)

    def start(self) -> None:
        """Every request has a thread of its own."""

    def submit(self, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None = None) -> int:
        request_id = next(self._ids)
        self.asked.append(request)
        self.open.add(request_id)
        threading.Thread(target=self._run, args=(request_id, request, on_done, on_part), daemon=True).start()
        return request_id

    def _run(self, request_id: int, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None) -> None:
        samples = [self.sample(request, index) for index in range(request.n)]
        for position in range(max(len(sample.token_ids) for sample in samples)):
            self.go.wait()
            time.sleep(self.step_s)
            if request_id not in self.open:
                return
            if self.error_after is not None and position >= self.error_after:
                self.open.discard(request_id)
                on_done(EngineError("out of luck"))
                return
            if on_part is not None:
                for index, sample in enumerate(samples):
                    if position < len(sample.token_ids) - (not self.tells_end):
                        on_part(index, part_at(sample, position))
        if request_id in self.open:
            self.open.discard(request_id)
            on_done(GenerationResult(samples, len(request.prompt_ids) // 2, self._prompt_logprobs(request)))

    def sample(self, request: GenerationRequest, index: int) -> GeneratedSample:
        sampling, text = request.sampling, ""
        tokens: list[int] = []
        stream = TextStream(self.tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        reason, stop_reason = "length", None
        for token in self.script(request, index)[: sampling.max_tokens]:
            tokens.append(token)
            known, text = len(text), text + stream.push([token])
            if len(tokens) <= sampling.min_tokens:
                continue
            found = [stop for stop in sampling.stop if text.find(stop, max(0, known - len(stop) + 1)) >= 0]
            is_eos = token in self.tokenizer.eos_token_ids and not sampling.ignore_eos
            if found or is_eos or token in sampling.stop_token_ids:
                reason = "stop"
                stop_reason = found[0] if found else None if is_eos else token
                break
        top = [[(token, -0.5), (token + 1, -1.5)][: request.top_logprobs] for token in tokens]
        return GeneratedSample(
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            versions=[self.version] * len(tokens),
            finish_reason=reason,  # pyright: ignore[reportArgumentType]
            stop_reason=stop_reason,
            top_logprobs=top if request.top_logprobs else None,
            kept_tokens=[KeptTokens(np.array([1, token]), -0.25) for token in tokens] if request.kept_tokens else None,
        )

    def _prompt_logprobs(self, request: GenerationRequest) -> list[PromptLogprob] | None:
        if request.prompt_logprobs is None:
            return None
        likeliest = [(1, -0.25), (2, -2.0)][: request.prompt_logprobs]
        return [PromptLogprob(token, -1.0, 2, likeliest) for token in request.prompt_ids[1:]]

    def cancel(self, request_id: int) -> None:
        if request_id in self.open:
            self.open.discard(request_id)
            self.cancelled.append(request_id)

    def pause(self, mode: UpdateMode = "keep") -> None:
        self.calls.append(("pause", mode))
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def update_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        if not path.is_dir():
            raise WeightUpdateRefused(f"{path} is not there")
        self.calls.append(("update_weights", path, version, mode))
        self.version = version

    def load_adapter(
        self, name: str, path: Path, version: int | None = None, *, replace: bool = False, mode: UpdateMode = "keep"
    ) -> None:
        if not path.is_dir():
            raise AdapterRefused(f"{path} is not there")
        self.calls.append(("load_adapter", name, version, replace, mode))
        self.adapters[name] = str(path)

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def reset_prefix_cache(self) -> None:
        self.calls.append(("reset_prefix_cache",))

    def stop(self) -> None:
        self.go.set()


def part_at(sample: GeneratedSample, position: int) -> GeneratedSample:
    """One token of a sample; the last one tells how it ended."""
    is_last = position == len(sample.token_ids) - 1
    at = slice(position, position + 1)
    return GeneratedSample(
        token_ids=sample.token_ids[at],
        logprobs=sample.logprobs[at],
        versions=sample.versions[at],
        finish_reason=sample.finish_reason if is_last else None,
        stop_reason=sample.stop_reason if is_last else None,
        top_logprobs=None if sample.top_logprobs is None else sample.top_logprobs[at],
        kept_tokens=None if sample.kept_tokens is None else sample.kept_tokens[at],
    )
