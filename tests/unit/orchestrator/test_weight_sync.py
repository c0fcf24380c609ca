"""The policy follows the newest published weights, and gives them again to a server that was started again."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.tasks import until_alone

from tandem.data.batch_files import RolloutWriter
from tandem.orchestrator import weight_sync
from tandem.orchestrator.client import InferenceError, InstanceChanged, ServerGone, ServerLost
from tandem.orchestrator.concurrency import Concurrency, EngineLoad
from tandem.orchestrator.file_trainer import FileTrainer
from tandem.orchestrator.weight_sync import Policy, follow_versions
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import write_manifest
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir, step_name

BASE = Path("models/base")


class FakeClient:
    """A client and the server behind it, which `restart` starts again."""

    def __init__(self, base_url: str = "http://127.0.0.1:1") -> None:
        self.base_url = base_url
        self.on_trouble: Callable[[], None] = lambda: None
        self.loaded: list[tuple[str, int]] = []
        self.instance: str | None = None
        self.num_starts = 1
        self.num_generated = 0
        self.before_answer: Callable[[], None] = lambda: None  # while a completion is made
        self._met = ""

    def restart(self) -> None:
        self.num_starts += 1
        self.loaded.clear()

    async def is_well(self) -> bool:
        return True

    async def read_load(self) -> EngineLoad | None:
        return None

    async def meet(self) -> None:
        await asyncio.sleep(0)
        self._met = str(self.num_starts)

    def adopt(self) -> None:
        self.instance = self._met

    async def update_weights(self, path: Path, version: int) -> None:
        await self._answer(self._met)
        self.loaded.append((path.name, version))

    async def load_adapter(self, path: Path, version: int) -> None:
        await self._answer(self._met)
        self.loaded.append((f"adapter {path.name}", version))

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        meant = self.instance
        assert meant is not None, "a server that has not been adopted is asked for nothing"
        await asyncio.sleep(0)
        self.before_answer()
        await self._answer(meant)
        self.num_generated += 1
        return [Completion(prompt_ids, [0.0] * len(prompt_ids), [self.loaded[-1][1]] * len(prompt_ids), "stop")]

    async def _answer(self, meant: str) -> None:
        await asyncio.sleep(0)
        if meant != str(self.num_starts):
            if self.instance == meant:
                self.instance = None
            raise InstanceChanged


def make_policy(client: FakeClient, folder: Path, version: int = 0, concurrency: Concurrency = None) -> Policy:
    return Policy([client], BASE, version, RunLog(RunDir(folder), "orchestrator"), concurrency)


def trainer(folder: Path) -> FileTrainer:
    """The one that publishes to `folder`."""
    return FileTrainer(BASE, folder, RolloutWriter(folder, keep=1))


async def generate(policy: Policy, token: int = 1) -> Completion:
    (completion,) = await policy.generate([token], SamplingRequest(1, 1, temperature=1.0, seed=0))
    return completion


def publish(folder: Path, version: int, *, adapter: bool = False) -> None:
    path = folder / step_name(version)
    path.mkdir(parents=True)
    if adapter:
        (path / "adapter_config.json").write_text("{}")
    write_manifest(path, version)


def test_follow_takes_the_newest_and_ends_with_the_last(tmp_path: Path) -> None:
    updates: list[tuple[int, int]] = []
    client = FakeClient()

    async def on_update(old: int, new: int) -> None:
        updates.append((old, new))
        if new == 3:
            (tmp_path / step_name(9)).mkdir()  # unfinished: no manifest
            publish(tmp_path, 4)
            publish(tmp_path, 5)

    async def run() -> None:
        policy = make_policy(client, tmp_path, 0)
        following = asyncio.ensure_future(follow_versions(trainer(tmp_path), policy, 5, on_update))
        await asyncio.sleep(0.02)
        assert policy.version == 0
        for version in (1, 2, 3):
            publish(tmp_path, version)
        await asyncio.wait_for(following, 60)
        assert policy.version == 5

    asyncio.run(run())
    assert updates == [(0, 3), (3, 5)]
    assert client.loaded == [("step_000003", 3), ("step_000005", 5)]


def test_a_version_is_not_loaded_twice(tmp_path: Path) -> None:
    """What is served already is the newest for a while, and the folder changes for other reasons too."""
    client = FakeClient()

    async def nothing(old: int, new: int) -> None:
        pass

    async def run() -> None:
        publish(tmp_path, 2)
        policy = make_policy(client, tmp_path, 2)
        following = asyncio.ensure_future(follow_versions(trainer(tmp_path), policy, 3, nothing))
        for number in range(3):
            (tmp_path / f"other-{number}").mkdir()
            await asyncio.sleep(0.02)
        assert client.loaded == []
        publish(tmp_path, 3)
        await asyncio.wait_for(following, 60)

    asyncio.run(run())
    assert client.loaded == [("step_000003", 3)]


def test_a_version_is_seen_even_if_the_folder_keeps_its_mtime(tmp_path: Path) -> None:
    """File systems with coarse timestamps: two changes within one tick leave the same mtime."""
    client = FakeClient()

    async def run() -> None:
        publish(tmp_path, 1)
        policy = make_policy(client, tmp_path, 1)
        following = asyncio.ensure_future(follow_versions(trainer(tmp_path), policy, 2, ignore))
        await asyncio.sleep(0.02)
        seen = tmp_path.stat().st_mtime_ns
        publish(tmp_path, 2)
        os.utime(tmp_path, ns=(seen, seen))
        await asyncio.wait_for(following, 10)

    asyncio.run(run())
    assert client.loaded == [("step_000002", 2)]


def test_whoever_waits_for_the_next_update_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        policy = make_policy(FakeClient(), tmp_path, 0)
        first = policy.next_update
        await policy.load(tmp_path, 1)
        assert first.result() == 1
        assert not policy.next_update.done()
        await policy.load(tmp_path, 2)
        assert first.result() == 1 and policy.version == 2

    asyncio.run(run())


class RefusingClient(FakeClient):
    """Refuses version 1; `meanwhile` happens while it looks at it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    async def update_weights(self, path: Path, version: int) -> None:
        if version == 1:
            self.meanwhile()
            raise InferenceError("step_000001 does not match its checksum")
        await super().update_weights(path, version)


