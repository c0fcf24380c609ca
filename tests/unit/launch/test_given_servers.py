"""Servers that others have started: which are there, and whether they take this run."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.unit.utils.serving.test_protocol import Running, running

from tandem.commands.rl import RLConfig
from tandem.config.client import ClientConfig
from tandem.launch import given_servers
from tandem.launch.given_servers import check_given_servers, release_given_servers
from tandem.orchestrator.claim import RunClaim
from tandem.orchestrator.client import InferenceClient
from tandem.serving import lease
from tandem.utils.errors import UserError
from tandem.utils.run_dir import RunDir

Configure = Callable[..., RLConfig]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path, weight_roots=(tmp_path,)) as server:
        yield server


@pytest.fixture(params=["base_url", "servers_file"])
def configure(request: pytest.FixtureRequest, make_config: Configure, tmp_path: Path) -> Configure:
    """A run that is given these servers, by either option."""

    def make(*urls: str, name: str = "run") -> RLConfig:
        (tmp_path / "servers.txt").write_text("".join(f"{url}\n" for url in urls))
        given = {"base_url": list(urls)} if request.param == "base_url" else {"servers_file": tmp_path / "servers.txt"}
        return make_config(inference=None, output_dir=tmp_path / name, orchestrator={"client": given})

    return make


def told(config: RLConfig, url: str) -> str:
    """How an error names the option and the server."""
    return f"orchestrator.client.{config.orchestrator.client.told(url)}: "


def nowhere() -> str:
    return f"http://127.0.0.1:{free_port()}"


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of something that says `answer` to whoever asks, or nothing for the while."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        if answer:
            threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_the_run_starts_with_the_servers_that_are_there(
    configure: Configure, server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    away = nowhere()
    check_given_servers(configure(away, server.url))
    assert f"no inference server answers at {away} (" in capsys.readouterr().out


def test_where_none_is_there_the_option_and_all_of_them_are_named(configure: Configure) -> None:
    one, two = nowhere(), nowhere()
    config = configure(one, two)
    with pytest.raises(UserError) as refused:
        check_given_servers(config)
    assert str(refused.value).startswith(f"{told(config, one)}no inference server answers there (")
    assert f"; nor at {two}; start one with `inference @ …`, or" in str(refused.value)


def test_something_else_than_a_server_of_ours(configure: Configure) -> None:
    said = b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"status": "ok"}'
    with answering(said) as url:
        config = configure(nowhere(), url)
        with pytest.raises(UserError) as refused:
            check_given_servers(config)
    assert str(refused.value).startswith(f"{told(config, url)}that is not one of our inference servers")


def test_a_server_that_is_still_loading_is_waited_for_later(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(given_servers, "HEALTH_TIMEOUT_S", 0.1)
    with answering(b"") as url:
        check_given_servers(configure(nowhere(), url))
    assert f"the server at {url} does not answer yet" in capsys.readouterr().out


@contextmanager
def training(config: RLConfig, url: str) -> Iterator[str]:
    """A run that has loaded its weights into the server, and lives as long as the block: its name."""
    run_dir = RunDir(config.output_dir)
    run_dir.root.mkdir(exist_ok=True)
    run_dir.create()
    claim = RunClaim.of(run_dir.root, run_dir.server_lease)
    claim.keep(run_dir.server_lease)
    holding, is_over = threading.Event(), threading.Event()

    async def hold() -> None:
        client = InferenceClient(ClientConfig(base_url=url), claim, url)
        await client.meet()
        await client.update_weights(run_dir.root, 0)
        holding.set()
        await asyncio.to_thread(is_over.wait)
        await client.close()  # and does not give the server back, as one that is killed

    thread = threading.Thread(target=asyncio.run, args=[hold()])
    thread.start()
    assert holding.wait(60)
    try:
        yield claim.name
    finally:
        is_over.set()
        thread.join()


def test_a_server_that_another_run_trains_with_is_refused_while_that_run_is_alive(
    configure: Configure, server: Running
) -> None:
    first, second = configure(server.url, name="first"), configure(server.url, name="second")
    with training(first, server.url) as name:
        with pytest.raises(UserError) as refused:
            check_given_servers(second)
        message = str(refused.value)
        assert message.startswith(f"{told(second, server.url)}the server there refuses this run: ")
        assert f"run '{name}' ({first.output_dir} on {socket.gethostname()}) uses this server" in message
        assert not second.output_dir.exists()
        check_given_servers(first)  # the same run, which goes on after its process was killed
        release_given_servers(second)  # which holds nothing
        with pytest.raises(UserError):
            check_given_servers(second)
    release_given_servers(first)
    check_given_servers(second)


def test_a_run_that_was_killed_holds_its_server_for_a_while(
    configure: Configure, server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.5)
    monkeypatch.setattr(given_servers, "TELL_S", 0.1)
    with training(configure(server.url, name="first"), server.url):
        pass
    check_given_servers(configure(server.url, name="second"))
    assert f"waiting for {server.url}: a run that was killed" in capsys.readouterr().out
