"""The goal-space server: what it answers, what it refuses, and that it measures nothing twice."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.ports import free_port
from tests.unit.tasks import until_alone

from tandem.config.goals import GoalConfig, GoalOptions
from tandem.serving.rewards import measures, server
from tandem.serving.rewards.batcher import Batcher
from tandem.serving.rewards.goals import GOALS, BadGoal, Goal, GoalSpace, make_goals
from tandem.serving.rewards.server import create_app
from tandem.serving.rewards.service import GoalService
from tandem.utils.connections import MAX_HEAD_BYTES
from tandem.utils.errors import UserError
from tandem.utils.serving.guards import guards

PLUGINS = str(Path(__file__).with_name("goal_plugins.py"))
CALLS = GoalConfig(type=f"{PLUGINS}:Calls")
VOWELS = GoalConfig(type=f"{PLUGINS}:vowels", lowest=0, highest=4)


def options(*goals: GoalConfig, **others: Any) -> GoalOptions:
    return GoalOptions(goals=list(goals), **others)


@pytest.fixture(autouse=True)
def changed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`app` changes what a process does with errors and connections, which uvicorn has for it alone; not this one."""
    changed: list[str] = []
    for name in ("make_errors_printable", "bound_every_connection"):
        monkeypatch.setattr(server, name, lambda *_, name=name: changed.append(name))
    return changed


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(create_app(options(VOWELS, CALLS, max_texts=3, max_text_chars=10))) as client:
        yield client


def test_goals_need_no_torch() -> None:
    code = "import sys, tandem.serving.rewards.server; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_goal_has_a_number_for_each_text(client: TestClient) -> None:
    answer = client.post("/goalspace", json={"texts": ["aa", "xyz"], "normalize": False})
    assert answer.json() == {"vowels": [2.0, 0.0], "Calls": [2.0, 3.0]}
    assert client.post("/goalspace", json={"texts": ["aa"]}).json() == {"vowels": [0.5], "Calls": [0.2]}
    assert client.post("/goalspace", json={"texts": ["aaaaaaa"]}).json()["vowels"] == [1.0]  # beyond the range
    largest = client.post("/goalspace", json={"texts": ["a" * 10, "b", "c"]})
    assert (largest.status_code, largest.json()["Calls"]) == (200, [1.0, 0.1, 0.1])
    for url in ("/goalspace", "/goalspace/"):
        answer = client.post(url, json=["aa", "xyz"], follow_redirects=False)
        assert answer.json() == {"vowels": [0.5, 0.0], "Calls": [0.2, 0.3]}
    assert client.get("/goals").json() == {
        "goals": {"vowels": {"lowest": 0.0, "highest": 4.0}, "Calls": {"lowest": 0.0, "highest": 10.0}}
    }
    assert client.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"texts": []}, 400, "texts: List should have at least 1 item"),
        ({"texts": [1]}, 400, "texts.0: Input should be a valid string"),
        ({}, 400, "texts: Field required"),
        ([], 400, "texts: List should have at least 1 item"),
        (["a", 1], 400, "texts.1: Input should be a valid string"),
        ("a", 400, "body: Input should be a valid dictionary"),
        ({"texts": ["a"], "normalise": True}, 400, "normalise: Extra inputs are not permitted"),
        ({"texts": ["a"] * 4}, 400, "4 texts are more than max_texts = 3"),
        ({"texts": ["a", "a" * 11]}, 400, "texts.1 has 11 characters, more than max_text_chars = 10"),
        ({"texts": ["a", "raise"]}, 500, "the goal 'Calls' failed: RuntimeError: no GPU left"),
        ({"texts": ["a", "short"]}, 500, "the goal 'Calls' gave 1 values for 2 texts"),
        ({"texts": ["a", "exit"]}, 500, "the goal 'Calls' failed: SystemExit: bye"),
        ({"texts": ["a", "cancel"]}, 500, "the goal 'Calls' failed: CancelledError"),
        ({"texts": ["a", "text"]}, 500, "the goal 'Calls' failed: TypeError: it gave '1', not a number"),
        ({"texts": ["a", "nan"]}, 500, "the goal 'Calls' gave nan, which is no finite number"),
    ],
)
def test_what_cannot_be_answered_says_why(client: TestClient, body: Any, status: int, message: str) -> None:
    answer = client.post("/goalspace", json=body)
    assert (answer.status_code, answer.json()["error"]["message"][: len(message)]) == (status, message)
    assert client.post("/goalspace", json={"texts": ["a"]}).status_code == 200  # and the server goes on
    assert f"tandem_goal_failures_total {float(status == 500)}" in client.get("/metrics").text


