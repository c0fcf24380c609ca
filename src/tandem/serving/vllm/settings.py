"""What our part of vLLM's server is told. vLLM makes middleware without arguments, so it travels in the environment,
which also keeps the API key out of the process list."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODEL_DIR = "TANDEM_VLLM_MODEL_DIR"
MODEL_NAME = "TANDEM_VLLM_MODEL_NAME"
API_KEY = "TANDEM_VLLM_API_KEY"
MAX_BODY_BYTES = "TANDEM_VLLM_MAX_BODY_BYTES"
RECEIVE_TIMEOUT = "TANDEM_VLLM_RECEIVE_TIMEOUT_S"
WEIGHT_ROOTS = "TANDEM_VLLM_WEIGHT_ROOTS"
HOST_NAMES = "TANDEM_VLLM_HOST_NAMES"


@dataclass(frozen=True)
class Settings:
    model_dir: Path
    model_name: str
    api_key: str | None
    max_body_bytes: int
    receive_timeout_s: float
    weight_roots: tuple[Path, ...]
    host_names: frozenset[str]  # what the server may be called, where it has no key

    def to_environment(self) -> dict[str, str]:
        key = {} if self.api_key is None else {API_KEY: self.api_key}
        return {
            MODEL_DIR: str(self.model_dir),
            MODEL_NAME: self.model_name,
            MAX_BODY_BYTES: str(self.max_body_bytes),
            RECEIVE_TIMEOUT: str(self.receive_timeout_s),
            WEIGHT_ROOTS: os.pathsep.join(str(root) for root in self.weight_roots),
            HOST_NAMES: " ".join(sorted(self.host_names)),
            **key,
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        return cls(
            model_dir=Path(environment[MODEL_DIR]),
            model_name=environment[MODEL_NAME],
            api_key=environment.get(API_KEY),
            max_body_bytes=int(environment[MAX_BODY_BYTES]),
            receive_timeout_s=float(environment[RECEIVE_TIMEOUT]),
            weight_roots=tuple(Path(root) for root in environment[WEIGHT_ROOTS].split(os.pathsep)),
            host_names=frozenset(environment[HOST_NAMES].split()),
        )
