"""Models by their name on the hub, from its cache on this machine."""

from pathlib import Path

import pytest

from tandem.config.base import load_config, parse
from tandem.config.inference import InferenceConfig
from tandem.models.files import check_model_dir
from tandem.utils.errors import UserError
from tandem.utils.hub import cache_folder, find_model, hub_name_of, is_hub_name, served_names

NAME = "Qwen/Qwen2.5-0.5B"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and a current directory, with nothing in them."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def fill(cache: Path, name: str = NAME) -> Path:
    """As huggingface_hub lays it out."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0a1b2c\n")
    return snapshot


def test_a_name_leads_to_what_the_cache_has(cache: Path) -> None:
    assert find_model(Path(NAME)) == Path(NAME)
    snapshot = fill(cache)
    assert find_model(Path(NAME)) == snapshot
    assert load_config(InferenceConfig, ["--model.name", NAME]).model.name == snapshot
    assert served_names(snapshot) == [NAME, "Qwen2.5-0.5B", str(snapshot)]


def test_a_directory_is_a_directory(cache: Path) -> None:
    fill(cache)
    Path(NAME).mkdir(parents=True)
    assert find_model(Path(NAME)) == Path(NAME) and not is_hub_name(Path(NAME))
    assert served_names(Path("models/tiny")) == ["models/tiny", "tiny"]
    assert hub_name_of(Path("outputs/rl/weights/latest")) is None


@pytest.mark.parametrize("path", ["model", "/a/b", "../a", "./a/b", "a/b/c", "a b/c", "~/model"])
def test_what_is_no_name_on_the_hub(cache: Path, path: str) -> None:
    assert not is_hub_name(Path(path)) or path == "./a/b"  # which is a/b to pathlib


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert cache_folder({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")
    assert cache_folder({"HF_HOME": "/h"}) == Path("/h/hub")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")


def test_offline_and_not_in_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = parse(InferenceConfig, "inference", "", ["--model.name", NAME])
    with pytest.raises(UserError) as caught:
        check_model_dir(config.model.name)
    assert str(caught.value).startswith(
        f"model.name = '{NAME}' is not a directory, and not in the hub's cache {cache} (HF_HUB_OFFLINE is set); give"
    )


def test_online_it_is_fetched_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> None:
        fetched.append(name)
        fill(cache, name)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for _ in range(2):
        config = parse(InferenceConfig, "inference", "", ["--model.name", NAME])
        assert hub_name_of(config.model.name) == NAME
    assert fetched == [NAME]


def test_a_mistake_in_a_path_is_not_looked_for_elsewhere(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it was looked for"))
    Path("models").mkdir()
    config = parse(InferenceConfig, "inference", "", ["--model.name", "models/revers_text"])
    assert config.model.name == Path("models/revers_text")


def test_what_cannot_be_fetched_is_refused_in_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def snapshot_download(name: str, allow_patterns: list[str]) -> None:
        raise OSError("no route\nto host")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(SystemExit) as caught:
        parse(InferenceConfig, "inference", "", ["--model.name", NAME])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    assert f"is not in the cache {cache}, and cannot be fetched from the Hugging Face hub: no route to host" in error