def test_texts_are_measured_together_and_once() -> None:
    space = GoalSpace(make_goals([CALLS]), cache_size=3)
    measure: Any = space.goals[0].measure
    assert space.place_all(["a", "bb", "a"]) == [(1.0,), (2.0,), (1.0,)]
    assert space.place_all(["bb", "ccc"]) == [(2.0,), (3.0,)]
    assert measure.asked == [["a", "bb"], ["ccc"]]
    assert space.num_hits == 1
    space.place_all(["dddd"])
    space.place_all(["a"])  # the oldest was forgotten
    assert measure.asked[2:] == [["dddd"], ["a"]]
    with pytest.raises(BadGoal):
        space.place_all(["nan"])
    assert space.place_all(["a"]) == [(1.0,)]
    assert type(space.place_all(["a"])[0][0]) is float


def test_nothing_is_remembered_unless_asked_for_and_each_measurement_is_timed() -> None:
    seen: list[tuple[str, float]] = []
    space = GoalSpace(make_goals([CALLS]), observe=lambda *told: seen.append(told))
    measure: Any = space.goals[0].measure
    started = time.monotonic()
    for _ in range(2):
        space.place_all(["a"])
    assert measure.asked == [["a"], ["a"]] and space.num_hits == 0
    assert [name for name, _ in seen] == ["Calls"] * 2
    assert 0 <= sum(seconds for _, seconds in seen) <= time.monotonic() - started


def test_values_are_normalized_over_the_range() -> None:
    goal = Goal("g", lambda texts: [0.0] * len(texts), lowest=2.0, highest=6.0)
    assert [goal.normalized(value) for value in (0, 2, 3, 6, 9)] == [0.0, 0.0, 0.25, 1.0, 1.0]


def test_our_goals_have_their_usual_ranges() -> None:
    assert {name: (goal.lowest, goal.highest) for name, goal in GOALS.items()} == {
        "length": (0, 400),
        "reading_difficulty": (0, 18),
        "lexical_diversity": (0, 150),
        "formality": (0, 100),
        "politeness": (0, 100),
    }


def test_a_goal_that_is_a_function_takes_its_args() -> None:
    goal = GoalConfig(type=f"{PLUGINS}:vowels", name="x", args={"letters": "x"}, lowest=0, highest=1)
    assert GoalSpace(make_goals([goal])).place_all(["xaxa"]) == [(2.0,)]


def test_a_text_that_is_asked_for_again_is_remembered_longest() -> None:
    space = GoalSpace(make_goals([CALLS]), cache_size=2)
    measure: Any = space.goals[0].measure
    for texts in (["a"], ["bb"], ["a"], ["ccc"], ["a"], ["bb"]):  # "ccc" takes the place of "bb"
        space.place_all(texts)
    assert measure.asked == [["a"], ["bb"], ["ccc"], ["bb"]]


def test_requests_that_wait_are_measured_together() -> None:
    app = create_app(options(CALLS, cache_size=0))
    with TestClient(app) as client, ThreadPoolExecutor(8) as threads:
        texts = ["x" * number for number in range(1, 41)]
        answers = list(threads.map(lambda text: client.post("/goalspace", json={"texts": [text]}).json(), texts))
        assert [answer["Calls"][0] for answer in answers] == [min(len(text) / 10, 1.0) for text in texts]
        metrics = client.get("/metrics").text
    assert "tandem_goal_texts_total 40.0" in metrics
    assert 'tandem_goal_seconds_count{goal="Calls"}' in metrics


def test_known_texts_are_counted() -> None:
    with TestClient(create_app(options(CALLS, cache_size=2))) as client:
        for texts in (["a", "bb"], ["bb", "ccc", "a"]):
            client.post("/goalspace", json={"texts": texts})
        assert "tandem_goal_cache_hits 2.0" in client.get("/metrics").text


