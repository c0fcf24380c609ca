"""What a run tells its servers of itself: the name of this start, the key of the lease by which it holds them, and
where it is. The key is kept with the run, so that its next start gets them back at once (serving/lease.py).
"""

import asyncio
import os
import re
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.types.identity import BEAT_S, LEASE_PATTERN, new_run_name
from tandem.utils.files import write_atomic
from tandem.utils.http import HttpClient, Unreachable

BEAT_TIMEOUT_S = 5.0
RELEASE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class RunClaim:
    name: str
    lease: str
    place: str

    @classmethod
    def of(cls, root: Path, key_file: Path) -> "RunClaim":
        """A new start of the run in `root`. Without a key in the file it gets a new one, which `keep` writes there."""
        try:
            known = key_file.read_text(errors="replace").strip()
        except FileNotFoundError:
            known = ""
        lease = known if re.fullmatch(LEASE_PATTERN, known) else secrets.token_hex(16)
        place = os.fsencode(root.resolve()).decode(errors="replace")
        return cls(new_run_name(root), lease, f"{place[-900:]} on {socket.gethostname()[:100]}")

    def keep(self, key_file: Path) -> None:
        write_atomic(key_file, f"{self.lease}\n".encode(), private=True)

    @property
    def body(self) -> dict[str, str]:
        return {"run": self.name, "lease": self.lease, "place": self.place}


class Hold:
    """Keeps one server claimed, from `begin` on. Whether a beat was heard, the next request tells."""

    def __init__(self, http: HttpClient, claim: RunClaim) -> None:
        self._http = http
        self._claim = claim
        self.instance: str | None = None  # the start of the server that is held, so far
        self._beating: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()  # a claim that is under way could arrive after the release

    @property
    def body(self) -> dict[str, str | None]:
        """As /claim takes it."""
        return self._claim.body | {"instance": self.instance}

    def begin(self, instance: str | None) -> None:
        self.instance = instance
        if self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())

    def end(self) -> None:
        """The server stays with the run, for its next start, until the lease ends."""
        if self._beating is not None:
            self._beating.cancel()

    async def release(self) -> None:
        """Another run may have it."""
        async with self._asking:
            self.end()
            with suppress(Unreachable):
                await self._http.send("POST", "/release", {"lease": self._claim.lease}, timeout_s=RELEASE_TIMEOUT_S)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            async with self._asking:
                with suppress(Unreachable):
                    await self._http.send("POST", "/claim", self.body, timeout_s=BEAT_TIMEOUT_S)
