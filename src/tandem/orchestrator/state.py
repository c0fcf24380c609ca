"""What the orchestrator has to remember between a checkpoint and a resumed run."""

from dataclasses import asdict, dataclass, field

from tandem.data.batch_files import ORCHESTRATOR
from tandem.utils.errors import UserError
from tandem.utils.files import json_text, read_json
from tandem.utils.run_dir import RunDir, step_name


@dataclass(frozen=True)
class OrchestratorState:
    """After the batch of `step`: tasks below `next_order` were started; `unfinished` of them not trained on.
    Tasks that keep failing are `set_aside`; those of the curriculum's pools are `easy` and `hard`. All by their places
    among the training tasks."""

    step: int
    next_order: int
    unfinished: list[int]
    set_aside: list[int] = field(default_factory=list)
    easy: list[int] = field(default_factory=list)
    hard: list[int] = field(default_factory=list)

    def encode(self) -> bytes:
        """It goes with the batch, and from there into the checkpoint of the step."""
        return json_text(asdict(self))

    @classmethod
    def load(cls, run_dir: RunDir, step: int) -> "OrchestratorState":
        path = run_dir.checkpoints / step_name(step) / ORCHESTRATOR
        try:
            return cls(**read_json(path))
        except (FileNotFoundError, TypeError) as error:
            raise UserError(f"resume: {path} is not a valid orchestrator state: {error}") from error