def test_a_text_that_fails_costs_its_own_request_alone() -> None:
    space = GoalSpace(make_goals([CALLS]))
    measure: Any = space.goals[0].measure

    async def ask_together(*requests: list[str]) -> list[Any]:
        batcher = Batcher(space.place_all)
        asking = [asyncio.create_task(batcher.score(texts)) for texts in requests]
        await asyncio.sleep(0)  # all of them wait before the first is measured
        worker = asyncio.create_task(batcher.run())
        try:
            return await asyncio.gather(*asking, return_exceptions=True)
        finally:
            worker.cancel()

    first, guilty, last = asyncio.run(ask_together(["a", "bb"], ["raise"], ["ccc"]))
    assert measure.asked == [["a", "bb", "raise", "ccc"], ["a", "bb"], ["raise"], ["ccc"]]
    assert (first, last) == ([(1.0,), (2.0,)], [(3.0,)])
    assert isinstance(guilty, BadGoal)
    first, guilty = asyncio.run(ask_together(["a"], ["raise"]))
    assert first == [(1.0,)] and isinstance(guilty, BadGoal)


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_has_gone_away_while_scores_are_computed_costs_nobody_else(fails: bool) -> None:
    async def run() -> None:
        may_score, scored = threading.Event(), []

        def score_all(texts: list[str]) -> list[int]:
            scored.append(texts)
            may_score.wait(30)
            if fails and len(texts) > 1:
                raise ValueError
            return [len(text) for text in texts]

        batcher = Batcher(score_all)
        gone, stays = (asyncio.create_task(batcher.score([text])) for text in ("a", "bb"))
        await asyncio.sleep(0)
        worker = asyncio.create_task(batcher.run())
        while not scored:
            await asyncio.sleep(0.001)
        gone.cancel()
        await asyncio.wait([gone])
        may_score.set()
        assert await stays == [2]
        assert await batcher.score(["ccc"]) == [3]  # the worker goes on
        assert scored == [["a", "bb"], ["bb"], ["ccc"]] if fails else [["a", "bb"], ["ccc"]]
        worker.cancel()

    asyncio.run(run())


def test_scores_come_from_one_thread_that_ends_with_the_worker() -> None:
    threads, started, may_end, ended = set(), threading.Event(), threading.Event(), []

    def score_all(texts: list[str]) -> list[int]:
        threads.add(threading.current_thread())
        if "slow" in texts:
            started.set()
            may_end.wait(5)
            ended.append(True)
        return [0] * len(texts)

    async def run() -> Batcher[str, int]:
        batcher = Batcher(score_all)
        worker = asyncio.create_task(batcher.run())
        for _ in range(50):
            await batcher.score(["quick"])
        asked = asyncio.create_task(batcher.score(["slow"]))
        while not started.is_set():
            await asyncio.sleep(0.001)
        worker.cancel()
        await asyncio.wait([worker])
        assert not ended  # whoever cancels does not wait for the scores
        may_end.set()
        asked.cancel()
        return batcher

    batcher = asyncio.run(run())
    (thread,) = threads
    thread.join(5)
    assert not thread.is_alive(), batcher  # which still exists


def test_a_service_that_has_ended_leaves_nothing_running() -> None:
    async def run() -> None:
        async with GoalService(options(VOWELS)).running():
            pass
        await until_alone()

    asyncio.run(run())


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_scoring_that_wants_to_exit_fails_its_request(error: type[BaseException]) -> None:
    def score_all(texts: list[str]) -> list[int]:
        if "exit" in texts:
            raise error
        return [len(text) for text in texts]

    async def ask() -> list[int]:
        batcher = Batcher(score_all)
        worker = asyncio.create_task(batcher.run())
        try:
            with pytest.raises(RuntimeError, match=f"scoring raised {error.__name__}"):
                await batcher.score(["exit"])
            return await batcher.score(["a"])
        finally:
            worker.cancel()

    assert asyncio.run(ask()) == [1]


