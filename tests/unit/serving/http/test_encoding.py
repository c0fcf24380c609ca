"""Long texts: refused by size, encoded beside the event loop, a few at a time."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import SEQ_LEN
from tests.unit.serving.http.fake_engine import FakeEngine

from tandem.data.tokenizer import Tokenizer
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.serving.http.text import NUM_THREADS, SHORT
from tandem.serving.text_size import LEAST_LIMIT, TextLimit, size_of

TOO_LONG = "a" * (LEAST_LIMIT + 1)


def test_the_limit_is_what_the_context_could_hold(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token_bytes == len("<eos>")
    assert TextLimit(tokenizer, 10).max_bytes == LEAST_LIMIT
    limit = TextLimit(tokenizer, 100_000)
    assert limit.max_bytes == 500_000 and limit.refusal(500_000) is None
    assert "500001 bytes" in (limit.refusal(500_001) or "") and "100000 tokens" in (limit.refusal(500_001) or "")


def test_all_text_counts() -> None:
    assert size_of({"ab": ["cde", {"f": "gh"}], "i": 1}) == 2 + 3 + 1 + 2 + 1 + 1
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert size_of(deep) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", TOO_LONG]}, "prompt"),
        ("/v1/completions", {"prompt": "é" * (LEAST_LIMIT // 2 + 1)}, "prompt"),
        ("/v1/completions", {"prompt": TOO_LONG, "truncate_prompt_tokens": 5}, "prompt"),
        ("/tokenize", {"prompt": TOO_LONG}, "prompt"),
        ("/detokenize", {"tokens": [1] * (LEAST_LIMIT + 1)}, "tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": TOO_LONG[: LEAST_LIMIT // 2 + 1]}] * 2},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": TOO_LONG}},
            "messages",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * (LEAST_LIMIT + 1)}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "text", "text": TOO_LONG}]}]}, "messages"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    client: TestClient, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict, param: str
) -> None:
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **named: encode(self, text[:100], **named))
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids, **named: pytest.fail("decoded"))
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert str(LEAST_LIMIT) in error["message"]


def test_a_list_ends_with_the_first_prompt_that_does_not_fit(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, **named: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **named)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    body = {"prompt": ["a", "b" * (SEQ_LEN + 1), *["c" * 9] * 500]}
    assert client.post("/v1/completions", json=body).status_code == 400
    assert encoded == [1, SEQ_LEN + 1]
    assert client.post("/v1/completions", json={"prompt": ["a"] * 5000}).json()["error"]["param"] == "n"
    assert len(encoded) == 2


class SlowTokenizer:
    """Encodes long texts only when told to, as if they took long; counts how many it is at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.num_running = 0
        self.most_running = 0
        self._lock = threading.Lock()
        encode = Tokenizer.encode

        def slowly(tokenizer: Tokenizer, text: str, **named: Any) -> list[int]:
            if len(text) > SHORT:
                self._begin()
                assert self.may_go_on.wait(60)
                self.num_running -= 1
            return encode(tokenizer, text, **named)

        monkeypatch.setattr(Tokenizer, "encode", slowly)

    def _begin(self) -> None:
        with self._lock:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)


def test_others_are_answered_while_a_long_text_is_encoded(
    engine: FakeEngine, tokenizer: Tokenizer, api_options: ApiOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowTokenizer(monkeypatch)
    app = create_app(engine, tokenizer, Path("/models/little"), api_options)
    long = "a" * (SHORT + 1)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://little") as client:
            bodies = [
                ("/v1/completions", {"prompt": long}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
                *[("/tokenize", {"prompt": long})] * 4,
            ]
            asked = [asyncio.create_task(client.post(path, json=body)) for path, body in bodies]
            while slow.num_running < NUM_THREADS:
                await asyncio.sleep(0.001)
            # None of these would be answered if the loop were held: the event is set after them.
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
            assert not any(task.done() for task in asked)
            slow.may_go_on.set()
            assert [(await task).status_code for task in asked] == [400, 400, 200, 200, 200, 200]

    asyncio.run(asyncio.wait_for(ask(), 60))
    assert slow.most_running == NUM_THREADS


def test_too_much_text_that_waits_is_refused(
    client: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    api_options: ApiOptions,
) -> None:
    slow = SlowTokenizer(monkeypatch)
    monkeypatch.setattr("tandem.serving.http.text.MAX_WAITING", 10_000)
    app = create_app(engine, tokenizer, Path("/models/little"), api_options)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://little") as client:
            asked = [asyncio.create_task(client.post("/tokenize", json={"prompt": "a" * 5000})) for _ in range(2)]
            while slow.num_running < 2:
                await asyncio.sleep(0.001)
            late = await client.post("/tokenize", json={"prompt": "a" * 5000})
            assert late.status_code == 429 and late.headers["Retry-After"]
            slow.may_go_on.set()
            assert [(await task).status_code for task in asked] == [200, 200]
            assert (await client.post("/tokenize", json={"prompt": "a" * 9000})).status_code == 200

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_a_long_text_is_encoded_without_the_interpreters_lock(smollm2_model: Path) -> None:
    """Another thread is never kept waiting for anything like the time that encoding takes."""
    tokenizer = Tokenizer(smollm2_model)
    text = "the quick brown fox jumps over the lazy dog. " * 20_000
    waits: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            started = time.monotonic()
            time.sleep(0.001)
            waits.append(time.monotonic() - started)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    token_ids = tokenizer.encode(text)
    took = time.monotonic() - started
    is_over.set()
    watcher.join()
    assert len(waits) > 10 and max(waits) < took / 2
    short = tokenizer.encode("the quick brown fox jumps over the lazy dog. ")
    assert token_ids[: len(short) - 1] == short[:-1]