async def ignore(old: int, new: int) -> None:
    pass


def test_refused_weights_end_the_run_with_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        policy = make_policy(RefusingClient(lambda: None), tmp_path, 0)
        publish(tmp_path, 1)
        await follow_versions(trainer(tmp_path), policy, 2, ignore)

    with pytest.raises(InferenceError, match="checksum"):
        asyncio.run(run())


def test_a_refused_version_that_was_replaced_meanwhile_is_passed_over(tmp_path: Path) -> None:
    client = RefusingClient(lambda: publish(tmp_path, 2))
    updates: list[tuple[int, int]] = []

    async def note(old: int, new: int) -> None:
        updates.append((old, new))

    async def run() -> None:
        publish(tmp_path, 1)
        await follow_versions(trainer(tmp_path), make_policy(client, tmp_path, 0), 2, note)

    asyncio.run(run())
    assert client.loaded == [("step_000002", 2)] and updates == [(0, 2)]


def test_servers_that_are_away_or_join_are_not_given_refused_weights(tmp_path: Path) -> None:
    class AwayClient(FakeClient):
        async def is_well(self) -> bool:
            return False

    joining = FakeClient()

    async def run() -> None:
        policy = make_policy(RefusingClient(lambda: None), tmp_path)
        policy.add(AwayClient(), is_present=False)
        await policy.load(BASE, 0)
        with pytest.raises(InferenceError, match="checksum"):
            await policy.load(tmp_path / step_name(1), 1)
        assert policy.replicas[1].wanted == (BASE, 0)
        policy.add(joining, is_present=False)
        async with asyncio.timeout(60):
            while not policy.replicas[2].is_present:
                await asyncio.sleep(0)

    asyncio.run(run())
    assert joining.loaded == [("base", 0)]


def test_adapters_are_served_over_the_model_they_belong_to(tmp_path: Path) -> None:
    client = FakeClient()

    async def on_update(old: int, new: int) -> None:
        if new < 2:
            publish(tmp_path, new + 1, adapter=True)

    async def run() -> None:
        policy = make_policy(client, tmp_path, 0)
        await policy.load(BASE, 0)
        publish(tmp_path, 1, adapter=True)
        await follow_versions(trainer(tmp_path), policy, 2, on_update)
        assert policy.version == 2

    asyncio.run(run())
    assert client.loaded == [("base", 0), ("adapter step_000001", 1), ("adapter step_000002", 2)]


def test_a_run_resumed_at_an_adapter_first_puts_its_model_below(tmp_path: Path) -> None:
    """The server may have been kept alive by a run of other weights."""
    client = FakeClient()
    publish(tmp_path, 3, adapter=True)

    async def run() -> None:
        policy = make_policy(client, tmp_path, 3)
        await policy.load(tmp_path / step_name(3), 3)

    asyncio.run(run())
    assert client.loaded == [("base", 0), ("adapter step_000003", 3)]


