"""Options of rewards: one table of [[orchestrator.env.rewards]] each, told apart by `type`."""

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from tandem.config.base import Config
from tandem.config.shared import root_url
from tandem.utils.imports import is_import_path

Unit = Literal["characters", "words"]
# For what is no name of ours, and is to be imported. It is told among the names, so it is such a path itself.
OWN = "./file.py:name"


def is_pattern(value: str | None) -> str | None:
    """The value, if it is a regular expression or None. Raises ValueError."""
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


class RewardConfig(Config):
    """What every reward has."""

    weight: float = 1.0
    """Factor of this reward in the sum."""

    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Name in metrics and samples. Left out: its type."""

    timeout_s: float = Field(default=30.0, gt=0)
    """How long it may take for one completion. Past that, the rollout has failed."""

    @property
    def kind(self) -> str:
        return dict(self)["type"]

    @property
    def label(self) -> str:
        return self.name or self.kind.rpartition(":")[2]

    @property
    def options(self) -> dict[str, Any]:
        """Those of this type alone."""
        return {name: value for name, value in self if name not in COMMON}


COMMON = ("type", "weight", "name", "timeout_s")
# Types whose rewards are from 0 to 1, before the weight.
FROM_0_TO_1 = (
    *("exact_match", "normalized_match", "numeric", "math", "positional_match", "lcs", "length", "regex", "xml"),
    *("json_schema", "code"),
)


class Extracting(RewardConfig):
    """A reward that compares what it finds in the completion."""

    extract: str | None = None
    """Regular expression: its last match in the completion, or the first group of it, is compared, not all of it."""

    _checked = field_validator("extract")(is_pattern)


class ExactMatchConfig(Extracting):
    """1 where completion and answer are the same but for surrounding white space."""

    type: Literal["exact_match"]


class NormalizedMatchConfig(Extracting):
    """1 where they are the same but for case, punctuation, articles and white space."""

    type: Literal["normalized_match"]


class NumericConfig(Extracting):
    """1 where the last number of the completion is the last number of the answer, within a tolerance."""

    type: Literal["numeric"]

    tolerance: float = Field(default=1e-6, ge=0)
    """Largest difference."""

    relative: float = Field(default=0.0, ge=0)
    """Largest difference as a share of the answer; the larger of the two bounds counts."""


class MathConfig(RewardConfig):
    """1 where the expression in the completion equals the answer, by math-verify (extra: rewards)."""

    type: Literal["math"]


class PositionalMatchConfig(RewardConfig):
    """Share of positions at which completion and answer agree."""

    type: Literal["positional_match"]


class LcsConfig(RewardConfig):
    """Longest common subsequence of completion and answer: twice its length over the sum of theirs."""

    type: Literal["lcs"]

    unit: Unit = "characters"
    """What the sequences are made of."""


class LengthConfig(RewardConfig):
    """1 for completions from `least` to `most` long, falling to 0 over `slack` beyond that."""

    type: Literal["length"]

    least: int = Field(default=0, ge=0)
    """Shortest length with the full reward."""

    most: int | None = Field(default=None, ge=0)
    """Longest length with the full reward. Left out: any."""

    slack: int = Field(default=0, ge=0)
    """Over how much more or less the reward falls to 0."""

    unit: Unit = "words"
    """What is counted."""

    @model_validator(mode="after")
    def _has_a_range(self) -> "LengthConfig":
        if self.most is not None and self.least > self.most:
            raise ValueError(f"least = {self.least} is above most = {self.most}")
        if self.least == 0 and self.most is None:
            raise ValueError("length: every completion would get 1; give least or most")
        return self


class RegexConfig(RewardConfig):
    """1 where a regular expression is found in the completion."""

    type: Literal["regex"]

    pattern: str
    """The regular expression. A dot matches line breaks, too."""

    whole: bool = False
    """It has to match the whole completion."""

    _checked = field_validator("pattern")(is_pattern)


class XmlConfig(RewardConfig):
    """1 where the completion consists of XML elements in the given order."""

    type: Literal["xml"]

    tags: list[str] = Field(min_length=1)
    """Names of the elements: each once, not empty, nothing besides."""


class JsonSchemaConfig(RewardConfig):
    """1 where the completion, or its last fenced block, is JSON that fits a schema (extra: rewards)."""

    type: Literal["json_schema"]

    json_schema: dict[str, Any] | str
    """The schema, or a JSON file that holds it."""


class CodeConfig(RewardConfig):
    """1 where the program in the completion passes the tests in the task's answer, in the sandbox."""

    type: Literal["code"]

    timeout_s: float = Field(default=10.0, gt=0)
    """How long the program may run for one test."""

    partial: bool = False
    """Give the share of the tests that pass. Left out: all of them have to."""

    memory_mb: int = Field(default=512, ge=64)
    """Address space of the program, in MiB."""

    allow_unprotected: bool = False
    """Run programs even if the kernel cannot confine them: they then have all your rights."""


