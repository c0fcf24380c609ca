"""An endpoint on loopback: what it is asked, what of its answers counts, and what an environment sees of them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tests.unit.orchestrator.planned_server import DROP, Plan, PlannedServer

from tandem.commands.evaluate import EndpointConfig
from tandem.envs.model import ChatRefused
from tandem.orchestrator.evaluation.endpoint import Answer, ChatEndpoint, EndpointModel
from tandem.utils.errors import UserError
from tandem.utils.http import RequestFailed

QUESTION = [{"role": "user", "content": "abc"}]


class FakeEndpoint(PlannedServer):
    def __init__(self) -> None:
        self.plan: Plan = []
        self.requests: list[tuple[str, str, Any]] = []  # method, path, body
        self.keys: list[str | None] = []
        super().__init__()

    class Handler(PlannedServer.Handler):
        def do_GET(self) -> None:
            self.fake.requests.append((self.command, self.path, self.body()))
            self.fake.keys.append(self.headers["Authorization"])
            self.answer(self.fake.plan)

        do_POST = do_GET


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))


def with_endpoint(
    server: FakeEndpoint,
    body: Callable[[ChatEndpoint], Awaitable[Any]],
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    async def run() -> Any:
        endpoint = ChatEndpoint(EndpointConfig(**options), server.url, sampling or {})
        try:
            return await body(endpoint)
        finally:
            await endpoint.close()

    return asyncio.run(run())


def choice(index: int, text: str | None, **message: Any) -> dict[str, Any]:
    return {"index": index, "message": {"content": text, **message}, "finish_reason": "stop"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_the_model_is_the_one_that_is_given_or_the_first_that_is_served(server: FakeEndpoint) -> None:
    server.plan = [(200, {"data": [{"id": "first"}, {"id": "second"}]})]

    async def find_twice(endpoint: ChatEndpoint) -> list[str]:
        return [await endpoint.find_model() for _ in range(2)]

    assert with_endpoint(server, find_twice, model="given") == ["given"] * 2 and server.requests == []
    assert with_endpoint(server, find_twice) == ["first"] * 2
    assert server.requests == [("GET", "/v1/models", None)]


@pytest.mark.parametrize(
    "answer", [(200, "models"), (200, {"data": []}), (200, []), (404, {"error": "no"}), (DROP, None)]
)
def test_an_endpoint_that_names_no_model_is_refused(server: FakeEndpoint, answer: tuple[int, Any]) -> None:
    server.plan = [answer]
    with pytest.raises(UserError, match=rf"^endpoint\.base_url = '{server.url}' does not name its models"):
        with_endpoint(server, lambda endpoint: endpoint.find_model())


def test_answers_come_in_order_and_the_request_says_what_is_asked(server: FakeEndpoint) -> None:
    server.plan = [(200, {"choices": [choice(1, "b"), choice(0, "a") | {"finish_reason": "length"}]})]
    sampling = {"temperature": 0.5}
    first, second = with_endpoint(
        server, lambda endpoint: endpoint.ask(QUESTION, n=2, seed=7, tools=[]), sampling, model="m", api_key="secret"
    )
    assert (first, second) == (Answer(said("a"), "length"), Answer(said("b"), "stop"))
    assert first.text == "a"
    expected = {"temperature": 0.5, "model": "m", "messages": QUESTION, "n": 2, "seed": 7}
    assert server.requests == [("POST", "/v1/chat/completions", expected)] and server.keys == ["Bearer secret"]
    assert sampling == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("sampling", "max_tokens", "expected"),
    [({"max_tokens": 7}, None, 7), ({"max_tokens": 7}, 5, 5), ({"max_tokens": 7}, 9, 7), ({}, 5, 5)],
)
def test_an_environment_may_ask_for_fewer_tokens_and_for_tools(
    server: FakeEndpoint, sampling: dict[str, Any], max_tokens: int | None, expected: int
) -> None:
    server.plan = [(200, {"choices": [choice(0, "a")]})]
    tools = [{"type": "function", "function": {"name": "look"}}]
    with_endpoint(
        server, lambda endpoint: endpoint.ask(QUESTION, n=1, seed=0, tools=tools, max_tokens=max_tokens), sampling
    )
    ((_, _, body),) = server.requests
    assert (body["max_tokens"], body["tools"]) == (expected, tools)


@pytest.mark.parametrize("trouble", [(429, {}), (503, {}), (DROP, None)])
def test_what_is_too_much_or_not_answered_is_sent_again(server: FakeEndpoint, trouble: tuple[int, Any]) -> None:
    server.plan = [trouble, trouble, (200, {"choices": [choice(0, "a")]})]
    (answer,) = with_endpoint(server, lambda endpoint: endpoint.ask(QUESTION, n=1, seed=0), retries=2)
    assert answer.text == "a" and len(server.requests) == 3


def test_what_is_refused_is_told_with_the_reason_and_not_sent_again(server: FakeEndpoint) -> None:
    server.plan = [(400, {"error": {"message": "no such model"}})]
    with pytest.raises(RequestFailed, match="failed: 400: no such model"):
        with_endpoint(server, lambda endpoint: endpoint.ask(QUESTION, n=1, seed=0), retries=2)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        *((answer, "did not answer with choices: ") for answer in ("text", {}, [], {"choices": [{}]})),
        ({"choices": [{"index": 0, "message": None, "finish_reason": "stop"}]}, "did not answer with choices: "),
        ({"choices": [choice(0, "a")]}, "gave 1 choices instead of 2"),
        ({"choices": [choice(index, "a") for index in range(3)]}, "gave 3 choices instead of 2"),
    ],
)
def test_what_is_no_answer_has_failed(server: FakeEndpoint, answer: Any, message: str) -> None:
    server.plan = [(200, answer)]
    with pytest.raises(RequestFailed, match=f"{server.url} {message}"):
        with_endpoint(server, lambda endpoint: endpoint.ask(QUESTION, n=2, seed=0))


def test_a_player_answers_one_episode(server: FakeEndpoint) -> None:
    """Tool calls have their arguments as tables; those that cannot be read are left out."""

    def call(number: int, arguments: Any) -> dict[str, Any]:
        return {"id": f"call-{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}

    calls = [call(0, '{"at": 1}'), call(1, '{"at"'), call(2, "[1]"), call(3, {"at": 2})]
    kept = [call(0, {"at": 1}), call(3, {"at": 2})]
    tools = [{"type": "function", "function": {"name": "look"}}]
    server.plan = [
        (200, {"choices": [choice(0, None, tool_calls=calls)]}),
        (200, {"choices": [choice(0, "done", tool_calls=calls[1:2])]}),
        (400, {"error": {"message": "too long"}}),
    ]
    first, second = said("") | {"tool_calls": kept}, said("done")

    async def play(endpoint: ChatEndpoint) -> None:
        model = EndpointModel(endpoint, seed=3)
        assert model.messages == []
        assert await model.chat(QUESTION, tools, 5) == {"message": first, "finish_reason": "stop"}
        assert model.messages == [*QUESTION, first]
        assert await model.chat([*QUESTION, first], None, None) == {"message": second, "finish_reason": "stop"}
        assert model.messages == [*QUESTION, first, second]
        with pytest.raises(ChatRefused, match="400: too long"):
            await model.chat(QUESTION, None, None)
        assert model.messages == [*QUESTION, first, second]
        model.restart()
        assert model.messages == []

    with_endpoint(server, play, model="m")
    asked = {"model": "m", "messages": QUESTION, "n": 1, "seed": 3}
    assert [body for _, _, body in server.requests] == [
        asked | {"tools": tools, "max_tokens": 5},
        asked | {"messages": [*QUESTION, first]},
        asked,
    ]


def test_an_endpoint_that_is_closed_leaves_its_connections(server: FakeEndpoint) -> None:
    server.plan = [(200, {"choices": [choice(0, "a")]})]

    async def ask_and_close(endpoint: ChatEndpoint) -> None:
        await endpoint.ask(QUESTION, n=1, seed=0)
        assert not server.was_left.is_set()
        await endpoint.close()
        assert await asyncio.to_thread(server.was_left.wait, 10)

    with_endpoint(server, ask_and_close)
