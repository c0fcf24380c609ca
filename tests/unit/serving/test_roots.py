"""Which directories may be loaded from."""

from pathlib import Path

import pytest

from tandem.serving.roots import WeightRoots, weight_roots
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, a run, and something that is nobody's business; started in `work`."""
    for folder in ("models/tiny", "models/other", "work/outputs/rl/weights/step_000001", "secret/model", "added/a"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "work/outputs/rl/weights/latest").symlink_to("step_000001")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_below_the_models_parent_outputs_and_what_was_added(place: Path) -> None:
    roots = WeightRoots(weight_roots(place / "models/tiny", [place / "added"]))
    allowed = ["models/tiny", "models/other", "models/none", "added/a", "added", "work/outputs/rl/weights/step_000001"]
    for name in allowed:
        assert roots.resolve(str(place / name), WeightUpdateRefused) == place / name
    assert roots.resolve("outputs/rl/weights/latest", AdapterRefused) == place / "work/outputs/rl/weights/step_000001"


def test_what_lies_elsewhere_is_refused_without_a_word_on_whether_it_is_there(place: Path) -> None:
    (place / "added/way_out").symlink_to(place / "secret")
    (place / "added/circle").symlink_to("circle")
    roots = WeightRoots(weight_roots(place / "models/tiny", [place / "added"]))
    refusals = set()
    for name in ("secret/model", "secret/none", "models/../secret/model", "added/way_out/model", "models-too", "work"):
        given = str(place / name)
        with pytest.raises(AdapterRefused) as refused:
            roots.resolve(given, AdapterRefused)
        refusals.add(str(refused.value).replace(repr(given), "PATH"))
    for given in ("/etc", "/", "/etc/nothing", "\0", "x" * 5000):
        with pytest.raises(AdapterRefused) as refused:
            roots.resolve(given, AdapterRefused)
        refusals.add(str(refused.value).replace(repr(given), "PATH"))
    assert len(refusals) == 1 and "--server.weight-roots" in refusals.pop()


def test_a_model_that_is_a_link_has_two_parents(place: Path) -> None:
    (place / "work/mine").symlink_to(place / "models/tiny")
    roots = WeightRoots(weight_roots(Path("mine"), []))
    for name in ("work/mine", "models/tiny", "models/other"):
        assert roots.resolve(str(place / name), WeightUpdateRefused).is_dir()
    with pytest.raises(WeightUpdateRefused):
        roots.resolve(str(place / "secret/model"), WeightUpdateRefused)


def test_a_model_below_the_root_of_the_disk_does_not_open_all_of_it() -> None:
    assert Path("/") not in weight_roots(Path("/model"), [])
