"""One owner a run directory; a dead one's lock does not stay in the way."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.launch.provenance import write_run_config
from tandem.orchestrator.samples import write_samples
from tandem.python.workers import run_rank
from tandem.trainer.checkpoints.snapshot import make_room
from tandem.utils import run_holder, run_lock
from tandem.utils.errors import BrokenRunDirectory, UserError
from tandem.utils.files import staging_directory
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir, step_name
from tandem.utils.run_holder import Holder, read_holder
from tandem.utils.run_lock import ROLES, TOKEN, hold_run
from tandem.weights.versions import Announcement, announce

# Says what became of it, and holds on until it is told to end.
TAKE = """\
import sys
from pathlib import Path
from tandem.utils.errors import UserError
from tandem.utils.run_lock import hold_run
sys.stdin.readline()
try:
    with hold_run(Path(sys.argv[1]), "rl"):
        print("held", flush=True)
        sys.stdin.readline()
except UserError as error:
    print(error, flush=True)
"""


# What else may stand where a file belongs.
KINDS: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: (path / "below").mkdir(parents=True),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
}
# Whoever writes to a run directory while a run goes on.
WRITERS: dict[str, Callable[[RunDir], object]] = {
    "metrics": lambda run_dir: RunLog(run_dir, "trainer").metrics(1, {"loss": 0.5}),
    "samples": lambda run_dir: write_samples(run_dir.samples(1), [], None),
    "rollouts": lambda run_dir: staging_directory(run_dir.rollouts / step_name(1)),
    "checkpoint": lambda run_dir: make_room(run_dir.checkpoints / step_name(1) / ".trainer.tmp", 0),
    "announcement": lambda run_dir: announce(run_dir.weights, Announcement(1, None)),
    "folders": RunDir.create,
    "rank of a cluster": lambda run_dir: run_rank({"output_dir": str(run_dir.root)}, {}, rank=1),
    "configuration": lambda run_dir: write_run_config(run_dir.config, {"rl": {}}),
}


def start_taker(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKE, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def taker(tmp_path: Path):
    process = start_taker(tmp_path)
    tell(process)
    assert answer(process) == "held"
    yield process
    process.kill()
    process.communicate()


def elsewhere(root: Path, role: str = "trainer") -> Path:
    """The lock of a process on another machine."""
    path = root / f"{role}.lock"
    holder = replace(Holder.this_process("rl"), host="node-7", machine="another boot", pid=4711)
    path.write_bytes(holder.encode(1))
    return path


def test_the_holder_is_named_and_how_to_look_at_it(taker, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, hold_run(tmp_path, "sft"):
        pass
    message = str(caught.value)
    assert message.startswith(f"output_dir = '{tmp_path}' is in use by `rl` (pid {taker.pid} on ")
    assert time.strftime(", since %Y-") in message and f"ps -fp {taker.pid}" in message
    assert "\n" not in message


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    for _ in range(2):
        with hold_run(tmp_path / "run", "rl"):
            assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["orchestrator.lock", "trainer.lock"]
    assert not (tmp_path / "run").exists(), "nothing was written: not even the directory stays"
    assert TOKEN not in os.environ


def test_a_killed_holder_does_not_block(taker, tmp_path: Path) -> None:
    taker.kill()  # not waited for: a zombie holds nothing
    while run_lock.process_state(taker.pid) not in ("Z", None):
        time.sleep(0.01)
    with hold_run(tmp_path, "rl"):
        found = read_holder(tmp_path / "trainer.lock")
        assert found is not None and found.pid == os.getpid()


def test_a_stopped_holder_still_holds(taker, tmp_path: Path) -> None:
    taker.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match="is in use"), hold_run(tmp_path, "rl"):
        pass


def test_another_process_with_the_same_pid_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trainer.lock"
    path.write_bytes(replace(Holder.this_process("rl"), process_started=1).encode(1))
    with hold_run(tmp_path, "trainer", ["trainer"]):
        found = read_holder(path)
        assert found is not None and found.process_started != 1


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_at_once_exactly_one_wins(tmp_path: Path, stale: bool) -> None:
    if stale:
        for role in run_lock.ROLES:
            gone = replace(Holder.this_process("rl"), process_started=1)
            (tmp_path / f"{role}.lock").write_bytes(gone.encode(1))
    takers = [start_taker(tmp_path) for _ in range(6)]
    time.sleep(0.5)  # they read a line before they begin
    for process in takers:
        tell(process)
    answers = [answer(process) for process in takers]
    for process in takers:
        process.communicate("\n")
    assert answers.count("held") == 1, answers
    assert sum("is in use by `rl`" in text for text in answers) == 5


def test_a_lock_that_vanishes_while_it_is_looked_at_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = elsewhere(tmp_path)

    def released(looked_at: Path) -> None:
        looked_at.unlink()
        monkeypatch.undo()

    monkeypatch.setattr(run_lock, "lock_bytes", released)
    run_lock.take(path, Holder.this_process("rl")).release()
    assert caplog.text == ""


def test_a_lock_that_changes_hands_while_it_is_watched_names_the_new_one(tmp_path: Path, taker) -> None:
    path = tmp_path / "trainer.lock"
    content = path.read_bytes()
    path.write_bytes(b"")
    threading.Timer(0.3, path.write_bytes, [content]).start()
    with pytest.raises(UserError, match=rf"is in use by `rl` \(pid {taker.pid} "):
        run_lock.take(path, Holder.this_process("rl"))


def test_a_new_lock_is_not_removed_for_the_stale_one_before_it(tmp_path: Path) -> None:
    stale = read_holder(elsewhere(tmp_path))
    path = elsewhere(tmp_path)  # another holder by its token
    run_lock._remove_stale(path, stale)
    assert path.exists()
    run_lock._remove_stale(path, read_holder(path))
    assert list(tmp_path.iterdir()) == []


def test_one_at_a_time_removes_a_stale_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = elsewhere(tmp_path)
    claim = tmp_path / ".trainer.lock.stale"
    claim.touch()
    threading.Timer(0.3, claim.unlink).start()
    started = time.monotonic()
    run_lock._remove_stale(path, read_holder(path))
    assert time.monotonic() - started >= 0.25 and path.exists(), "the other one removes it"

    claim.touch()  # of a process that was killed meanwhile
    monkeypatch.setattr(run_lock, "CLAIM_S", 0.1)
    run_lock._remove_stale(path, read_holder(path))
    run_lock._remove_stale(path, read_holder(path))
    assert list(tmp_path.iterdir()) == []


def test_roles_exclude_themselves_and_whole_runs_only(tmp_path: Path) -> None:
    with hold_run(tmp_path, "trainer", ["trainer"]):
        token = os.environ.pop(TOKEN)
        with hold_run(tmp_path, "orchestrator", ["orchestrator"]):
            pass
        for command, roles in (("trainer", ["trainer"]), ("rl", run_lock.ROLES), ("sft", run_lock.ROLES)):
            with pytest.raises(UserError, match="is in use by `trainer`"), hold_run(tmp_path, command, roles):
                pass
        os.environ[TOKEN] = token
    assert list(tmp_path.iterdir()) == []


def test_what_a_holder_starts_is_covered(tmp_path: Path) -> None:
    with hold_run(tmp_path, "rl"):
        environment = os.environ | {"RANK": "0"}
        script = "import sys; from pathlib import Path; from tandem.utils.run_lock import hold_run\n"
        script += "with hold_run(Path(sys.argv[1]), 'trainer', ['trainer']): print('covered')"
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
        assert done.stdout == "covered\n"
        assert (tmp_path / "trainer.lock").exists(), "it is for the one who took it to remove it"
        # As after this process became torchrun: the first rank is the one to remove it.
        subprocess.run(command, env=environment, capture_output=True, check=True)
        assert not (tmp_path / "trainer.lock").exists()


def test_ranks_but_the_first_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with hold_run(tmp_path, "trainer"):
        assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_machine_is_held_while_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_holder, "STALE_S", 30.0)
    path = elsewhere(tmp_path)
    holder = read_holder(path)
    assert holder is not None
    ended = threading.Event()

    def beat() -> None:
        with path.open("r+b") as file:  # in place, as holders do
            for number in range(2, 10**6):
                if ended.wait(0.05):
                    return
                os.pwrite(file.fileno(), holder.encode(number), 0)

    beating = threading.Thread(target=beat)
    beating.start()
    told = r"pid 4711 on node-7, since .*; look at it with: ssh node-7 ps -fp 4711"
    try:
        with pytest.raises(UserError, match=told), hold_run(tmp_path, "rl"):
            pass
    finally:
        ended.set()
        beating.join()


def test_a_lock_of_another_machine_that_never_changes_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_holder, "STALE_S", 0.3)
    os.utime(elsewhere(tmp_path), (time.time() + 1e6, time.time() + 1e6))  # its clock means nothing
    started = time.monotonic()
    with hold_run(tmp_path, "rl"):
        assert time.monotonic() - started >= 0.3
        found = read_holder(tmp_path / "trainer.lock")
        assert found is not None and found.pid == os.getpid()


def test_a_lock_that_cannot_be_read_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_holder, "STALE_S", 0.1)
    for content in (b"", b"\xff", b"[]", b"{}", b'{"token": 1}'):
        (tmp_path / "trainer.lock").write_bytes(content)
        with hold_run(tmp_path, "rl"):
            pass


@pytest.mark.parametrize("key", ["token", "command", "host", "machine", "pid", "process_started", "since"])
@pytest.mark.parametrize("value", [[], {}, 1.5, True, -1, 2**70, "x"])
def test_a_lock_with_another_kind_of_value_is_damaged(key: str, value: object) -> None:
    """One that decodes can be described and looked up."""
    record = json.loads(Holder.this_process("rl").encode(1)) | {key: value}
    holder = Holder.decode(json.dumps(record).encode())
    if holder is not None:
        assert isinstance(holder.is_alive(), bool) and f"pid {holder.pid} on" in holder.describe()
    else:
        assert not (isinstance(value, str) and key not in ("pid", "process_started"))


@pytest.mark.parametrize("name", ["trainer.lock", "orchestrator.lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_lock_is_refused_and_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    KINDS[kind](tmp_path / name)
    with pytest.raises(UserError, match=rf"{name} is no file, so it is no lock; remove it"), hold_run(tmp_path, "rl"):
        pass
    assert read_holder(tmp_path / name) is None, "nor does who only looks"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_in_which_something_else_stands_where_files_belong_is_held_by_nobody(tmp_path: Path) -> None:
    """Whoever takes it may wait for the writer of a pipe."""
    os.mkfifo(tmp_path / "metrics.jsonl")
    told = r"output_dir = '.*': metrics\.jsonl is neither a file nor a folder, and a run has a file there"
    for role in ROLES:
        with pytest.raises(UserError, match=told), hold_run(tmp_path, role, [role]):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_stands_in_the_place_of_a_claim_goes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "CLAIM_S", 0.1)
    monkeypatch.setattr(run_holder, "STALE_S", 0.1)
    (tmp_path / "trainer.lock").write_bytes(b"stale")
    KINDS[kind](tmp_path / ".trainer.lock.stale")
    with hold_run(tmp_path, "rl"):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["orchestrator.lock", "trainer.lock"]


def test_a_directory_that_is_moved_away_is_told_and_not_made_again(tmp_path: Path) -> None:
    root, moved = tmp_path / "run", tmp_path / "moved"
    told = r"run' was renamed or deleted under the run, which ends; where it was renamed, continue with --resume and"
    with pytest.raises(BrokenRunDirectory, match=told), hold_run(root, "sft"):
        root.rename(moved)
        RunLog(RunDir(root), "sft").metrics(1, {})
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    with pytest.raises(BrokenRunDirectory, match="was taken or removed"), hold_run(root, "sft"):
        (root / "trainer.lock").unlink()
        raise RuntimeError("whatever comes of it")


@pytest.mark.parametrize("write", WRITERS)
def test_nothing_that_is_written_makes_the_run_directory_again(tmp_path: Path, write: str) -> None:
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        WRITERS[write](run_dir)
    assert list(tmp_path.iterdir()) == []


def test_what_the_file_system_says_of_a_run_is_one_line(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with (
        pytest.raises(BrokenRunDirectory, match=r"run' is damaged: \S+/run/weights/step_1: Is a directory"),
        hold_run(root, "rl"),
    ):
        (root / "weights" / "step_1").mkdir(parents=True)
        (root / "weights" / "step_1").read_bytes()
    with pytest.raises(IsADirectoryError), hold_run(root, "rl"):
        tmp_path.read_bytes()  # of other places, users' code may speak
    with pytest.raises(PermissionError), hold_run(root, "rl"):
        raise PermissionError(errno.EACCES, "Permission denied", str(root / "weights"))  # one line as it is


def test_a_holder_changes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "BEAT_S", 0.02)
    with hold_run(tmp_path, "rl"):
        path = tmp_path / "trainer.lock"
        seen = {path.read_bytes()}
        deadline = time.monotonic() + 10
        while len(seen) < 3 and time.monotonic() < deadline:
            seen.add(path.read_bytes())
        assert len(seen) >= 3
        assert all(json.loads(content)["pid"] == os.getpid() for content in seen)


def test_whoever_lost_its_lock_ends(tmp_path: Path) -> None:
    script = f"import tandem.utils.run_lock as lock; lock.BEAT_S = 0.02\n{TAKE}"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    tell(process)
    assert answer(process) == "held"
    elsewhere(tmp_path).replace(tmp_path / "orchestrator.lock")  # as a taker does that found it stale
    assert process.wait(timeout=30) == 1
    assert "was taken or removed" in process.communicate()[1]
    assert (tmp_path / "orchestrator.lock").exists(), "the other's lock is left alone"


def test_a_lock_is_lost_when_two_looks_in_a_row_do_not_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system may fail to answer for a moment, again and again."""
    looks, left = iter([False, True, False, True, True, False, False]), threading.Event()
    told: list[tuple[str, list[bool]]] = []

    def leave(reason: str) -> None:
        told.append((reason, list(looks)))
        left.set()

    monkeypatch.setattr(run_lock, "BEAT_S", 0.001)
    monkeypatch.setattr(run_lock, "_leave", leave)
    monkeypatch.setattr(run_lock.RunLock, "is_in_place", lambda _: next(looks, True))
    path = tmp_path / "trainer.lock"
    lock = run_lock.take(path, Holder.this_process("rl"))
    assert left.wait(60)
    ((reason, unseen),) = told
    assert str(tmp_path) in reason and unseen == []
    lock.release()


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"output_dir = '/proc/run' cannot be written: .*choose another --output-dir"
    with pytest.raises(UserError, match=told), hold_run(Path("/proc/run"), "rl"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; give a directory"), hold_run(tmp_path / "file", "rl"):
        pass

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"), hold_run(tmp_path, "rl"):
        pass


@pytest.fixture
def immutable(tmp_path: Path) -> Iterator[Path]:
    """A directory that can be made immutable."""
    folder = tmp_path / "run"
    folder.mkdir()
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True, check=False).returncode != 0:
        pytest.skip("chattr +i needs a privilege and a file system that has it")
    subprocess.run(["chattr", "-i", str(folder)], check=True)
    yield folder
    subprocess.run(["chattr", "-i", str(folder)], check=True)


def test_a_directory_that_becomes_immutable_does_not_hide_why_a_run_ends(
    immutable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="the real reason"), hold_run(immutable, "rl"):
        subprocess.run(["chattr", "+i", str(immutable)], check=True)
        raise RuntimeError("the real reason")
    assert f"the lock {immutable}/trainer.lock could not be removed: Operation not permitted" in caplog.text
    told = rf"cannot be written: Operation not permitted \(it may be immutable: lsattr -d {immutable}\)"
    with pytest.raises(UserError, match=told), hold_run(immutable, "rl"):
        pass


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_lock.os, "link", no_links)
    with hold_run(tmp_path, "rl"):
        token = os.environ.pop(TOKEN)
        with pytest.raises(UserError, match="is in use by `rl`"), hold_run(tmp_path, "rl"):
            pass
        os.environ[TOKEN] = token