def test_an_adapter_is_put_over_the_base_when_a_whole_model_was_served_before(tmp_path: Path) -> None:
    """Over the weights of version 1 it would be another policy than the one that is trained."""
    client = FakeClient()
    publish(tmp_path, 1)
    publish(tmp_path, 2, adapter=True)

    async def run() -> None:
        policy = make_policy(client, tmp_path)
        for version in (1, 2):
            await policy.load(tmp_path / step_name(version), version)

    asyncio.run(run())
    assert client.loaded == [("step_000001", 1), ("base", 0), ("adapter step_000002", 2)]


@pytest.mark.parametrize("adapter", [False, True])
def test_a_server_that_was_started_again_is_given_its_version_before_anything_else(
    tmp_path: Path, adapter: bool
) -> None:
    client = FakeClient()
    publish(tmp_path, 3, adapter=adapter)

    async def run() -> None:
        policy = make_policy(client, tmp_path, 3)
        await policy.load(tmp_path / step_name(3), 3)
        client.restart()
        completions = await asyncio.gather(*(generate(policy, token) for token in range(20)))
        assert [completion.token_ids for completion in completions] == [[token] for token in range(20)]
        assert {version for completion in completions for version in completion.versions} == {3}

    asyncio.run(run())
    assert client.loaded == ([("base", 0), ("adapter step_000003", 3)] if adapter else [("step_000003", 3)])
    assert client.num_generated == 20
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["event"], event["version"], event["instance"]) == ("server_restored", 3, "2")


def test_a_server_that_dies_again_and_again_is_served_again_and_again(tmp_path: Path) -> None:
    client = FakeClient()

    def die_four_times() -> None:
        if client.num_starts < 5:
            client.restart()

    async def run() -> None:
        policy = make_policy(client, tmp_path)
        await policy.load(BASE, 0)
        client.before_answer = die_four_times
        assert (await generate(policy)).versions == [0]

    asyncio.run(run())
    assert client.instance == "5" and client.loaded == [("base", 0)]


async def meet_new_server(client: FakeClient, folder: Path) -> Policy:
    """A server that got adapter 1 and has been started again since; adapter 2 is there to be loaded."""
    for version in (1, 2):
        publish(folder, version, adapter=True)
    policy = make_policy(client, folder)
    await policy.load(folder / step_name(1), 1)
    client.restart()
    return policy


def test_an_update_that_meets_a_new_server_begins_from_the_base(tmp_path: Path) -> None:
    client = FakeClient()

    async def run() -> None:
        policy = await meet_new_server(client, tmp_path)
        await policy.load(tmp_path / step_name(2), 2)
        assert (await generate(policy)).versions == [2]

    asyncio.run(run())
    assert client.loaded == [("base", 0), ("adapter step_000002", 2)]


def test_restoring_and_following_do_not_mix(tmp_path: Path) -> None:
    """While completions wait for the server, the next version comes: each is loaded whole, one after the other."""
    client = FakeClient()

    async def run() -> None:
        policy = await meet_new_server(client, tmp_path)
        await asyncio.gather(generate(policy), policy.load(tmp_path / step_name(2), 2), generate(policy))

    asyncio.run(run())
    assert client.loaded in (
        [("base", 0), ("adapter step_000001", 1), ("adapter step_000002", 2)],
        [("base", 0), ("adapter step_000002", 2)],
    )


class LosingClient(FakeClient):
    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        await asyncio.sleep(0)
        raise ServerLost("run 'theirs' has taken it")


def test_whoever_loses_the_server_tells_the_run(tmp_path: Path) -> None:
    async def run() -> None:
        policy = make_policy(LosingClient(), tmp_path)
        await policy.load(BASE, 0)
        watching = asyncio.ensure_future(policy.watch())
        generating = [asyncio.ensure_future(generate(policy)) for _ in range(3)]
        with pytest.raises(ServerLost, match="run 'theirs' has taken it"):
            await asyncio.wait_for(watching, 60)
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in generating)  # no group is blamed for it
        for task in generating:
            task.cancel()
        await until_alone()  # nobody looks after the servers any more

    asyncio.run(run())


