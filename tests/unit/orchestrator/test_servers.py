"""Several servers behind one policy: who is asked, who gets which weights, and what happens when one goes away."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.unit.tasks import until_alone

from tandem.config.client import ClientConfig, read_servers
from tandem.orchestrator import replica as replica_module
from tandem.orchestrator import servers as servers_module
from tandem.orchestrator.client import InferenceError, ServerGone, ServerLost
from tandem.orchestrator.concurrency import EngineLoad
from tandem.orchestrator.servers import ServerList
from tandem.orchestrator.weight_sync import Policy
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.errors import UserError
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

BASE = Path("models/base")


class Machine:
    """A client with the server behind it. `down`: it answers nothing. `slow`: requests wait until it is set."""

    def __init__(self, url: str) -> None:
        self.base_url = url
        self.on_trouble: Callable[[], None] = lambda: None
        self.instance: str | None = None
        self.versions: list[int] = []  # that were loaded, in all its lives
        self.asked: list[list[int]] = []
        self.answered = 0
        self.down = False
        self.slow = asyncio.Event()
        self.slow.set()
        self.gives_up = False
        self.is_busy = False
        self.is_held = True
        self.is_closed = False
        self.checked: list[Path] = []
        self.refuses: set[int] = set()

    async def wait_until_ready(self) -> None:
        while self.down:
            if self.gives_up:
                raise TimeoutError(f"no server at {self.base_url}")
            await asyncio.sleep(0.001)

    async def check_access(self, folder: Path) -> None:
        self.checked.append(folder)

    async def release(self) -> None:
        assert not self.is_busy
        self.is_held = False

    async def close(self) -> None:
        self.is_closed = True

    async def is_well(self) -> bool:
        return not self.down

    async def read_load(self) -> EngineLoad | None:
        return None

    async def meet(self) -> None:
        await self._answer()

    def adopt(self) -> None:
        self.instance = "only"

    async def update_weights(self, path: Path, version: int) -> None:
        await self._answer()
        if version in self.refuses:
            raise InferenceError(f"version {version} does not match its checksum")
        self.versions.append(version)

    async def load_adapter(self, path: Path, version: int) -> None:
        raise AssertionError("whole models only")

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        self.asked.append(prompt_ids)
        await self.slow.wait()
        await self._answer()
        self.answered += 1
        return [Completion(prompt_ids, [0.0], [self.versions[-1]], "stop")] * sampling.n

    async def _answer(self) -> None:
        """As the client does it: while the server is not well, it is looked for."""
        await asyncio.sleep(0)
        while self.down:
            self.on_trouble()
            if self.gives_up:
                raise ServerGone(f"waited for {self.base_url}")
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "LOOK_S", 0.005)
    monkeypatch.setattr(servers_module, "POLL_S", 0.005)
    monkeypatch.setattr(servers_module, "GRACE_S", 0.05)


def run_with(root: Path, count: int, body: Callable[[Policy, list[Machine]], Awaitable[None]]) -> None:
    async def run() -> None:
        machines = [Machine(f"http://host{number}:8000") for number in range(count)]
        policy = Policy(machines, BASE, 0, RunLog(RunDir(root), "orchestrator"))
        await policy.load(BASE, 0)
        watching = asyncio.ensure_future(policy.watch())
        try:
            await asyncio.wait_for(body(policy, machines), 30)
        finally:
            watching.cancel()

    asyncio.run(run())


async def ask(policy: Policy, token: int = 1, n: int = 1) -> list[Completion]:
    return await policy.generate([token], SamplingRequest(n, 1, temperature=1.0, seed=0))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def events(root: Path) -> list[str]:
    return [event["event"] for event in read_json_lines(root / "events.jsonl")]


def test_requests_go_where_the_fewest_completions_are_under_way(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        for machine in machines:
            machine.slow.clear()
        waiting = [asyncio.ensure_future(ask(policy, token, n)) for token, n in enumerate([8, 2, 2, 2, 2, 4])]
        await asyncio.sleep(0.01)
        assert [machine.asked for machine in machines] == [[[0], [5]], [[1], [2], [3], [4]]]
        for machine in machines:
            machine.slow.set()
        assert [len(completions) for completions in await asyncio.gather(*waiting)] == [8, 2, 2, 2, 2, 4]

    run_with(tmp_path, 2, body)


def test_the_conversations_of_a_group_stay_at_one_server_while_it_is_there(tmp_path: Path) -> None:
    async def chat(policy: Policy, session: int) -> None:
        await policy.generate([session], SamplingRequest(1, 1, temperature=1.0, seed=0, session=session))

    async def body(policy: Policy, machines: list[Machine]) -> None:
        for machine in machines:
            machine.slow.clear()
        waiting = [asyncio.ensure_future(chat(policy, session)) for session in (5, 6, 5, 5, 6)]
        await asyncio.sleep(0.01)
        assert [machine.asked for machine in machines] == [[[5]] * 3, [[6]] * 2]
        machines[0].down = True
        for machine in machines:
            machine.slow.set()
        await asyncio.gather(*waiting)
        assert machines[1].answered == 5

    run_with(tmp_path, 2, body)


def test_the_latest_conversations_are_those_whose_server_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.utils.server_pool.MAX_SESSIONS", 2)  # 6 and 7

    async def body(policy: Policy, machines: list[Machine]) -> None:
        def chat(session: int) -> asyncio.Future[list[Completion]]:
            request = SamplingRequest(1, 1, temperature=1.0, seed=0, session=session)
            return asyncio.ensure_future(policy.generate([session], request))

        for machine in machines:
            machine.slow.clear()
        waiting = [chat(session) for session in (5, 6, 6, 6, 7, 6, 7, 7, 7)]
        await asyncio.sleep(0.01)
        assert [machine.asked for machine in machines] == [[[5], [7], [7], [7], [7]], [[6]] * 4]
        waiting.append(chat(5))  # forgotten: it goes where there is less to do
        await asyncio.sleep(0.01)
        assert machines[1].asked == [[6], [6], [6], [6], [5]]
        for machine in machines:
            machine.slow.set()
        await asyncio.gather(*waiting)

    run_with(tmp_path, 2, body)


def test_the_limit_is_that_of_the_servers_that_are_there(tmp_path: Path) -> None:
    async def run() -> None:
        machines = [Machine(f"http://host{number}:8000") for number in range(3)]
        policy = Policy(machines, BASE, 0, RunLog(RunDir(tmp_path), "orchestrator"), 4)
        assert policy.limit == 12
        for limit, machine in ((8, machines[1]), (4, machines[2]), (4, machines[0])):  # the last one is waited for
            machine.on_trouble()
            assert (policy.limit, policy.num_present) == (limit, limit // 4)
        policy.replicas[0].gate.limit = None
        assert policy.limit is None
        for server in list(machines):
            policy.remove(server)
        await until_alone()  # nobody looks after a server that was removed

    asyncio.run(run())


def test_every_server_gets_every_version_before_it_counts(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        await policy.load(tmp_path, 1)
        assert [machine.versions for machine in machines] == [[0, 1]] * 3
        assert policy.version == 1

    run_with(tmp_path, 3, body)


def test_the_work_of_a_server_that_goes_away_is_done_by_others_and_it_returns_with_the_newest_version(
    tmp_path: Path,
) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        first, second = machines
        first.slow.clear()
        second.slow.clear()
        waiting = [asyncio.ensure_future(ask(policy, token)) for token in range(10)]
        await asyncio.sleep(0.01)
        first.down = True
        first.slow.set()
        second.slow.set()
        answers = await asyncio.gather(*waiting)
        assert [completion.token_ids for [completion] in answers] == [[token] for token in range(10)]
        assert (first.answered, second.answered, policy.pool.num_moved) == (0, 10, 5)
        await policy.load(tmp_path, 1)  # does not wait for the one that is away
        assert (first.versions, second.versions, policy.num_present) == ([0], [0, 1], 1)
        first.down = False
        await until(lambda: policy.num_present == 2)
        assert first.versions == [0, 1]
        await asyncio.gather(*(ask(policy, token) for token in range(4)))
        assert first.answered == 2

    run_with(tmp_path, 2, body)
    assert events(tmp_path) == ["server_away", "server_joined"]


def test_a_server_that_only_stops_answering_is_noticed_by_looking(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        machines[0].slow.clear()
        waiting = asyncio.ensure_future(ask(policy))
        await until(lambda: bool(machines[0].asked))
        machines[0].down = True  # the request hangs, without an error
        await waiting
        assert machines[1].answered == 1
        machines[0].down = False
        await until(lambda: policy.num_present == 2)
        assert machines[0].versions == [0, 0], "it may have been started again: it is given its weights in any case"

    run_with(tmp_path, 2, body)


def test_servers_are_not_looked_after_before_they_have_weights(tmp_path: Path) -> None:
    """Until then they are waited for, all of them."""

    async def run() -> None:
        machines = [Machine(f"http://host{number}:8000") for number in range(2)]
        policy = Policy(machines, BASE, 0, RunLog(RunDir(tmp_path), "orchestrator"))
        machines[0].down = True
        await asyncio.sleep(0.05)
        assert policy.num_present == 2
        machines[0].down = False
        await policy.load(BASE, 0)
        machines[0].down = True
        await until(lambda: policy.num_present == 1)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_the_only_server_takes_part_all_the_time(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        machines[0].down = True
        await asyncio.sleep(0.05)
        machines[0].down = False
        await ask(policy)
        await asyncio.sleep(0.02)
        policy.run_log.event("end")

    run_with(tmp_path, 1, body)
    assert events(tmp_path) == ["end"]


def test_the_last_server_is_waited_for_and_the_first_to_return_takes_over(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        for machine in machines:
            machine.down = True
        waiting = [asyncio.ensure_future(ask(policy, token)) for token in range(4)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting) and policy.num_present == 1
        absent = next(one for one in policy.replicas if not one.is_present).server
        absent.down = False  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.gather(*waiting)

    run_with(tmp_path, 2, body)


def test_the_run_ends_when_no_server_is_left_that_could_return(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        for machine in machines:
            machine.down = machine.gives_up = True
        waiting = [asyncio.ensure_future(ask(policy)) for _ in range(2)]
        with pytest.raises(ServerLost, match="waited for http://host"):
            await policy.watch()
        for task in waiting:
            task.cancel()

    run_with(tmp_path, 2, body)


def test_a_server_that_goes_away_while_it_loads_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        machines[1].down = True
        await policy.load(tmp_path, 1)
        assert machines[0].versions == [0, 1] and policy.version == 1
        machines[1].down = False
        await until(lambda: policy.num_present == 2)
        assert machines[1].versions == [0, 1]

    run_with(tmp_path, 2, body)


def test_weights_that_one_server_refuses_are_an_error(tmp_path: Path) -> None:
    async def body(policy: Policy, machines: list[Machine]) -> None:
        machines[1].refuses = {1}
        with pytest.raises(InferenceError, match="checksum"):
            await policy.load(tmp_path, 1)
        assert policy.version == 0 and not policy.next_update.done()

    run_with(tmp_path, 2, body)


def test_a_version_that_was_refused_is_given_to_no_server_afterwards(tmp_path: Path) -> None:
    """Neither to one that was started again, nor to one that was away, nor to one that joins."""

    async def body(policy: Policy, machines: list[Machine]) -> None:
        refusing, away = machines
        away.down = True
        refusing.refuses = {1}
        await until(lambda: policy.num_present == 1)
        with pytest.raises(InferenceError, match="checksum"):
            await policy.load(tmp_path, 1)
        joining = Machine("http://host2:8000")
        policy.add(joining, is_present=False)
        away.down = False
        await until(lambda: policy.num_present == 3)
        assert (away.versions, joining.versions) == ([0, 0], [0])
        refusing.instance = None
        assert (await ask(policy))[0].versions == [0]
        assert refusing.asked and refusing.versions == [0, 0]

    run_with(tmp_path, 2, body)


class Listed:
    """A file of servers, the machines it has named so far by address, and the policy that follows it."""

    def __init__(self, root: Path, text: str, version: int = 0) -> None:
        self.path = root / "servers.txt"
        self.path.write_text(text)
        self.made: dict[str, Machine] = {}
        self.servers = ServerList(read_servers(self.path), self._connect)
        self.policy = Policy(list(self.servers), BASE, version, RunLog(RunDir(root), "orchestrator"))

    def _connect(self, url: str) -> Machine:
        self.made[url] = Machine(url)
        return self.made[url]


def run_listed(root: Path, text: str, body: Callable[[Listed], Awaitable[None]], version: int = 0) -> None:
    async def run() -> None:
        listed = Listed(root, text, version)
        following = asyncio.ensure_future(listed.servers.follow_file(listed.path, listed.policy))
        await body(listed)
        following.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_servers_are_added_and_removed_by_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(listed: Listed) -> None:
        policy, made = listed.policy, listed.made
        await policy.load(BASE, 0)
        listed.path.write_text("http://b:1\nhttp://c:1\n")
        await until(lambda: policy.num_present == 2 and "http://c:1" in made)
        await asyncio.gather(*(ask(policy, token) for token in range(4)))
        assert Counter({url: machine.answered for url, machine in made.items()}) == {
            "http://a:1": 0,
            "http://b:1": 2,
            "http://c:1": 2,
        }
        assert made["http://c:1"].versions == [0]
        listed.path.write_text("not an address\n")
        await until(lambda: "the servers stay as they are" in caplog.text)
        await asyncio.sleep(0.02)
        assert caplog.text.count("the servers stay as they are") == 1, "told once"
        assert list(listed.servers.by_url) == ["http://b:1", "http://c:1"]

    run_listed(tmp_path, "http://a:1/v1  # the first\n\nhttp://b:1\n", body)
    assert events(tmp_path) == ["server_added", "server_removed", "server_joined"]


def test_a_server_that_is_removed_is_given_back_when_it_has_answered(tmp_path: Path) -> None:
    async def body(listed: Listed) -> None:
        await listed.policy.load(BASE, 0)
        removed = listed.made["http://a:1"]
        removed.is_busy = True
        listed.path.write_text("http://b:1\n")
        await until(lambda: "http://a:1" not in listed.servers.by_url)
        await asyncio.sleep(0.02)
        assert removed.is_held
        removed.is_busy = False
        await until(lambda: not removed.is_held)
        assert listed.made["http://b:1"].is_held
        await listed.servers.release()
        assert not listed.made["http://b:1"].is_held
        await listed.servers.close()
        assert all(machine.is_closed for machine in listed.made.values())

    run_listed(tmp_path, "http://a:1\nhttp://b:1\n", body)


def test_a_server_that_has_not_answered_when_the_run_ends_is_not_waited_for(tmp_path: Path) -> None:
    async def body(listed: Listed) -> None:
        removed = listed.made["http://a:1"]
        removed.is_busy = True
        listed.path.write_text("http://b:1\n")
        await until(lambda: "http://a:1" not in listed.servers.by_url)
        await listed.servers.close()
        removed.is_busy = False
        await asyncio.sleep(0.02)
        assert removed.is_held and removed.is_closed

    run_listed(tmp_path, "http://a:1\nhttp://b:1\n", body)


@pytest.mark.parametrize("grace_s", [0.0, 60.0])  # it begins with the first that is ready
def test_a_server_that_moves_before_the_run_begins_is_found_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    monkeypatch.setattr(servers_module, "GRACE_S", grace_s)

    async def body(listed: Listed) -> None:
        listed.made["http://a:1"].down = True
        waiting = asyncio.ensure_future(listed.servers.wait_until_ready(tmp_path))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        listed.path.write_text("http://b:1\n")
        assert await asyncio.wait_for(waiting, 20) == [listed.made["http://b:1"]], "it is the only one by now"
        assert listed.made["http://b:1"].checked == [tmp_path]
        listed.made["http://a:1"].down = False
        await asyncio.sleep(0.01)
        assert listed.made["http://a:1"].checked == [], "what is no server of the run is not claimed by it"

    run_listed(tmp_path, "http://a:1\n", body)


def test_a_server_that_moves_during_the_first_load_serves_the_version_of_the_run(tmp_path: Path) -> None:
    """A resumed run: what came in its place must not serve the model that the run began with."""
    weights = tmp_path / "step_000006"

    async def body(listed: Listed) -> None:
        policy, made = listed.policy, listed.made
        made["http://a:1"].down = True
        loading = asyncio.ensure_future(policy.load(weights, 6))
        await asyncio.sleep(0.02)
        assert not loading.done()
        listed.path.write_text("http://b:1\n")
        await loading
        (completion,) = await ask(policy)
        assert completion.versions == [6] and made["http://b:1"].versions == [6] and made["http://a:1"].versions == []
        assert [replica.wanted for replica in policy.replicas] == [(weights, 6)]

    run_listed(tmp_path, "http://a:1\n", body, version=6)


def test_the_run_starts_with_the_servers_that_are_ready(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        servers = ServerList(["http://a:1", "http://b:1", "http://c:1"], Machine)
        first, second, third = (servers.by_url[url] for url in servers.by_url)
        assert isinstance(second, Machine) and isinstance(third, Machine)
        second.down = third.down = third.gives_up = True
        assert await servers.wait_until_ready(tmp_path) == [first]
        assert "the run starts without http://b:1, http://c:1;" in caplog.text
        second.down = False
        await asyncio.sleep(0.01)
        assert second.checked == [], "it takes part in another way"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_servers_that_are_ready_soon_after_the_first_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(servers_module, "GRACE_S", 60.0)

    async def run() -> None:
        servers = ServerList(["http://a:1", "http://b:1"], Machine)
        first, second = servers
        assert isinstance(second, Machine)
        second.down = True
        waiting = asyncio.ensure_future(servers.wait_until_ready(tmp_path))
        await asyncio.sleep(0.02)
        second.down = False
        assert await waiting == [first, second] and str(servers) == "http://a:1, http://b:1"

    asyncio.run(asyncio.wait_for(run(), 30))
    assert not caplog.records


def test_without_any_server_the_start_ends_with_a_name(tmp_path: Path) -> None:
    async def run() -> None:
        servers = ServerList(["http://a:1", "http://b:1"], Machine)
        for server in servers:
            assert isinstance(server, Machine)
            server.down = server.gives_up = True
        with pytest.raises(TimeoutError, match="no server at http://a:1"):
            await servers.wait_until_ready(tmp_path)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_server_that_refuses_the_run_ends_it_while_others_are_waited_for(tmp_path: Path) -> None:
    class Refusing(Machine):
        async def check_access(self, folder: Path) -> None:
            assert folder == tmp_path
            raise UserError(f"{self.base_url} refuses this run")

    async def run() -> None:
        servers = ServerList(["http://a:1", "http://b:1"], Refusing)
        waiting = servers.by_url["http://a:1"]
        assert isinstance(waiting, Machine)
        waiting.down = True
        with pytest.raises(UserError, match="http://b:1 refuses"):
            await servers.wait_until_ready(tmp_path)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_addresses_in_every_form() -> None:
    urls = ["http://a:1", "http://b:2"]
    assert ClientConfig(base_url="http://a:1/v1, http://b:2/").base_urls == urls
    assert ClientConfig.model_validate({"base_url": ["http://a:1", "http://b:2/v1"]}).base_urls == urls
    with pytest.raises(ValueError, match="names a server twice"):
        ClientConfig(base_url="http://a:1,http://a:1/v1")
    with pytest.raises(ValueError, match="'b:2' is not the address"):
        ClientConfig(base_url="http://a:1,b:2")


@pytest.mark.parametrize(("text", "message"), [("# none yet\n", "names no server"), ("host:8000", "not the address")])
def test_a_file_that_names_no_server_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "servers.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        _ = ClientConfig(servers_file=path).base_urls
    with pytest.raises(UserError, match="cannot be used"):
        _ = ClientConfig(servers_file=tmp_path / "missing").base_urls
