"""Steps that are launched and not waited for. No torch.

    launch step n+1 ─► read step n ─► stop checks, streams, admission ─► launch step n+2
    GPU:  … step n │ step n+1 ───────────────────────────────────────────│ step n+2 …

The state runs ahead of the GPU: a row counts a token as soon as it is being drawn (`SlotState.reserve`). A row that
turns out to have ended, or that loses its place, gives up the token behind its last (`SlotState.retract`); no more is
wasted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.engine.sampler import Drawn
from tandem.engine.state import Rows, SlotState

Read = Callable[[], Drawn]


class Launcher(Protocol):
    """Runs steps on a device that works by itself."""

    def launch(self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64]) -> Any:
        """Begin to compute the next `chunk` tokens of each row, and logits for the rows at the indices `wanted`."""
        ...

    def draw(self, rows: Rows, launched: Any, index: NDArray[np.int64] | None) -> Read:
        """Begin to draw a token for each row, from its own logits or from those at its index; returns how to wait
        for it."""
        ...

    def forward(self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64]) -> Any:
        """The logits that `launch` computes."""
        ...

    def sample(self, rows: Rows, logits: Any, adjusted: Any) -> Drawn:
        """Draw a token for each row and wait for it. `adjusted`: logits to draw from, where they are others."""
        ...


@dataclass(frozen=True)
class InflightStep:
    """Tokens that are being drawn, one for each row."""

    rows: Rows
    order: NDArray[np.int64]  # of admission: a slot may belong to another sample by the time the token is read
    positions: NDArray[np.int64]
    versions: int | NDArray[np.int64]
    read: Read

    @classmethod
    def of(cls, state: SlotState, rows: Rows, versions: int | NDArray[np.int64], read: Read) -> "InflightStep":
        return cls(rows, state.order[rows], state.length[rows], versions, read)

    def is_current(self, state: SlotState) -> NDArray[np.bool_]:
        """Which rows still belong to the samples the tokens are for."""
        return state.order[self.rows] == self.order
