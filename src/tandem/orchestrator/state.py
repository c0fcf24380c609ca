"""What the orchestrator has to remember between a checkpoint and a resumed run."""

from dataclasses import asdict, dataclass, field

from tandem.utils.files import read_json, write_json
from tandem.utils.run_dir import RunDir, step_name

FILE = "orchestrator.json"


@dataclass(frozen=True)
class OrchestratorState:
    """After the batch of `step`: tasks below `next_order` were started; `unfinished` of them not trained on.
    Tasks that keep failing are `set_aside`, by their place among the training tasks."""

    step: int
    next_order: int
    unfinished: list[int]
    set_aside: list[int] = field(default_factory=list)

    def save(self, run_dir: RunDir) -> None:
        write_json(run_dir.checkpoints / step_name(self.step) / FILE, asdict(self))

    @classmethod
    def load(cls, run_dir: RunDir, step: int) -> "OrchestratorState":
        return cls(**read_json(run_dir.checkpoints / step_name(step) / FILE))
