"""Options of how the orchestrator reaches inference servers."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tandem.config.shared import KeyOptions, root_url
from tandem.utils.errors import UserError

OUTAGE_TIMEOUT_S = 600.0


class ClientConfig(KeyOptions):
    """How to reach the inference server."""

    section = "client"

    base_url: str = "http://127.0.0.1:8000"
    """Address of the server, with or without /v1. Several: a list, or separated by commas. Requests go to the one with
    the least to do; one that goes away is replaced by the others and gets its weights when it returns."""

    servers_file: Path | None = None
    """File with the addresses of the servers, one a line, instead of base_url. It is read again and again: servers may
    be added and removed during the run."""

    startup_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for /health at the start."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for one request."""

    update_mode: Literal["keep", "wait"] = "keep"
    """What happens to running requests at a weight sync. keep: they continue under the new weights, with their KV cache
    recomputed. wait: they finish first and no new ones start; better for short completions."""

    concurrency: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Completions under way at each server; others wait for their turn at the orchestrator. auto: follows the server's
    queue and KV cache, see docs/scaling.md. With deterministic = true, which nothing may follow, there is no limit."""

    retries: int = Field(default=3, ge=0)
    """How often to resend a request that failed although the server is healthy."""

    outage_timeout_s: float = Field(default=OUTAGE_TIMEOUT_S, gt=0)
    """How long to wait for a server that is gone; weights_timeout_s has to allow for it. When it is back, it gets its
    weights again and open requests are resent: nothing is lost."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list) else value

    @field_validator("base_url")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        urls = [root_url(url.strip()) for url in value.split(",")]
        if len(set(urls)) < len(urls):
            raise ValueError(f"{value!r} names a server twice; give each once")
        return ",".join(urls)

    def told(self, url: str) -> str:
        """The option that names this server, as an error shows it."""
        return f"base_url = {url!r}" if self.servers_file is None else f"servers_file = '{self.servers_file}' ({url})"

    @property
    def base_urls(self) -> list[str]:
        """Where the servers are at the start."""
        return self.base_url.split(",") if self.servers_file is None else read_servers(self.servers_file)


def read_servers(path: Path) -> list[str]:
    """The addresses in `client.servers_file`; empty lines and those after # count for nothing."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        urls = [root_url(line) for line in lines if line]
    except (OSError, ValueError) as error:
        raise UserError(f"client.servers_file = '{path}' cannot be used: {error}") from error
    if not urls:
        raise UserError(f"client.servers_file = '{path}' names no server; write one address a line")
    return list(dict.fromkeys(urls))
