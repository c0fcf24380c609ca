"""Options of the SGLang engine: a client of a running SGLang server."""

from pydantic import Field

from tandem.config.shared import KeyOptions, ServerUrl


class SGLangConfig(KeyOptions):
    """A running SGLang server (engine = "sglang")."""

    section = "sglang"

    base_url: ServerUrl = "http://127.0.0.1:30000"
    """Where the SGLang server listens, with or without /v1."""

    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for one completion, and for SGLang to load new weights."""

    startup_timeout_s: float = Field(default=600.0, gt=0)
    """How long to wait for the SGLang server at the start."""

    allow_unseeded: bool = False
    """Accept seeds although SGLang ignores them without --enable-deterministic-inference."""

    allow_adjusted_logprobs: bool = False
    """Accept penalties, logit_bias and min_tokens although SGLang then gives log-probs of the adjusted logits."""
