"""The client against a real server on loopback that misbehaves on request."""

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.config.orchestrator import ClientConfig
from tandem.orchestrator import client as client_module
from tandem.orchestrator.client import InferenceClient, InferenceError, _completion

DROP = 0  # instead of a status: close the connection without an answer


class FakeServer:
    """Answers requests with the planned (status, body) one after the other; the last one again and again."""

    def __init__(self) -> None:
        self.plan: list[tuple[int, Any]] = [(200, {})]
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
                server.requests.append((self.path, dict(self.headers), body))
                status, answer = server.plan.pop(0) if len(server.plan) > 1 else server.plan[0]
                if status == DROP:
                    self.close_connection = True
                    return
                text = answer if isinstance(answer, str) else json.dumps(answer)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                """Not on standard error."""

        return Handler


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between attempts are noted, not slept."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client_module.asyncio, "sleep", note)
    return pauses


def with_client(server: FakeServer | str, body: Callable[[InferenceClient], Any], **options: Any) -> Any:
    url = server if isinstance(server, str) else server.url

    async def run() -> Any:
        client = InferenceClient(ClientConfig(base_url=url, **options))
        try:
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generate(client: InferenceClient) -> Any:
    return client.generate([1, 2, 3], n=2, max_tokens=4, temperature=0.5, seed=9)


def choice(index: int, token: int) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": [token],
        "logprobs": {"token_logprobs": [-0.25]},
        "weight_versions": [7],
        "finish_reason": "length",
    }


ANSWER = {"choices": [choice(1, 51), choice(0, 50)]}


def test_choices_come_back_in_order_and_the_request_says_everything(server: FakeServer) -> None:
    server.plan = [(200, ANSWER)]
    first, second = with_client(server, generate, api_key="secret")
    assert (first.token_ids, second.token_ids) == ([50], [51])
    assert (first.logprobs, first.versions, first.finish_reason) == ([-0.25], [7], "length")
    ((path, headers, body),) = server.requests
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer secret"
    expected = {"prompt": [1, 2, 3], "n": 2, "max_tokens": 4, "temperature": 0.5, "seed": 9, "return_token_ids": True}
    assert body | expected == body and body["logprobs"] == 0


@pytest.mark.parametrize("logprob", [-math.inf, -9999.0, math.nan, 0.5, None])
def test_a_log_prob_that_cannot_be_one_is_refused(server: FakeServer, logprob: float | None) -> None:
    """JSON has −9999 or null for minus infinity; the others stand for engines that are asked in another way."""
    wrong = choice(0, 50) | {"token_ids": [50, 51], "logprobs": {"token_logprobs": [-0.25, logprob]}}
    with pytest.raises(InferenceError, match=r"completion 0 of the server: the log-prob of .* token 1 of 2 is"):
        _completion(wrong)
    if logprob is None or math.isfinite(logprob):
        server.plan = [(200, {"choices": [choice(1, 51), wrong]})]
        with pytest.raises(InferenceError, match="token 1 of 2"):
            with_client(server, generate)
        assert len(server.requests) == 1


def test_a_certain_token_may_round_above_zero(server: FakeServer) -> None:
    certain = choice(0, 50) | {"logprobs": {"token_logprobs": [1e-6]}}
    server.plan = [(200, {"choices": [certain]})]
    assert with_client(server, generate)[0].logprobs == [1e-6]


def test_without_a_key_none_is_sent(server: FakeServer) -> None:
    server.plan = [(200, ANSWER)]
    with_client(server, generate)
    assert "Authorization" not in server.requests[0][1]


@pytest.mark.parametrize("trouble", [(503, "busy"), (429, "slow down"), (502, ""), (DROP, None)])
def test_what_fails_on_its_way_is_sent_again(server: FakeServer, trouble: tuple[int, Any], no_pauses) -> None:
    server.plan = [trouble, trouble, (200, ANSWER)]
    assert len(with_client(server, generate)) == 2
    assert len(server.requests) == 3
    assert [pause for pause in no_pauses if pause > 0] == [0.5, 1.0]


def test_a_server_that_stays_down_is_given_up(server: FakeServer) -> None:
    server.plan = [(503, {"error": {"message": "the engine is paused"}})]
    with pytest.raises(InferenceError, match=r"/v1/completions failed: 503: the engine is paused"):
        with_client(server, generate, retries=2)
    assert len(server.requests) == 3


def test_nobody_listening_is_an_error_after_the_retries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(InferenceError, match=r"failed: \w*Connect\w*Error"):
        with_client(address, generate, retries=1)


def test_what_the_server_refuses_is_not_sent_again(server: FakeServer) -> None:
    server.plan = [(400, {"error": {"message": "max_tokens = 0 is too small"}}), (200, ANSWER)]
    with pytest.raises(InferenceError, match="failed: 400: max_tokens = 0 is too small"):
        with_client(server, generate)
    assert len(server.requests) == 1


def test_a_refusal_in_another_shape_is_shown_as_it_is(server: FakeServer) -> None:
    server.plan = [(401, "who are you?")]
    with pytest.raises(InferenceError, match=r"401: who are you\?"):
        with_client(server, generate)


def test_update_weights_names_path_and_version(server: FakeServer, tmp_path: Path) -> None:
    with_client(server, lambda client: client.update_weights(tmp_path / "step_000004", 4))
    path, _, body = server.requests[0]
    assert (path, body) == ("/update_weights", {"path": str(tmp_path / "step_000004"), "version": 4, "mode": "keep"})


def test_an_adapter_is_loaded_in_place_and_asked_for_until_whole_weights_come(
    server: FakeServer, tmp_path: Path
) -> None:
    server.plan = [(200, {}), (200, ANSWER), (200, {}), (200, ANSWER)]

    async def run(client: InferenceClient) -> None:
        await client.load_adapter(tmp_path / "step_000004", 4)
        await generate(client)
        await client.update_weights(tmp_path / "step_000005", 5)
        await generate(client)

    with_client(server, run, update_mode="wait")
    (path, _, body), (_, _, asked), _, (_, _, asked_later) = server.requests
    assert path == "/load_lora_adapter"
    assert body == {
        "lora_name": "tandem-policy",
        "lora_path": str(tmp_path / "step_000004"),
        "load_inplace": True,
        "version": 4,
        "mode": "wait",
    }
    assert asked["model"] == "tandem-policy" and "model" not in asked_later


def test_waiting_for_a_server_that_is_starting(server: FakeServer) -> None:
    server.plan = [(503, ""), (DROP, None), (200, {})]
    with_client(server, lambda client: client.wait_until_ready())
    assert [path for path, _, _ in server.requests] == ["/health"] * 3


def test_waiting_has_a_deadline_that_names_the_server(server: FakeServer) -> None:
    server.plan = [(503, "")]
    with pytest.raises(TimeoutError, match=rf"waited 0\.05 s for the inference server at {server.url}; is it running"):
        with_client(server, lambda client: client.wait_until_ready(), startup_timeout_s=0.05)