def test_the_key_and_the_size_of_a_body() -> None:
    given = guards(api_key="secret", host_names=None, max_body_bytes=100, receive_timeout_s=60)
    app = create_app(options(VOWELS), given)
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert client.post("/goalspace", json={"texts": ["a"]}, headers=headers).status_code == 401
            assert client.get("/goals", headers=headers).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.post("/goalspace", json={"texts": ["a"]}, headers=key).status_code == 200
        assert client.post("/goalspace", json={"texts": ["a" * 200]}, headers=key).status_code == 413
        chunks = (iter([b'{"texts"', b': ["a"]}']), 200), (iter([b"a" * 60] * 2), 413)
        for body, status in chunks:
            headers = key | {"Content-Type": "application/json"}
            assert client.post("/goalspace", content=body, headers=headers).status_code == status


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        ([{"type": f"{PLUGINS}:vowels", "lowest": 1}], "has no range to normalize by; give lowest and highest"),
        ([{"type": f"{PLUGINS}:vowels", "lowest": 2, "highest": 2}], "lowest = 2, which is not below highest = 2"),
        ([{"type": f"{PLUGINS}:vowels"}], "has no range to normalize by; give lowest and highest"),
        ([{"type": f"{PLUGINS}:vowels", "lowest": 2, "highest": 1}], "lowest = 2, which is not below highest = 1"),
        ([{"type": f"{PLUGINS}:none"}], "has no 'none'"),
        ([{"type": f"{PLUGINS}:Calls", "args": {"x": 1}}], "does not fit"),
        ([{"type": "length"}, {"type": "length"}], "two of them are called 'length'"),
    ],
)
def test_goals_that_cannot_be_had(goals: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_goals([GoalConfig.model_validate(goal) for goal in goals])


@pytest.mark.parametrize(
    ("goal", "module"),
    [
        ("reading_difficulty", "pyphen"),
        ("lexical_diversity", "lexicalrichness"),
        ("formality", "textblob.en"),
        ("politeness", "textblob.en"),
    ],
)
def test_a_missing_library_is_named(goal: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    measures.hyphenation.cache_clear()
    measures.num_syllables.cache_clear()
    with pytest.raises(UserError, match=rf"'{goal}': .*{module}.*; pip install 'tandem-rl\[goals\]'"):
        make_goals([GoalConfig(type=goal)])


def test_uvicorn_starts_it_with_several_workers(tmp_path: Path) -> None:
    port = free_port()
    toml = tmp_path / "goals.toml"
    length, vowels = 'type = "length"', f'type = "{PLUGINS}:vowels"\nlowest = 0\nhighest = 4'
    toml.write_text(f"[server]\nport = 1\n[[goals]]\n{length}\n[[goals]]\n{vowels}\n")
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "tandem.serving.rewards.server:app",
        "--port",
        str(port),
        "--workers",
        "2",
    ]
    with subprocess.Popen(command, env={**os.environ, "TANDEM_GOALS": str(toml)}, start_new_session=True) as process:
        try:
            asyncio.run(wait_for(f"http://127.0.0.1:{port}/health", process))
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/goalspace",
                b'{"texts": ["one two"], "normalize": false}',
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert response.read() == b'{"length":[2.0],"vowels":[3.0]}'
            refuses_what_the_reward_server_refuses(port)
        finally:
            process.terminate()


def refuses_what_the_reward_server_refuses(port: int) -> None:
    for headers, status in (
        ({"Host": "evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"A": "x" * MAX_HEAD_BYTES}, 431),
    ):
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/goalspace", b'{"texts": ["a"]}', headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == status and b'"error"' in refused.value.read()
        refused.value.close()


async def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(300):
        while process.poll() is None:
            try:
                urllib.request.urlopen(url, timeout=5).close()
                return
            except OSError:
                await asyncio.sleep(0.1)
    raise AssertionError("it did not start")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[[goals]]\ntype = "lenght"\n', "did you mean 'length'"),
        ('[model]\nname = "models/reward"\n', "is served by `reward-server @"),
        ('[server]\nkey = "x"\n', "server.key"),
    ],
)
def test_uvicorn_ends_with_one_line_where_the_file_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    toml = tmp_path / "goals.toml"
    toml.write_text(content)
    monkeypatch.setenv("TANDEM_GOALS", str(toml))
    server._app.cache_clear()
    with pytest.raises(SystemExit) as ended:
        _ = server.app
    told = capsys.readouterr().err
    assert ended.value.code == 3 and told.startswith("tandem.serving.rewards.server: ") and message in told
    assert told.count("\n") == 1


def test_the_key_of_the_file_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: list[str]) -> None:
    toml = tmp_path / "goals.toml"
    toml.write_text('[server]\nport = 8100\napi_key = "secret"\n[[goals]]\ntype = "length"\n')
    monkeypatch.setenv("TANDEM_GOALS", str(toml))
    server._app.cache_clear()
    with TestClient(server.app, "http://127.0.0.1") as client:
        assert client.get("/goals").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert client.get("/goals", headers=key).status_code == 200
        assert client.get("/goals", headers=key | {"Host": "evil.example"}).status_code == 200
    assert changed == ["make_errors_printable", "bound_every_connection"]
    server._app.cache_clear()


def test_uvicorn_takes_bodies_as_large_as_the_reward_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "goals.toml"
    limits = "max_texts = 2\nmax_text_chars = 10"
    toml.write_text(f'{limits}\n[server]\nport = 8100\nmax_body_mb = 1\n[[goals]]\ntype = "length"\n')
    monkeypatch.setenv("TANDEM_GOALS", str(toml))
    server._app.cache_clear()
    headers = {"Content-Type": "application/json"}
    with TestClient(server.app, "http://127.0.0.1") as client:
        escaped = json.dumps({"texts": ["\N{GRINNING FACE}" * 10] * 2})
        assert client.post("/goalspace", content=escaped, headers=headers).status_code == 200
        assert client.get("/goals", headers={"Host": "evil.example"}).status_code == 403
        refused = client.post("/goalspace", content=" " * (1 << 20) + escaped, headers=headers)
    assert refused.status_code == 413
    assert refused.json()["error"]["message"] == "the body is larger than server.max_body_mb allows: 1 MiB"
    server._app.cache_clear()
