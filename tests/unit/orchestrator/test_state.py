from pathlib import Path

from tandem.orchestrator.state import OrchestratorState
from tandem.utils.run_dir import RunDir


def test_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    states = [OrchestratorState(4, 70, [66, 69]), OrchestratorState(8, 130, [], set_aside=[2, 5])]
    for state in states:
        state.save(run_dir)
    assert [OrchestratorState.load(run_dir, step) for step in (4, 8)] == states
    assert (tmp_path / "checkpoints" / "step_000004" / "orchestrator.json").exists()
