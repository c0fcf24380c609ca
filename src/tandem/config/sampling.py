"""Options of how completions are drawn, in training and in evaluation."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from tandem.config.base import Config


class TruncationConfig(Config):
    """Truncated sampling: only likely tokens are drawn."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability. 1: from all."""

    top_k: int = Field(default=0, ge=0)
    """Sample from this many of the likeliest tokens. 0: from all."""

    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample from tokens with at least this probability, relative to the likeliest. 0: from all."""

    @property
    def truncation(self) -> dict[str, float]:
        """Those that cut something off."""
        given = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        return {name: value for name, value in given.items() if value != TruncationConfig.model_fields[name].default}


class SamplingConfig(TruncationConfig):
    """Sampling of rollouts. With top_p, top_k or min_p, the truncated policy is trained: see docs/algorithms.md."""

    temperature: float = Field(default=1.0, ge=1e-5)
    """Softmax temperature, in the engine and in the trainer. Servers treat anything below 1e-5 as greedy."""

    max_tokens: int = Field(default=128, ge=1)
    """Longest completion, in tokens."""

    stop: list[str] = Field(default=[], max_length=64)
    """Texts that end a completion, also in evaluation. They are learned; the reward function does not see them."""

    @field_validator("stop")
    @classmethod
    def _are_texts(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty text would end every completion at once; leave it out")
        return value


class SampleOptions(TruncationConfig):
    """How completions are drawn that are not learned from."""

    samples: int = Field(default=1, ge=1)
    """Completions of each prompt. With k of them the reward is avg@k, and pass@1 … pass@k are told too."""

    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature of evaluation. 0: greedy."""

    @model_validator(mode="after")
    def _draws_at_random(self) -> Self:
        if self.truncation and self.temperature == 0:
            (name, value), *_ = self.truncation.items()
            raise ValueError(f"{name} = {value:g} has no effect with temperature = 0 (greedy); give a temperature")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} are all the same with temperature = 0 (greedy); give a temperature"
            )
        return self


class EvalConfig(SampleOptions):
    """Evaluation on held-out prompts; always before the first step and after the last."""

    every: int | None = Field(default=None, ge=1)
    """Also evaluate every so many steps."""

    num_prompts: int = Field(default=64, ge=1)
    """Held-out prompts per evaluation."""