def test_a_request_that_outlived_its_server_goes_to_another(tmp_path: Path) -> None:
    class LateClient(FakeClient):
        """Has given up waiting for its server, once, although nobody was told of trouble."""

        is_gone = True

        async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
            if self.is_gone:
                self.is_gone = False
                raise ServerGone("waited long")
            return await super().generate(prompt_ids, sampling)

    async def run() -> None:
        policy = make_policy(LateClient(), tmp_path)
        policy.add(FakeClient())
        await policy.load(BASE, 0)
        completion = await asyncio.wait_for(generate(policy), 20)
        assert completion.token_ids == [1] and policy.pool.num_moved == 1

    asyncio.run(run())


class JoiningClient(FakeClient):
    """What joins a run: is well, and fails with the given errors, one after the other, when it is to load weights."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.num_asked = 0

    async def update_weights(self, path: Path, version: int) -> None:
        self.num_asked += 1
        if self.errors:
            raise self.errors.pop(0)
        await super().update_weights(path, version)


async def join(folder: Path, client: FakeClient) -> Policy:
    policy = make_policy(FakeClient(), folder)
    await policy.load(BASE, 0)
    policy.add(client, is_present=False)
    return policy


def test_a_server_that_goes_away_while_it_joins_is_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        policy = await join(tmp_path, JoiningClient(ServerGone("waited long"), ServerGone("waited long")))
        async with asyncio.timeout(20):
            while policy.num_present < 2:
                await asyncio.sleep(0)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [event["event"] for event in read_json_lines(tmp_path / "events.jsonl")] == ["server_joined"]


def test_a_server_that_belongs_to_another_run_ends_the_one_it_was_to_join(tmp_path: Path) -> None:
    async def run() -> None:
        policy = await join(tmp_path, JoiningClient(ServerLost("run 'theirs' has taken it")))
        with pytest.raises(ServerLost, match="run 'theirs' has taken it"):
            await asyncio.wait_for(policy.watch(), 20)

    asyncio.run(run())


@pytest.mark.parametrize(("try_again_s", "num_asked"), [(60.0, 1), (0.0, 2)])
def test_a_server_that_refuses_to_take_part_is_asked_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, try_again_s: float, num_asked: int
) -> None:
    monkeypatch.setattr(weight_sync, "TRY_AGAIN_S", try_again_s)
    client = JoiningClient(InferenceError("no room for the weights"))

    async def run() -> None:
        policy = await join(tmp_path, client)
        async with asyncio.timeout(20):
            while client.num_asked < num_asked or policy.num_present < num_asked:
                await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert (client.num_asked, policy.num_present) == (num_asked, num_asked)

    asyncio.run(run())
    events = tmp_path / "events.jsonl"
    assert [event["event"] for event in read_json_lines(events)] == (["server_joined"] if num_asked == 2 else [])


def test_a_new_server_that_refuses_the_weights_is_no_matter_of_one_group(tmp_path: Path) -> None:
    client = RefusingClient(lambda: None)

    async def run() -> None:
        policy = make_policy(client, tmp_path)
        await policy.load(BASE, 0)
        policy.replicas[0].wanted = (BASE, 1)
        client.restart()
        generating = asyncio.ensure_future(generate(policy))
        with pytest.raises(ServerLost, match=r"restarted server cannot serve this run: .*checksum"):
            await asyncio.wait_for(policy.watch(), 5)
        generating.cancel()

    asyncio.run(run())


def test_no_more_is_under_way_at_a_server_than_its_limit(tmp_path: Path) -> None:
    class Counting(FakeClient):
        num_open = most_open = 0

        async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            try:
                return await super().generate(prompt_ids, sampling)
            finally:
                self.num_open -= 1

    async def run(concurrency: Concurrency) -> tuple[int, int | None]:
        client = Counting()
        policy = make_policy(client, tmp_path, concurrency=concurrency)
        await policy.load(BASE, 0)
        await asyncio.gather(*(generate(policy) for _ in range(20)))
        return client.most_open, policy.limit

    assert asyncio.run(run(3)) == (3, 3)
    assert asyncio.run(run(None)) == (20, None)


def test_a_limit_that_is_left_to_the_run_follows_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(FakeClient):
        async def read_load(self) -> EngineLoad:
            return EngineLoad(num_running=10, num_waiting=1000, cache_use=1.0)

    monkeypatch.setattr("tandem.orchestrator.concurrency.LOOK_S", 0.001)

    async def run() -> None:
        policy = make_policy(Loaded(), tmp_path, concurrency="auto")
        async with asyncio.timeout(20):
            while policy.limit != 10:
                await asyncio.sleep(0.001)

    asyncio.run(run())
