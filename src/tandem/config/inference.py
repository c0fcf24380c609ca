"""Options of the inference server."""

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from tandem.config.names import OrImportPath
from tandem.config.sglang import SGLangConfig
from tandem.config.shared import ComputeOptions, KeyOptions, LogOptions, ModelOptions, SeedOptions
from tandem.config.vllm import VllmConfig

EngineName = Literal["native", "vllm", "sglang"]

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
# A running SGLang server was given its own values of these when it was started.
NATIVE_ONLY = (
    "max_sequences",
    "tokens_per_step",
    "block_size",
    "kv_cache_tokens",
    "gpu_memory_utilization",
    "prefix_caching",
    "device",
    "cuda_graphs",
    "check_invariants",
)


def port_of(value: Any) -> Any:
    """The port of an address: people give the server's and the client's alike. Raises ValueError where it has none."""
    if not isinstance(value, str) or "://" not in value:
        return value
    try:
        port = urlsplit(value).port
    except ValueError:
        port = None
    if port is None:
        raise ValueError(f"{value!r} is an address without a port; give one like 8000, or 'http://127.0.0.1:8000'")
    return port


class ServerConfig(KeyOptions):
    """Address and access of a server."""

    section = "server"

    host: str = "127.0.0.1"
    """Address to bind (short: --host). Other addresses than loopback need an API key or allow_unauthenticated."""

    port: Annotated[int, BeforeValidator(port_of)] = Field(default=8000, ge=1, le=65535)
    """Port to bind (short: --port)."""

    allow_unauthenticated: bool = False
    """Serve on a non-loopback address without a key (short: --allow-unauthenticated)."""

    max_body_mb: int = Field(default=64, ge=1)
    """Largest request body, in MiB."""

    receive_timeout_s: float = Field(default=60.0, gt=0)
    """How long a client may take to send the headers of a request, and again for its body."""

    allowed_hosts: list[str] = []
    """Host names that clients may use for a server without a key, besides IP addresses, loopback and its own name."""

    @model_validator(mode="after")
    def _has_a_key_when_reachable(self) -> "ServerConfig":
        keyless = self.api_key is None and self.api_key_var is None
        if self.host not in LOOPBACK_HOSTS and keyless and not self.allow_unauthenticated:
            raise ValueError(
                f"host = {self.host!r} is reachable from other machines and no API key is set; "
                "set api_key_var, or allow_unauthenticated if the network is trusted"
            )
        return self

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


class InferenceServerConfig(ServerConfig):
    """Address, access, and where weights may come from."""

    weight_roots: list[Path] = []
    """More directories below which weights and adapters may be loaded. Always allowed: the parent of model.name,
    ./outputs and, under `rl`, output_dir."""


class InferenceConfig(LogOptions, ComputeOptions, SeedOptions, ModelOptions):
    """The inference server: it samples the rollouts."""

    engine: Annotated[EngineName | str, OrImportPath(EngineName)] = "native"
    """What runs the model. native: our own engine. vllm: vLLM's server. sglang: a running SGLang server. Or an engine
    of your own, by the function that builds it, "package.module:build" or "./file.py:build"."""

    vllm: VllmConfig = VllmConfig()

    sglang: SGLangConfig = SGLangConfig()

    server: InferenceServerConfig = InferenceServerConfig()

    generation_config: Literal["auto", "vllm"] = "auto"
    """Default sampling options of requests. auto: those of the model's generation_config.json. vllm: neutral ones."""

    max_sequences: int = Field(default=256, ge=1)
    """Most sequences in one decode step. Others wait in the queue."""

    max_waiting: int = Field(default=16384, ge=1)
    """Most samples in the queue. Requests beyond that get status 429."""

    tokens_per_step: int = Field(default=8192, ge=1)
    """Most prompt tokens in one forward pass. Longer prompts are prefilled in chunks."""

    block_size: int = Field(default=16, ge=1)
    """Tokens per block of the KV cache."""

    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV cache in tokens. None: room for max_sequences of seq_len, at most a quarter of free memory."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory for weights, KV cache and everything else. None: native gives the KV cache a quarter of
    the free memory, vllm uses its own default."""

    prefix_caching: bool = True
    """Reuse the KV cache of prompts that begin alike, from earlier requests too."""

    cuda_graphs: bool = True
    """Decode with CUDA graphs, on a GPU."""

    check_invariants: bool = False
    """Check the native engine's invariants whenever it is idle. For tests."""

    drain_timeout_s: float = Field(default=5.0, ge=0)
    """How long running requests may take to finish after SIGTERM."""

    @model_validator(mode="after")
    def _engine_honours_options(self) -> "InferenceConfig":
        if self.engine != "vllm":
            if self.vllm.flags:
                first = next(iter(self.vllm.flags))
                raise ValueError(f"vllm.flags are given ({first}, …) and engine = {self.engine!r}; set engine = 'vllm'")
            return self
        for option in ("deterministic", "check_invariants"):
            if getattr(self, option):
                raise ValueError(
                    f"{option} = true does not work with engine = 'vllm'; leave it out or set engine = 'native'"
                )
        if self.max_waiting != type(self).model_fields["max_waiting"].default:
            raise ValueError(f"max_waiting = {self.max_waiting} has no effect with engine = 'vllm'; leave it out")
        return self

    @model_validator(mode="after")
    def _sglang_honours_options(self) -> "InferenceConfig":
        if self.engine != "sglang":
            if self.sglang != SGLangConfig():
                raise ValueError(f"sglang options are given and engine = {self.engine!r}; set engine = 'sglang'")
            return self
        for option in NATIVE_ONLY:
            value = getattr(self, option)
            if value != type(self).model_fields[option].default:
                flag = f"--mem-fraction-static {value}" if option == "gpu_memory_utilization" else "its own flag"
                raise ValueError(f"{option} = {value!r} has no effect with engine = 'sglang'; give SGLang {flag}")
        return self

    @model_validator(mode="after")
    def _one_sequence_fits(self) -> "InferenceConfig":
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.seq_len + self.block_size:
            raise ValueError(
                f"kv_cache_tokens = {self.kv_cache_tokens} cannot hold one sequence of seq_len = {self.seq_len}; "
                f"give at least {self.seq_len + self.block_size}"
            )
        return self