class ServerOptions(RewardConfig):
    """A reward that servers give."""

    base_url: list[str] = Field(min_length=1)
    """Addresses of the servers, one or several. The one with the fewest requests under way is asked."""

    api_key_var: str | None = None
    """Environment variable that holds the API key."""

    retries: int = Field(default=3, ge=0)
    """How often to ask again, another server if there is one."""

    @field_validator("base_url", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("base_url")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        for url in value:
            root_url(url)
        return value


class JudgeConfig(ServerOptions):
    """A language model behind any OpenAI-compatible endpoint gives the score."""

    type: Literal["judge"]

    model: str
    """Name of the model."""

    template: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to grade:\n{completion}\n\n"
        "How good is the answer to grade, from 0 (useless) to 10 (perfect)? Think briefly, then end with 'Score: N'."
    )
    """What the judge is asked. {prompt}, {completion} and {answer} are filled in."""

    score_pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression for the score in what the judge says: the first group of its last match."""

    lowest: float = 0.0
    """Score that gives reward 0."""

    highest: float = 10.0
    """Score that gives reward 1. A score beyond the two is an error."""

    max_tokens: int = Field(default=512, ge=1)
    """Longest answer of the judge."""

    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature of the judge."""

    cache_size: int = Field(default=10_000, ge=0)
    """Scores to remember, of questions that were asked before. 0: none."""

    input_price: float = Field(default=0.0, ge=0)
    """Price of a million prompt tokens, for the cost in the log."""

    output_price: float = Field(default=0.0, ge=0)
    """Price of a million completion tokens."""

    _checked = field_validator("score_pattern")(is_pattern)

    @model_validator(mode="after")
    def _makes_sense(self) -> "JudgeConfig":
        if "{completion}" not in self.template:
            raise ValueError("template has no {completion}: the judge would not see what it grades")
        if not re.compile(self.score_pattern).groups:
            raise ValueError(f"score_pattern = {self.score_pattern!r} has no group; put the number in parentheses")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest = {self.lowest:g} is not below highest = {self.highest:g}")
        return self


class RewardModelConfig(ServerOptions):
    """A reward model that `align` trained, behind `reward-server`, scores the conversation."""

    type: Literal["reward_model"]


class RemoteConfig(ServerOptions):
    """A server of your own: POST {"messages", "completion", "answer"} to it, and it answers {"score": number}."""

    type: Literal["remote"]


class GoalServerOptions(ServerOptions):
    """A reward from the goal-space server (`reward-server`)."""

    chunk_size: int = Field(default=64, ge=1)
    """Most texts in one request. Texts that wait at the same time are sent together."""

    cache_size: int = Field(default=10_000, ge=0)
    """Texts whose place in goal space is remembered. 0: none."""


