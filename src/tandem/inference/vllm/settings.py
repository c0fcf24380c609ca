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


@dataclass(frozen=True)
class Settings:
    model_dir: Path
    model_name: str
    api_key: str | None
    max_body_bytes: int

    def to_environment(self) -> dict[str, str]:
        key = {} if self.api_key is None else {API_KEY: self.api_key}
        limit = {MAX_BODY_BYTES: str(self.max_body_bytes)}
        return {MODEL_DIR: str(self.model_dir), MODEL_NAME: self.model_name, **limit, **key}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        limit = int(environment[MAX_BODY_BYTES])
        return cls(Path(environment[MODEL_DIR]), environment[MODEL_NAME], environment.get(API_KEY), limit)
