"""Options of the SGLang engine: a client of a running SGLang server."""

from pydantic import Field, field_validator, model_validator

from tandem.config.base import Config
from tandem.config.shared import root_url


class SGLangConfig(Config):
    """A running SGLang server (engine = "sglang")."""

    base_url: str = "http://127.0.0.1:30000"
    """Where the SGLang server listens, with or without /v1."""

    api_key: str | None = None
    """SGLang's --api-key. Prefer api_key_var: other users can see flags."""

    api_key_var: str | None = None
    """Environment variable that holds SGLang's API key."""

    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for one completion, and for SGLang to load new weights."""

    startup_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for the SGLang server at the start."""

    allow_unseeded: bool = False
    """Accept seeds although SGLang ignores them without --enable-deterministic-inference."""

    allow_adjusted_logprobs: bool = False
    """Accept penalties, logit_bias and min_tokens although SGLang then gives log-probs of the adjusted logits."""

    @field_validator("base_url")
    @classmethod
    def _is_the_root(cls, value: str) -> str:
        return root_url(value)

    @model_validator(mode="after")
    def _is_reachable(self) -> "SGLangConfig":
        if self.api_key and self.api_key_var:
            raise ValueError("api_key and api_key_var are both given; give one of them")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url = {self.base_url!r} is not a URL; give one like http://127.0.0.1:30000")
        return self
