"""The client against a real server on loopback that misbehaves on request, dies, comes back or is another's."""

import asyncio
import math
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.orchestrator.planned_server import DROP, Plan, PlannedServer
from tests.unit.tasks import until_alone

from tandem.config.client import ClientConfig
from tandem.orchestrator import client as client_module
from tandem.orchestrator.claim import RunClaim
from tandem.orchestrator.client import InferenceClient, InferenceError, InstanceChanged, ServerLost, _completion
from tandem.orchestrator.concurrency import NO_LOAD, EngineLoad
from tandem.types.identity import BEAT_S, ServerIdentity
from tandem.types.rollout import Kept, SamplingOptions, SamplingRequest
from tandem.utils.errors import UserError

RUN = "mine-1"
CLAIM = RunClaim(RUN, "0123456789abcdef", "/runs/mine on gpu7")


class FakeServer(PlannedServer):
    """Answers requests as planned; looks at its health, and claims, likewise."""

    def __init__(self) -> None:
        self.plan: Plan = [(200, {})]
        self.health: Plan = [(200, {})]
        self.metrics: Plan = [(404, {})]
        self.claims: Plan = [(200, {})]
        self.identity: ServerIdentity | None = ServerIdentity("first", "models/little", 7, (RUN,))
        self.on_request: Callable[[], None] = lambda: None  # before a request is answered
        self.on_look: Callable[[], None] = lambda: None
        self.num_looks = 0
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.claimed: list[tuple[str, Any]] = []  # and given back
        super().__init__()

    class Handler(PlannedServer.Handler):
        def do_POST(self) -> None:
            body = self.body()
            if self.path in ("/claim", "/release"):
                self.fake.claimed.append((self.path, body))
                self.say(self.fake.claims)
                return
            self.fake.requests.append((self.path, dict(self.headers), body))
            self.fake.on_request()
            self.say(self.fake.plan)

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.say(self.fake.metrics)
                return
            assert self.path == "/health"
            self.fake.num_looks += 1
            self.fake.on_look()
            self.say(self.fake.health)

        def say(self, plan: Plan) -> None:
            identity = self.fake.identity.to_headers() if self.fake.identity else {}
            self.answer(plan, {"Content-Type": "application/json", **identity})


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


