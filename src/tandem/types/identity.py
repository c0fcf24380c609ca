"""Who answered: the server's process, its model, the version of its weights, and the run that loaded them.

The server says so in the headers of every answer; the orchestrator trains on nothing whose headers are not those of
its own run.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import Field

INSTANCE_HEADER = "x-tandem-instance"
MODEL_HEADER = "x-tandem-model"
VERSION_HEADER = "x-tandem-version"
RUN_HEADER = "x-tandem-run"

NO_RUN = "-"  # in place of a run: the server's own weights, or those of a client that named no run
RUN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
RunName = Annotated[str, Field(pattern=RUN_PATTERN)]
LEASE_PATTERN = r"^[A-Za-z0-9]{16,128}$"
LeaseKey = Annotated[str, Field(pattern=LEASE_PATTERN)]

LEASE_S = 60.0  # how long a run that is not heard of keeps its server
BEAT_S = 2.0  # how often a run is heard of


@dataclass(frozen=True)
class ServerIdentity:
    instance: str  # another one after every start of the server
    model: str
    version: int
    runs: tuple[str, ...]  # whose weights served while the request was under way; the last one's serve now

    def to_headers(self) -> dict[str, str]:
        return {
            INSTANCE_HEADER: self.instance,
            MODEL_HEADER: quote(self.model),  # a path may hold what no header can
            VERSION_HEADER: str(self.version),
            RUN_HEADER: ", ".join(self.runs),
        }

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> "ServerIdentity | None":
        """None where the answer is not from one of our inference servers."""
        try:
            return cls(
                headers[INSTANCE_HEADER],
                unquote(headers[MODEL_HEADER]),
                int(headers[VERSION_HEADER]),
                tuple(headers[RUN_HEADER].split(", ")),
            )
        except (KeyError, ValueError):
            return None


def new_run_name(output_dir: Path) -> str:
    """Tells people which run it is, and servers one start of it from every other."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", output_dir.resolve().name).strip("-._")
    return f"{name[:64] or 'run'}-{uuid.uuid4().hex[:8]}"


def describe_run(run: str) -> str:
    return "a client that named no run" if run == NO_RUN else f"run {run!r}"
