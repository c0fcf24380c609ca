"""Where the compiled kernels come from: compiled once, kept where nobody else can write, never taken from elsewhere."""

import _ctypes
import ctypes
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch

from tandem.commands.trainer import TrainerConfig
from tandem.config.reward_server import RewardServerConfig
from tandem.entrypoints import reward_server
from tandem.models.cpu import compiler, kernels, library
from tandem.models.cpu.compiler import Compiler
from tandem.trainer.build import joined_ranks

needs_compiler = pytest.mark.skipif(Compiler.find() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def log(caplog: LogCaptureFixture) -> Iterator[LogCaptureFixture]:
    with caplog.at_level("INFO"):
        yield caplog


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """An empty cache, a temporary folder, and a library that is compiled in no time."""
    source = tmp_path / "kernels.c"
    source.write_text("const int uses_threads = 1;")
    monkeypatch.setattr(library, "SOURCES", [source])
    for name in ("cache", "temporary"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache"


def load() -> ctypes.CDLL:
    loaded = library.load.__wrapped__()
    assert loaded is not None
    return loaded


@pytest.fixture
def kept(cache: Path, log: LogCaptureFixture) -> Path:
    """Where the compiled library is kept. It is closed again: what is open would be had again without a look."""
    _ctypes.dlclose(load()._handle)
    log.clear()
    [path] = kept_in(cache)
    return path


def kept_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("kernels-*.so"))


def put_foreign_library(path: Path) -> None:
    """Something that says what it is once it is loaded."""
    source = path.with_name("foreign.c")
    source.write_text("const int uses_threads = 1; const int foreign = 1;")
    Compiler(compiler_found().command, []).build(source, path.with_name("foreign.so")).rename(path)


def compiler_found() -> Compiler:
    found = Compiler.find()
    assert found is not None
    return found


@needs_compiler
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    assert library.load() is not None
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            assert kernels.find(torch.empty(0, dtype=dtype)) is not None


@needs_compiler
def test_the_openmp_of_pytorch_is_visible_to_every_library_and_no_other() -> None:
    name = library._share_openmp()
    assert name.startswith(("libgomp", "libomp", "libiomp"))
    assert ctypes.CDLL(None).omp_get_max_threads() == torch.get_num_threads()


def test_a_library_that_only_uses_openmp_is_not_taken_for_it(monkeypatch: MonkeyPatch) -> None:
    own = str(Path(torch.__file__).with_name("lib") / "libgomp.so.1")
    users = ["/lib/libblas_gomp.so.0", "/lib/libgomp.so.1", own]
    monkeypatch.setattr(library, "_loaded_libraries", lambda: users)
    assert library._openmp_runtimes()[:2] == [own, "/lib/libgomp.so.1"]


@needs_compiler
def test_kernels_are_compiled_once_and_both_is_said(cache: Path, log: LogCaptureFixture) -> None:
    load()
    [path] = kept_in(cache)
    assert "compiling the CPU kernels" in log.text and "compiled the CPU kernels in" in log.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "something else was left"
    log.clear()
    before = path.stat().st_mtime_ns
    load()
    assert "compiling" not in log.text and str(path) in log.text
    assert path.stat().st_mtime_ns == before


@needs_compiler
def test_other_flags_give_another_library(cache: Path, monkeypatch: MonkeyPatch) -> None:
    load()
    monkeypatch.setattr(compiler, "FOR_THIS_PROCESSOR", [[]])
    load()
    assert len(kept_in(cache)) == 2


@needs_compiler
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_library_that_others_could_have_written_is_not_loaded(mode: int, kept: Path, log: LogCaptureFixture) -> None:
    put_foreign_library(kept)
    kept.chmod(mode)
    assert not hasattr(load(), "foreign")
    assert "others may have written" in log.text and f"mode {mode:04o}" in log.text
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700, "it is replaced"


@needs_compiler
def test_a_link_to_a_library_is_not_followed(kept: Path, tmp_path: Path) -> None:
    put_foreign_library(tmp_path / "elsewhere.so")
    kept.unlink()
    kept.symlink_to(tmp_path / "elsewhere.so")
    assert not hasattr(load(), "foreign")
    assert not kept.is_symlink()


@needs_compiler
@pytest.mark.parametrize("which", ["cache/tandem", "cache", "."])
def test_nothing_is_loaded_from_a_folder_that_others_could_write_to(
    which: str, kept: Path, tmp_path: Path, log: LogCaptureFixture
) -> None:
    put_foreign_library(kept)
    (tmp_path / which).chmod(0o770)
    # Its temporary place is below the same folder, so in the last case nothing is kept at all.
    assert not hasattr(load(), "foreign")
    (tmp_path / which).chmod(0o700)
    assert "mode 0770" in log.text and str((tmp_path / which).resolve()) in log.text
    assert len(kept_in(tmp_path / "temporary")) == (which != ".")


@needs_compiler
def test_nothing_of_another_owner_is_loaded(kept: Path, monkeypatch: MonkeyPatch, log: LogCaptureFixture) -> None:
    put_foreign_library(kept)
    monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    assert not hasattr(load(), "foreign")
    assert f"owner {kept.stat().st_uid}" in log.text


@needs_compiler
def test_what_is_kept_and_ours_alone_is_loaded(kept: Path) -> None:
    """Which shows that the tests above would notice a library that should not be loaded."""
    put_foreign_library(kept)
    assert hasattr(load(), "foreign")


@needs_compiler
def test_a_folder_for_everybody_that_is_sticky_will_do(cache: Path) -> None:
    cache.chmod(0o1777)
    load()
    assert len(kept_in(cache)) == 1


@needs_compiler
def test_a_damaged_library_is_compiled_anew(kept: Path, log: LogCaptureFixture) -> None:
    kept.write_bytes(b"not a library")
    load()
    assert "not used" in log.text and "compiled" in log.text


@needs_compiler
def test_a_cache_that_cannot_be_made_costs_no_kernels(
    cache: Path, monkeypatch: MonkeyPatch, log: LogCaptureFixture
) -> None:
    cache.with_name("file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.with_name("file")))
    load()
    assert "no CPU kernels are kept in" in log.text
    assert len(kept_in(cache.with_name("temporary"))) == 1


@pytest.mark.parametrize(
    ("variables", "logged"),
    [
        ({"CC": "no-such-compiler"}, "no C compiler"),
        ({"CC": "false"}, "cannot be used"),
        ({"TANDEM_KERNELS": "0"}, "TANDEM_KERNELS=0"),
    ],
)
def test_without_them_nothing_breaks(
    variables: dict[str, str], logged: str, cache: Path, monkeypatch: MonkeyPatch, log: LogCaptureFixture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert library.load.__wrapped__() is None
    assert logged in log.text


@needs_compiler
def test_kernels_without_threads_compute_the_same(
    tmp_path: Path, monkeypatch: MonkeyPatch, log: LogCaptureFixture
) -> None:
    """A compiler without OpenMP: what would be the parts of several threads is computed one after the other."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "FLAGS", [flag.replace("-O3", "-O1") for flag in compiler.FLAGS])
    monkeypatch.setattr(compiler, "OPENMP", [[]])
    serial = load()
    assert "one thread" in log.text
    monkeypatch.setattr(kernels, "threads", lambda num_elements: 3)
    x = torch.randn(10, 32)
    function = serial.rms_norm_f32
    function.argtypes, function.restype = kernels.ARGUMENTS["rms_norm"], None
    ours = kernels.Kernels({"rms_norm": function}).rms_norm(x, torch.ones(32), 1e-6)
    torch.testing.assert_close(ours, torch.nn.functional.rms_norm(x, (32,), None, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("device", "loaded"), [("cpu", 1), ("meta", 0)])
def test_kernels_are_loaded_for_a_cpu(device: str, loaded: int, monkeypatch: MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(library, "load", lambda: calls.append(None))
    library.load_for(torch.device(device))
    assert len(calls) == loaded


def test_training_has_its_kernels_before_it_begins(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(library, "load", lambda: calls.append(None))
    config = TrainerConfig.model_validate({"model": {"name": tmp_path}, "output_dir": tmp_path, "device": "cpu"})
    with joined_ranks(config):
        assert len(calls) == 1


def test_a_reward_server_has_its_kernels_before_its_model(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def load() -> None:
        raise InterruptedError("kernels first")

    monkeypatch.setattr(library, "load", load)
    monkeypatch.setattr(reward_server, "listen_or_refuse", lambda *where: None)
    config = RewardServerConfig.model_validate({"model": {"name": tmp_path}, "device": "cpu"})
    with pytest.raises(InterruptedError, match="kernels first"):
        reward_server.serve(config)


@pytest.mark.parametrize(
    ("variables", "said"),
    [pytest.param({}, "CPU kernels", marks=needs_compiler), ({"CC": "no-such-compiler"}, "no C compiler")],
)
def test_compiled_ahead(variables: dict[str, str], said: str) -> None:
    """`make setup` says what it did, and does not fail for want of a compiler."""
    command = [sys.executable, "-m", "tandem.models.cpu.library"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, check=True)
    assert said in done.stdout