class GoalRewardConfig(GoalServerOptions):
    """One goal of a goal-space server is the reward, from 0 to 1."""

    type: Literal["goal"]

    goal: str
    """Name of the goal, as the server has it."""


class SteeringConfig(GoalServerOptions):
    """How close the completion comes to a target in goal space: the reward is 0 there, and negative elsewhere."""

    type: Literal["steering"]

    goals: list[str] = Field(min_length=1)
    """Goals that span the space. Those without a target are to stay as they are in the text to start from."""

    targets: dict[str, float | tuple[float, float]] = {}
    """Where to go, from 0 to 1 for each goal, or a range to draw from for each prompt. A task's info["target"] comes
    first. The text to start from is the task's info["source"], or else its prompt."""

    goal_weights: dict[str, float] = {}
    """How much each goal counts in lengths. Left out: 1."""

    threshold: float = Field(default=0.0, ge=0)
    """Differences from the target that are no larger than this count as none."""

    distance: float = Field(default=1.0, ge=0)
    """Weight of the distance from the target."""

    side_effects: float = Field(default=0.0, ge=0)
    """Weight of movement across the way to the target."""

    miscalibration: float = Field(default=0.0, ge=0)
    """Weight of going too far, or not far enough, along that way."""

    seed: int = 0
    """Seed of targets that are drawn."""

    @model_validator(mode="after")
    def _names_goals(self) -> "SteeringConfig":
        for key, named in (("targets", self.targets), ("goal_weights", self.goal_weights)):
            for goal in named:
                if goal not in self.goals:
                    raise ValueError(f"{key} has {goal!r}, which is not among goals = {self.goals}")
        for goal, weight in self.goal_weights.items():
            if not weight > 0:
                raise ValueError(f"goal_weights.{goal} = {weight:g} is not above 0; leave it out of goals instead")
        for goal, target in self.targets.items():
            ends = target if isinstance(target, tuple) else (target, target)
            if not 0 <= ends[0] <= ends[1] <= 1:
                raise ValueError(f"targets.{goal} = {target} is not between 0 and 1, or its ends are reversed")
        if not self.distance + self.side_effects + self.miscalibration > 0:
            raise ValueError("distance, side_effects and miscalibration are all 0: every completion would get 0")
        return self


class CustomConfig(RewardConfig):
    """A function or a class of your own."""

    type: str
    """"package.module:name" or "./file.py:name": a function of completion and answer, sync or async; or a class whose
    instances have `score(prompt, response)`."""

    args: dict[str, Any] = {}
    """Keyword arguments of the function, or of the class."""


def _tag_of(value: Any) -> str:
    kind = value.get("type", "") if isinstance(value, dict) else getattr(value, "type", "")
    return OWN if isinstance(kind, str) and is_import_path(kind) else str(kind)


AnyReward = Annotated[
    Annotated[ExactMatchConfig, Tag("exact_match")]
    | Annotated[NormalizedMatchConfig, Tag("normalized_match")]
    | Annotated[PositionalMatchConfig, Tag("positional_match")]
    | Annotated[NumericConfig, Tag("numeric")]
    | Annotated[MathConfig, Tag("math")]
    | Annotated[LcsConfig, Tag("lcs")]
    | Annotated[LengthConfig, Tag("length")]
    | Annotated[RegexConfig, Tag("regex")]
    | Annotated[XmlConfig, Tag("xml")]
    | Annotated[JsonSchemaConfig, Tag("json_schema")]
    | Annotated[CodeConfig, Tag("code")]
    | Annotated[JudgeConfig, Tag("judge")]
    | Annotated[RewardModelConfig, Tag("reward_model")]
    | Annotated[RemoteConfig, Tag("remote")]
    | Annotated[GoalRewardConfig, Tag("goal")]
    | Annotated[SteeringConfig, Tag("steering")]
    | Annotated[CustomConfig, Tag(OWN)],
    Discriminator(_tag_of),
]
