"""One episode, as the orchestrator sees it: the environment asks for turns, and every token that is sampled is kept.

The environment knows messages only. Their tokens are made here, once: a turn's prompt is the last turn's tokens and the
new messages (data/dialogue.py). Where that cannot be, because the template rewrites history or the environment has
changed it, another training sequence begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.data.dialogue import Dialogue
from tandem.data.messages import parse_json, read_messages
from tandem.data.tokenizer import Tokenizer
from tandem.data.tool_calls import CallFormat, FoundCall, choose_format, read_text
from tandem.envs.mixture import Mixture
from tandem.envs.model import ChatRefused, ContextFull
from tandem.envs.process import EnvironmentProcess, is_played
from tandem.envs.protocol import Environment, MultiTurnEnv
from tandem.envs.results import Result
from tandem.isolation.failures import failure_of
from tandem.orchestrator.failures import RolloutFailure
from tandem.orchestrator.protocols import Generator
from tandem.orchestrator.tasks import request_seed
from tandem.types.rollout import Completion, Message, Rollout, SamplingRequest, Task, Turn
from tandem.utils.errors import UserError


@dataclass
class Thread:
    """A sequence to train on."""

    dialogue: Dialogue
    turns: list[Turn] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the turns, in the order they were asked for


class ChatFormat:
    """What conversations need of a model: its tokenizer, how it writes tool calls, and how long they may get."""

    def __init__(self, tokenizer: Tokenizer, seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self._call_format = choose_format(tokenizer)

    def calls(self, tools: Sequence[dict[str, Any]] | None) -> CallFormat | None:
        if not tools:
            return None
        if isinstance(self._call_format, str):
            raise ChatRefused(f"tools cannot be used with this model: {self._call_format}")
        return self._call_format


class Conversation:
    """`sampling` is how a turn is drawn, whatever its `n`; its seed is that of the rollout."""

    def __init__(self, policy: Generator, chat_format: ChatFormat, sampling: SamplingRequest) -> None:
        self.policy = policy
        self.format = chat_format
        self.sampling = sampling
        self.restart()

    def restart(self) -> None:
        self._threads: list[Thread] = []
        self._num_turns = 0
        self.text = ""

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        thread = self._thread(messages, tools)
        dialogue, number = thread.dialogue, self._num_turns
        self._num_turns += 1
        completion = await self._generate(dialogue, max_tokens, request_seed(self.sampling.seed, "turn", number))
        message = self._message(completion, dialogue.calls, number)
        thread.turns.append(Turn(dialogue.new_ids, completion, begins_sequence=not thread.turns))
        thread.numbers.append(number)
        dialogue.add_reply(message, completion.token_ids)
        self.text = message["content"]
        return {"message": message, "finish_reason": completion.finish_reason}

    def rollout(self, result: Result, num_task_messages: int) -> Rollout:
        threads = [thread for thread in self._threads if thread.turns]
        if not threads:
            raise ValueError("the episode ended before the model had a turn")
        first, *later = [turn for thread in threads for turn in thread.turns]
        return Rollout(
            first.context_ids,
            first.completion,
            self.text,
            result.total,
            later=later,
            earned_before=earned_before(result.turn_rewards, [n for thread in threads for n in thread.numbers]),
            rewards=result.rewards if isinstance(result.rewards, dict) else {},
            metrics=result.metrics,
            ended=result.ended,
            messages=threads[-1].dialogue.messages[num_task_messages:],
        )

    def _thread(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> Thread:
        """The sequence that these messages continue, or a new one."""
        try:
            messages = read_messages(messages, "messages")
            _refuse_half_characters(messages)
            for thread in reversed(self._threads):
                if thread.dialogue.extend(messages, tools):
                    return thread
            thread = Thread(Dialogue(self.format.tokenizer, messages, tools, self.format.calls(tools)))
        except (UserError, ValueError) as error:
            raise ChatRefused(str(error)) from error
        self._threads.append(thread)
        return thread

    async def _generate(self, dialogue: Dialogue, max_tokens: int | None, seed: int) -> Completion:
        room = self.format.seq_len - len(dialogue.token_ids)
        if room < 1:
            raise ContextFull(
                f"the conversation has {len(dialogue.token_ids)} tokens, which leaves no room in seq_len = "
                f"{self.format.seq_len}"
            )
        longest = min(max_tokens or self.sampling.max_tokens, self.sampling.max_tokens, room)
        sampling = replace(self.sampling, n=1, max_tokens=longest, seed=seed)
        (completion,) = await self.policy.generate(dialogue.token_ids, sampling)
        return completion

    def _message(self, completion: Completion, calls: CallFormat | None, turn: int) -> Message:
        """What the model wrote, as a message. A call whose arguments cannot be read is text like any other."""
        text = self.format.tokenizer.decode(completion.token_ids)
        if completion.stop is not None:
            text = text.partition(completion.stop)[0]
        if calls is None:
            return {"role": "assistant", "content": text}
        content, found = read_text(calls, text)
        tool_calls = [_tool_call(call, f"{turn:04d}call{place}") for place, call in enumerate(found)]
        if not tool_calls or None in tool_calls:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": content.strip(), "tool_calls": tool_calls}


def earned_before(turn_rewards: Sequence[float], numbers: Sequence[int]) -> list[float]:
    """What had been earned when each turn began; `numbers` are theirs in time. Nothing where turns earn nothing."""
    if not turn_rewards:
        return []
    if len(turn_rewards) != len(numbers):
        raise ValueError(f"turn_rewards has {len(turn_rewards)} numbers; the model had {len(numbers)} turns")
    in_time = sorted(numbers)
    return [sum(turn_rewards[: in_time.index(number)]) for number in numbers]


class Episodes:
    """Plays the episodes of an environment."""

    def __init__(self, environment: MultiTurnEnv, tokenizer: Tokenizer, seq_len: int) -> None:
        self.environment = environment
        self.format = ChatFormat(tokenizer, seq_len)

    def plays(self, task: Task) -> bool:
        """Or whether its completions are scored."""
        return is_played(task)

    async def play(self, task: Task, policy: Generator, sampling: SamplingRequest) -> Rollout | RolloutFailure:
        conversation = Conversation(policy, self.format, sampling)
        try:
            result = await self.environment.play(task, conversation)
            return conversation.rollout(result, len(task.messages))
        except Exception as error:  # whatever users' code raises, it costs this rollout and nothing else
            return RolloutFailure(conversation.text, failure_of(error))


def open_episodes(environment: Environment, tokenizer: Tokenizer, seq_len: int) -> Episodes | None:
    """None for an environment that cannot have conversations."""
    if not isinstance(environment, EnvironmentProcess | Mixture):
        return None
    return Episodes(environment, tokenizer, seq_len)


def _refuse_half_characters(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"message {index} of 'messages' is not valid Unicode: {error}; such text can be made valid with "
                ".encode(errors='replace').decode()"
            ) from error


def _tool_call(call: FoundCall, call_id: str) -> dict[str, Any] | None:
    """None where the arguments are no table. Ids count up, so that a run can be repeated: some templates show them."""
    try:
        arguments = parse_json(call.arguments, "arguments")
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
