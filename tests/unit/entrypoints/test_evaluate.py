"""`evaluate` before it starts anything."""

from pathlib import Path

import pytest

from tandem.entrypoints.evaluate import refuse_missing_model
from tandem.utils.errors import UserError


def test_a_model_that_is_none_is_refused_by_the_name_of_the_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model = '.*/nothing' is not a directory; give a model directory"):
        refuse_missing_model(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"^model = '.*' holds no model: there is no config\.json in it"):
        refuse_missing_model(tmp_path)


def test_a_name_on_the_hub_is_left_to_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refuse_missing_model(Path("owner/model"))
    (tmp_path / "models").mkdir()
    with pytest.raises(UserError, match="is not a directory"):
        refuse_missing_model(Path("models/misspelt"))