def with_client(
    server: FakeServer | str, body: Callable[[InferenceClient], Any], *, adopted: bool = True, **options: Any
) -> Any:
    """`adopted`: the server has been given version 7, and serves it."""
    url = server if isinstance(server, str) else server.url

    async def run() -> Any:
        client = InferenceClient(ClientConfig(base_url=url, **options), CLAIM, url)
        if adopted:
            client._met = client._owned = client._hold.instance = "first"
            client._versions = {7}
            client.adopt()
        try:
            return await body(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generate(client: InferenceClient) -> Any:
    return client.generate([1, 2, 3], SamplingRequest(2, 4, temperature=0.5, seed=9))


def choice(index: int, token: int, version: int = 7) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": [token],
        "logprobs": {"token_logprobs": [-0.25]},
        "weight_versions": [version],
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
    assert body | expected == body and body["logprobs"] == 0 and body["detokenize"] is False
    # Nothing is left to the defaults of a server or of a model: they would change what is trained on.
    assert (body["top_p"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)
    assert (body["repetition_penalty"], body["presence_penalty"], body["frequency_penalty"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("logprob", [-math.inf, -9999.0, math.nan, 0.5, None])
def test_a_log_prob_that_cannot_be_one_is_refused(server: FakeServer, logprob: float | None) -> None:
    """JSON has −9999 or null for minus infinity; the others stand for engines that are asked in another way."""
    wrong = choice(0, 50) | {"token_ids": [50, 51], "logprobs": {"token_logprobs": [-0.25, logprob]}}
    with pytest.raises(InferenceError, match=r"completion 0 of the server: the log-prob of .* token 1 of 2 has"):
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


def test_sampling_options_are_sent_and_the_stop_comes_back(server: FakeServer) -> None:
    stopped = choice(0, 50) | {"finish_reason": "stop", "stop_reason": "\n"}
    server.plan = [(200, {"choices": [stopped, choice(1, 51) | {"stop_reason": 151645}]})]
    options = SamplingOptions(top_p=0.9, top_k=20, min_p=0.05, stop=("\n", "END"))
    first, second = with_client(
        server, lambda client: client.generate([1], SamplingRequest(2, 4, temperature=0.5, seed=9, options=options))
    )
    assert (first.stop, second.stop) == ("\n", None)
    ((_, _, body),) = server.requests
    assert (body["top_p"], body["top_k"], body["min_p"], body["stop"]) == (0.9, 20, 0.05, ["\n", "END"])


@pytest.mark.parametrize(("is_trained_on", "top_k", "asks"), [(True, 2, True), (False, 2, False), (True, 0, False)])
def test_kept_tokens_are_asked_for_where_they_are_trained_on(
    server: FakeServer, is_trained_on: bool, top_k: int, asks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told = choice(0, 50) | {"kept_token_ids": [[49, 50]], "kept_logprobs": [-0.125]}
    server.plan = [(200, {"choices": [told, choice(1, 51)]})]
    request = SamplingRequest(2, 4, 0.5, 9, SamplingOptions(top_k=top_k), is_trained_on=is_trained_on)
    first, second = with_client(server, lambda client: client.generate([1], request))
    ((_, _, body),) = server.requests
    assert body.get("return_kept_token_ids", False) is asks
    assert first.kept == Kept([[49, 50]], [-0.125]) and second.kept is None  # of an engine that cannot tell
    assert (first.sampled_logprobs, second.sampled_logprobs) == ([-0.125], [-0.25])
    assert ("the gradient is biased" in caplog.text) is asks


def test_a_server_that_tells_no_kept_tokens_is_named_once(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    kept = {"kept_token_ids": [[50]], "kept_logprobs": [-0.125]}
    server.plan = [(200, {"choices": [choice(0, 50) | kept]}), (200, {"choices": [choice(0, 50)]})]
    request = SamplingRequest(1, 4, 0.5, 9, SamplingOptions(top_k=2), is_trained_on=True)

    async def run(client: InferenceClient) -> list[int]:
        num_warnings = []
        for _ in range(3):
            await client.generate([1], request)
            num_warnings.append(len(caplog.records))
        return num_warnings

    assert with_client(server, run) == [0, 1, 1]


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"kept_token_ids": [[49]], "kept_logprobs": [-0.1]}, "token 0 is 50, which is not one of"),
        ({"kept_token_ids": [], "kept_logprobs": [-0.1]}, "1 tokens, but kept tokens for 0"),
        ({"kept_token_ids": [[50]], "kept_logprobs": [None]}, "must be finite"),
    ],
)
def test_kept_tokens_without_the_sampled_one_are_refused(kept: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceError, match=message):
        _completion(choice(0, 50) | kept)


def test_without_a_key_none_is_sent(server: FakeServer) -> None:
    server.plan = [(200, ANSWER)]
    with_client(server, generate)
    assert "Authorization" not in server.requests[0][1]


@pytest.mark.parametrize("trouble", [(503, "busy"), (429, "slow down"), (502, ""), (DROP, None)])
def test_what_fails_on_its_way_is_sent_again(
    server: FakeServer, trouble: tuple[int, Any], no_pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    server.plan = [trouble, trouble, (200, ANSWER)]
    assert len(with_client(server, generate)) == 2
    assert len(server.requests) == 3
    assert [pause for pause in no_pauses if pause > 0] == [0.5, 1.0]
    is_busy = trouble[0] == 429  # and well
    assert server.num_looks == (0 if is_busy else 2)
    assert [record.message.startswith(f"{server.url}/v1/completions: ") for record in caplog.records] == (
        [] if is_busy else [True] * 2
    )


def test_a_server_that_stays_down_is_given_up(server: FakeServer) -> None:
    server.plan = [(503, {"error": {"message": "the engine is paused"}})]
    with pytest.raises(InferenceError, match=r"/v1/completions failed: 503: the engine is paused"):
        with_client(server, generate, retries=2)
    assert len(server.requests) == 3


def test_a_server_that_stays_away_is_waited_for_and_then_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(
        ServerLost, match=rf"waited 0\.05 s for the inference server at {address}; it was lost with: \w*Conn"
    ):
        with_client(address, generate, retries=0, outage_timeout_s=0.05)


def test_an_outage_costs_no_retries_and_one_look_serves_all(server: FakeServer) -> None:
    dropped: list[tuple[int, Any]] = [(DROP, None)] * 4
    server.plan = [*dropped, (200, ANSWER)]
    server.health = [(503, ""), (DROP, None), (503, ""), (200, {})]

    async def run(client: InferenceClient) -> list[Any]:
        return await asyncio.gather(*(generate(client) for _ in range(4)))

    assert [len(completions) for completions in with_client(server, run, retries=1)] == [2] * 4
    assert len(server.requests) == 8
    assert server.num_looks < 16  # four in vain, and at most one of each request


@pytest.mark.parametrize(("status", "says_who"), [(400, True), (500, True), (499, False)])
def test_what_is_refused_is_not_sent_again(server: FakeServer, status: int, says_who: bool) -> None:
    """By the server, whatever the status, or by something on the way that did not like the request."""
    server.plan = [(status, {"error": {"message": "max_tokens = 0 is too small"}}), (200, ANSWER)]
    if not says_who:
        server.identity = None
    with pytest.raises(InferenceError, match=f"failed: {status}: max_tokens = 0 is too small"):
        with_client(server, generate)
    assert (len(server.requests), server.num_looks) == (1, 0)


def test_a_refusal_in_another_shape_is_shown_as_it_is(server: FakeServer) -> None:
    server.plan = [(401, "who are you?")]
    with pytest.raises(InferenceError, match=r"401: who are you\?"):
        with_client(server, generate)


def test_update_weights_names_path_and_version(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_client(server, lambda client: client.update_weights(Path("step_000004"), 4))
    path, _, body = server.requests[0]
    expected = {"path": str(tmp_path / "step_000004"), "version": 4, "mode": "keep", "run": RUN}
    assert (path, body) == ("/update_weights", expected)


def test_a_folder_is_asked_about_before_anything_is_loaded_from_it(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_client(server, lambda client: client.check_root(Path("weights")), adopted=False)
    path, _, body = server.requests[0]
    assert (path, body) == ("/update_weights", {"path": str(tmp_path / "weights"), "version": 0, "check_only": True})
    server.plan = [(400, {"error": {"message": "is not below"}})]
    with pytest.raises(InferenceError, match="is not below"):
        with_client(server, lambda client: client.check_root(tmp_path))


@pytest.mark.parametrize(
    ("status", "told"),
    [(400, "400: is not below$"), (401, "401: is not below; give its key with --client.api-key-var$")],
)
def test_a_server_that_refuses_the_run_is_a_mistake_of_the_users(
    server: FakeServer, tmp_path: Path, status: int, told: str
) -> None:
    server.plan = [(status, {"error": {"message": "is not below"}})]
    with pytest.raises(UserError, match=f"^client.base_url = 'http://.*': the server there refuses this run: .*{told}"):
        with_client(server, lambda client: client.check_access(tmp_path), adopted=False)


def test_an_adapter_is_loaded_in_place_and_asked_for_until_whole_weights_come(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server.plan = [(200, {}), (200, ANSWER), (200, {}), (200, ANSWER)]

    async def run(client: InferenceClient) -> None:
        await client.load_adapter(Path("step_000004"), 4)
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
        "run": RUN,
    }
    assert asked["model"] == "tandem-policy" and "model" not in asked_later


def test_waiting_for_a_server_that_is_starting(server: FakeServer, no_pauses: list[float]) -> None:
    server.health = [(503, ""), (DROP, None), (200, {})]
    troubles: list[int] = []

    async def run(client: InferenceClient) -> None:
        client.on_trouble = lambda: troubles.append(server.num_looks)
        await client.wait_until_ready()

    with_client(server, run, adopted=False)
    assert server.num_looks == 3 and troubles == [1, 2]
    assert [pause for pause in no_pauses if pause > 0] == [client_module.POLL_S] * 2


def test_waiting_has_a_deadline_that_names_the_server(server: FakeServer) -> None:
    server.health = [(503, "")]
    with pytest.raises(TimeoutError, match=rf"waited 0\.05 s for the inference server at {server.url}; is it running"):
        with_client(server, lambda client: client.wait_until_ready(), startup_timeout_s=0.05)


def restarted(server: FakeServer) -> Callable[[], None]:
    """The server dies and is started again: another process, which knows no run."""

    def restart() -> None:
        server.identity = ServerIdentity("second", "models/little", 0, ("-",))

    return restart


@pytest.mark.parametrize("answer", [(200, ANSWER), (404, {"error": {"message": "no such adapter"}}), (DROP, None)])
def test_another_instance_is_noticed_whatever_it_answers(server: FakeServer, answer: tuple[int, Any]) -> None:
    server.plan = [answer]
    server.on_request = restarted(server)

    async def run(client: InferenceClient) -> None:
        with pytest.raises(InstanceChanged):
            await generate(client)
        assert client.instance is None

    with_client(server, run)
    assert len(server.requests) == 1


def test_the_load_is_what_the_metrics_tell_or_nothing(server: FakeServer) -> None:
    told = "tandem_sequences_running 3.0\ntandem_sequences_waiting 1.0\ntandem_cache_usage_ratio 0.5\n"
    server.metrics = [(404, told), (499, {}), (500, {}), (503, {}), (200, "no metrics"), (200, told)]

    async def ask(client: InferenceClient) -> list[EngineLoad | None]:
        return [await client.read_load() for _ in range(6)]

    assert with_client(server, ask) == [None, None, NO_LOAD, NO_LOAD, None, EngineLoad(3, 1, 0.5)]


def test_a_server_is_met_given_weights_and_adopted(server: FakeServer, tmp_path: Path) -> None:
    """Whatever run it served before."""
    server.identity = ServerIdentity("second", "models/little", 5, ("theirs-1",))
    server.plan = [(200, {}), (200, ANSWER)]

    def loaded() -> None:
        server.identity = ServerIdentity("second", "models/little", 7, ("theirs-1", RUN))
        server.on_request = lambda: setattr(server, "identity", ServerIdentity("second", "m", 7, (RUN,)))

    server.on_request = loaded

    async def run(client: InferenceClient) -> None:
        await client.meet()
        await client.update_weights(tmp_path, 7)
        assert client.instance is None
        client.adopt()
        assert client.instance == "second" and len(await generate(client)) == 2
        assert client.is_busy is False
        server.on_request = lambda: setattr(server, "identity", ServerIdentity("second", "m", 7, ("theirs-1",)))
        with pytest.raises(ServerLost, match="have been replaced by run 'theirs-1'"):
            await generate(client)

    with_client(server, run, adopted=False)
    assert server.claimed[0] == ("/claim", CLAIM.body | {"instance": None, "check_only": False})


def test_a_claim_says_which_start_of_the_server_the_run_held(server: FakeServer, tmp_path: Path) -> None:
    """And goes on saying so until it holds the next one."""

    async def run(client: InferenceClient) -> None:
        client._hold.begin("first")
        server.identity = ServerIdentity("second", "models/little", 7, ("-",))
        while not server.claimed:
            await asyncio.sleep(0)
        num_early = len(server.claimed)
        await client.meet()
        await client.update_weights(tmp_path, 7)
        while len(server.claimed) < num_early + 4:
            await asyncio.sleep(0)

    server.plan = [(200, {})]
    with_client(server, run)
    said = [body["instance"] for _, body in server.claimed]
    assert said[0] == "first" and said[-1] == "second" and said == sorted(said)


def test_a_server_is_claimed_before_it_is_given_weights_and_held_until_it_is_given_back(
    server: FakeServer, tmp_path: Path, no_pauses: list[float]
) -> None:
    async def run(client: InferenceClient) -> int:
        await client.meet()
        await client.update_weights(tmp_path, 7)
        await client.update_weights(tmp_path, 8)
        while len(server.claimed) < 4:  # it is heard of without asking for anything
            await asyncio.sleep(0)
        await client.release()
        assert no_pauses.count(BEAT_S) >= 3
        await until_alone()  # it is not heard of any more
        return len(server.claimed)

    server.plan = [(200, {})]
    num_told = with_client(server, run, adopted=False)
    *claims, last = server.claimed
    assert len(server.claimed) == num_told and last == ("/release", {"lease": CLAIM.lease})
    assert {path for path, _ in claims} == {"/claim"}
    assert [body["check_only"] for _, body in claims if "check_only" in body] == [False], "claimed once"


def test_whoever_checks_that_a_server_takes_the_run_holds_it(server: FakeServer, tmp_path: Path) -> None:
    async def run(client: InferenceClient) -> None:
        await client.check_access(tmp_path, check_only=True)
        assert client._hold.instance is None
        await client.check_access(tmp_path)
        assert client._hold.instance == "first"
        assert not server.was_left.is_set()
        await client.close()
        await until_alone()  # a client that is closed is not heard of any more
        assert await asyncio.to_thread(server.was_left.wait, 10)

    with_client(server, run, adopted=False)


def test_a_server_that_is_started_again_while_it_is_asked_is_asked_again(server: FakeServer, tmp_path: Path) -> None:
    def restart() -> None:
        restarted(server)()
        server.on_request = lambda: None

    server.on_request = restart
    with_client(server, lambda client: client.check_access(tmp_path), adopted=False)
    assert len(server.requests) == 2 and server.claimed[0][0] == "/claim"


def test_a_server_that_another_run_holds_is_given_nothing(server: FakeServer, tmp_path: Path) -> None:
    async def load(client: InferenceClient) -> None:
        await client.meet()
        await client.update_weights(tmp_path, 7)

    server.claims = [(409, {"error": {"message": "run 'theirs-1' (/runs/theirs on gpu8) uses this server"}})]
    with pytest.raises(InferenceError, match="409: run 'theirs-1'"):
        with_client(server, load, adopted=False)
    assert server.requests == []
    told = rf"^orchestrator\.client\.base_url = '{server.url}': the server there refuses this run: .*run 'theirs-1'"
    for check_only in (True, False):
        with pytest.raises(UserError, match=told):
            with_client(
                server,
                lambda client, given=check_only: client.check_access(tmp_path, "orchestrator.client", check_only=given),
                adopted=False,
            )
        assert server.claimed[-1][1]["check_only"] is check_only


def test_what_was_under_way_before_a_restart_stays_meant_for_the_old_instance(server: FakeServer) -> None:
    """By the time its answer comes, somebody else may have given the new one its weights."""
    server.plan = [(200, ANSWER)]

    async def run(client: InferenceClient) -> None:
        def restart() -> None:
            server.identity = ServerIdentity("second", "models/little", 7, ("-", RUN))
            client.instance = "second"

        server.on_request = restart
        with pytest.raises(InstanceChanged):
            await generate(client)
        assert client.instance == "second"  # the new one is not forgotten for it

    with_client(server, run)


@pytest.mark.parametrize(
    ("runs", "who"),
    [
        (("theirs-1",), "run 'theirs-1'"),
        ((RUN, "theirs-1", RUN), "run 'theirs-1'"),
        ((RUN, "-"), "a client that named no run"),
    ],
)
@pytest.mark.parametrize("status", [200, 409])
def test_weights_of_another_run_end_this_one(server: FakeServer, runs: tuple[str, ...], who: str, status: int) -> None:
    server.plan = [(status, ANSWER)]
    server.identity = ServerIdentity("first", "models/little", 7, runs)
    with pytest.raises(ServerLost, match=rf"weights of this run \({RUN}\) at {server.url} have been replaced by {who}"):
        with_client(server, generate)


def test_a_version_that_was_never_loaded_ends_the_run(server: FakeServer) -> None:
    server.plan = [(200, {"choices": [choice(0, 50) | {"weight_versions": [7, 8]}]})]
    with pytest.raises(ServerLost, match=r"tokens of version 8, which this run \(mine-1\) has not loaded into it"):
        with_client(server, generate)


def test_versions_that_the_start_before_was_given_are_unknown_to_the_next(server: FakeServer, tmp_path: Path) -> None:
    server.plan = [(200, {}), (200, {"choices": [choice(0, 50, version=8)]}), (200, {"choices": [choice(0, 50)]})]

    async def run(client: InferenceClient) -> None:
        server.identity = ServerIdentity("second", "models/little", 8, (RUN,))
        await client.meet()
        await client.update_weights(tmp_path, 8)
        client.adopt()
        await generate(client)
        with pytest.raises(ServerLost, match="tokens of version 7"):
            await generate(client)

    with_client(server, run)


def test_something_else_at_the_address_is_not_trained_on(server: FakeServer) -> None:
    server.plan = [(200, ANSWER)]
    server.identity = None
    with pytest.raises(ServerLost, match=rf"{server.url} does not say which server it is"):
        with_client(server, generate)
    with pytest.raises(ServerLost, match="does not say which server it is"):
        with_client(server, lambda client: client.wait_until_ready(), adopted=False)


def test_an_error_of_something_on_the_way_is_no_answer_of_the_server(server: FakeServer) -> None:
    """A plain 500: the server itself would have said who it is."""
    server.plan = [(500, "Internal Server Error"), (200, ANSWER)]
    server.identity, identity = None, server.identity
    server.on_look = lambda: setattr(server, "identity", identity)
    assert len(with_client(server, generate)) == 2
    assert len(server.requests) == 2


def test_a_new_instance_ends_what_the_one_before_was_asked_for(server: FakeServer) -> None:
    """Its machine lost its power: no connection was closed, and no answer will come."""
    held = threading.Event()

    def hold() -> None:
        held.wait()

    server.on_request = hold

    async def run(client: InferenceClient) -> None:
        asking = [asyncio.ensure_future(generate(client)) for _ in range(3)]
        try:
            while len(server.requests) < 3:
                assert await client.is_well()
            assert client.is_busy is True and not any(task.done() for task in asking)
            restarted(server)()
            assert await client.is_well()
            assert (client.instance, client.is_busy) == (None, False)
            for task in asking:
                with pytest.raises(InstanceChanged):
                    await asyncio.wait_for(task, 60)
        finally:
            held.set()

    with_client(server, run)
    assert len(server.requests) == 3  # sent again by nobody here
