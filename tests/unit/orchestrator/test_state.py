from pathlib import Path

import pytest

from tandem.orchestrator.state import OrchestratorState
from tandem.utils.errors import UserError
from tandem.utils.run_dir import RunDir


def test_state_comes_back_as_it_was_encoded(tmp_path: Path) -> None:
    states = [OrchestratorState(4, 70, [66, 69]), OrchestratorState(8, 130, [], set_aside=[2, 5])]
    for state in states:
        folder = tmp_path / "checkpoints" / f"step_{state.step:06d}"
        folder.mkdir(parents=True)
        (folder / "orchestrator.json").write_bytes(state.encode())
    assert [OrchestratorState.load(RunDir(tmp_path), step) for step in (4, 8)] == states


def test_a_checkpoint_of_another_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"resume: .*orchestrator\.json is not a valid orchestrator state"):
        OrchestratorState.load(RunDir(tmp_path), 4)
    (tmp_path / "checkpoints" / "step_000004").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000004" / "orchestrator.json").write_text("{}")
    with pytest.raises(UserError, match="is not a valid orchestrator state"):
        OrchestratorState.load(RunDir(tmp_path), 4)
