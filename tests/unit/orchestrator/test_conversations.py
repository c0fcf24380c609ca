"""Episodes to rollouts: every sampled token is kept, none is made twice, and the trainer sees ordinary sequences."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.templates import THINKING_WITH_TOOLS

from tandem.algorithms.advantages import AdvantageConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.mixture import Mixture
from tandem.envs.model import ChatRefused, ContextFull
from tandem.envs.process import HeldTask, is_played
from tandem.envs.protocol import ModelProxy
from tandem.envs.results import Result
from tandem.orchestrator.advantages import make_batch_advantages
from tandem.orchestrator.batches import batch_metrics, make_batch, make_samples
from tandem.orchestrator.conversations import ChatFormat, Conversation, Episodes, earned_before, open_episodes
from tandem.orchestrator.failures import Attempt, TaskFailed
from tandem.orchestrator.rollouts import RolloutMaker
from tandem.orchestrator.tasks import request_seed
from tandem.types.rollout import Completion, Group, Message, Rollout, SamplingRequest, Task

SAMPLING = SamplingRequest(n=1, max_tokens=40, temperature=1.0, seed=5)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QUESTION: Message = {"role": "user", "content": "q"}
TASK = HeldTask(3, [QUESTION], "", is_interactive=True)


class Says:
    """Completes prompts by what it is told to say, in turn; versions count up."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.prompts: list[list[int]] = []
        self.requests: list[SamplingRequest] = []

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        self.prompts.append(list(prompt_ids))
        self.requests.append(sampling)
        tokens = self.tokenizer.encode(self.texts[len(self.prompts) - 1] + "<|im_end|>")
        version = len(self.prompts)
        stop = "." if "." in self.texts[version - 1] else None
        return [Completion(tokens, [-version / 10] * len(tokens), [version] * len(tokens), "stop", stop)] * sampling.n


@pytest.fixture
def tokenizer(tiny_model: Path, tmp_path: Path) -> Tokenizer:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tags = "{# <tool_call> #}"  # how calls are written is told by the template's text
    (folder / "chat_template.jinja").write_text(tags + THINKING_WITH_TOOLS)
    return Tokenizer(folder)


def open_conversation(tokenizer: Tokenizer, *texts: str, seq_len: int = 512) -> tuple[Conversation, Says]:
    policy = Says(tokenizer, *texts)
    return Conversation(policy, ChatFormat(tokenizer, seq_len), SAMPLING), policy


def test_turns_with_a_tool_are_one_sequence_with_loss_on_what_was_sampled(tokenizer: Tokenizer) -> None:
    conversation, policy = open_conversation(tokenizer, CALL, "it is 2")

    async def run() -> None:
        reply = await conversation.chat([QUESTION], TOOLS, None)
        message = reply["message"]
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"a": 1}} and message["content"] == ""
        result = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
        await conversation.chat([QUESTION, message, result], TOOLS, 7)

    asyncio.run(run())
    rollout = conversation.rollout(Result({"right": 1.0, "short": 0.25}, {"calls": 1.0}, "answer"), 1)
    assert (rollout.reward, rollout.text, rollout.ended) == (1.25, "it is 2", "answer")
    assert (rollout.rewards, rollout.metrics) == ({"right": 1.0, "short": 0.25}, {"calls": 1.0})
    assert [message["role"] for message in rollout.messages] == ["assistant", "tool", "assistant"]
    assert policy.prompts[1][: len(policy.prompts[0])] == policy.prompts[0]

    [sample] = make_samples(rollout, reward=1.25, advantage=-2.0)
    first, second = (turn.completion for turn in rollout.turns)
    assert sample.token_ids == policy.prompts[1] + second.token_ids
    learned = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert learned == first.token_ids + second.token_ids
    logprobs = [value for value, mask in zip(sample.streams["logprobs"], sample.loss_mask, strict=True) if mask]
    assert logprobs == [-0.1] * len(first.token_ids) + [-0.2] * len(second.token_ids)
    assert {value for value, mask in zip(sample.streams["advantages"], sample.loss_mask, strict=True) if mask} == {-2.0}
    assert rollout.oldest_version == 1 and rollout.num_sampled == len(learned)
    assert [request.max_tokens for request in policy.requests] == [40, 7]
    assert [request.seed for request in policy.requests] == [request_seed(5, "turn", 0), request_seed(5, "turn", 1)]


def test_where_the_template_drops_reasoning_another_sequence_begins(tokenizer: Tokenizer) -> None:
    """Both sequences are as the model has seen them, and share the advantage."""
    conversation, policy = open_conversation(tokenizer, "<think>\nhm\n</think>\n\nyes", "no")
    second: list[Message] = [QUESTION]

    async def run() -> None:
        nonlocal second
        reply = await conversation.chat(second, None, None)
        # As reasoning parsers give it: apart from what is said.
        second += [reply["message"], {"role": "user", "content": "r"}]
        told: Any = [dict(message) for message in second]
        told[1] = {"role": "assistant", "content": "yes"}
        await conversation.chat(told, None, None)

    asyncio.run(run())
    rollout = conversation.rollout(Result(1.0), 1)
    samples = make_samples(rollout, reward=1.0, advantage=0.5)
    assert [sample.token_ids for sample in samples] == [
        prompt + turn.completion.token_ids for prompt, turn in zip(policy.prompts, rollout.turns, strict=True)
    ]
    group = Group(Task(0, [QUESTION], ""), 0, [rollout])
    packed = make_batch([group], [[1.0]], [[0.5]], step=1, temperature=1.0).packed
    assert packed.num_sequences == 2 and set(packed.streams["advantages"].tolist()) == {0.5}
    metrics = batch_metrics([group], step=1)
    assert (metrics["turns/mean"], metrics["sequences/mean"], metrics["ended/done"]) == (2, 2, 1.0)


def test_two_conversations_side_by_side_are_two_sequences(tokenizer: Tokenizer) -> None:
    conversation, _ = open_conversation(tokenizer, "a", "b", "c")
    other: Message = {"role": "user", "content": "another"}

    async def run() -> None:
        one = (await conversation.chat([QUESTION], None, None))["message"]
        await conversation.chat([other], None, None)
        await conversation.chat([QUESTION, one, other], None, None)

    asyncio.run(run())
    rollout = conversation.rollout(Result(0.0), 1)
    assert [len(turns) for turns in rollout.sequences] == [2, 1] and rollout.rewards == {}
    assert [message["content"] for message in rollout.messages] == ["b"], "of the sequence that began last"


def test_of_two_conversations_that_are_the_same_the_later_one_goes_on(tokenizer: Tokenizer) -> None:
    conversation, _ = open_conversation(tokenizer, "a", "a", "c")

    async def run() -> None:
        await conversation.chat([QUESTION], None, None)
        said = (await conversation.chat([QUESTION], None, None))["message"]
        await conversation.chat([QUESTION, said, QUESTION], None, None)

    asyncio.run(run())
    assert [len(turns) for turns in conversation.rollout(Result(0.0), 1).sequences] == [1, 2]


def test_an_episode_that_begins_anew_forgets_what_was_said(tokenizer: Tokenizer) -> None:
    conversation, policy = open_conversation(tokenizer, "a", "b")
    assert conversation.text == ""
    asyncio.run(conversation.chat([QUESTION], None, None))
    conversation.restart()
    assert conversation.text == ""
    asyncio.run(conversation.chat([QUESTION], None, None))
    assert [request.seed for request in policy.requests] == [request_seed(5, "turn", 0)] * 2
    assert [turn.completion.versions[0] for turn in conversation.rollout(Result(0.0), 1).turns] == [2]


def test_a_turn_ends_before_the_text_that_stopped_it(tokenizer: Tokenizer) -> None:
    conversation, _ = open_conversation(tokenizer, "yes. no")
    reply = asyncio.run(conversation.chat([QUESTION], None, None))
    assert reply == {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}


def test_what_is_said_beside_calls_and_without_any(tokenizer: Tokenizer) -> None:
    conversation, _ = open_conversation(tokenizer, f" let me see\n{CALL}{CALL}", "no call")
    first = asyncio.run(conversation.chat([QUESTION], TOOLS, None))["message"]
    assert first["content"] == "let me see"
    assert [call["id"] for call in first["tool_calls"]] == ["0000call0", "0000call1"]
    second = asyncio.run(conversation.chat([QUESTION], TOOLS, None))["message"]
    assert second == {"role": "assistant", "content": "no call"}


@pytest.mark.parametrize(("more", "longest"), [(1, 1), (2, 2), (100, 40)])
def test_a_turn_may_have_as_many_tokens_as_there_is_room_for(tokenizer: Tokenizer, more: int, longest: int) -> None:
    conversation, policy = open_conversation(tokenizer, "a")
    asyncio.run(conversation.chat([QUESTION], None, None))
    num_prompt = len(policy.prompts[0])
    conversation, policy = open_conversation(tokenizer, "a", seq_len=num_prompt + more)
    asyncio.run(conversation.chat([QUESTION], None, None))
    assert policy.requests[0].max_tokens == longest
    conversation, _ = open_conversation(tokenizer, "a", seq_len=num_prompt)
    with pytest.raises(ContextFull):
        asyncio.run(conversation.chat([QUESTION], None, None))


def test_calls_that_cannot_be_read_are_text(tokenizer: Tokenizer) -> None:
    for text in ("<tool_call>{</tool_call>", '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'):
        conversation, _ = open_conversation(tokenizer, text)
        reply = asyncio.run(conversation.chat([QUESTION], TOOLS, None))
        assert reply["message"] == {"role": "assistant", "content": text}


def test_a_conversation_that_is_too_long_or_refused(tokenizer: Tokenizer, tiny_model: Path) -> None:
    conversation, policy = open_conversation(tokenizer, "a", seq_len=4)
    with pytest.raises(ContextFull, match="leaves no room in seq_len = 4"):
        asyncio.run(conversation.chat([QUESTION], None, None))
    conversation, policy = open_conversation(tokenizer, "a", seq_len=len(tokenizer.encode("q")) + 12)
    asyncio.run(conversation.chat([QUESTION], None, None))
    assert 0 < policy.requests[0].max_tokens < 40, "no more than fits"
    with pytest.raises(ChatRefused, match="needs 'role' as text"):
        asyncio.run(conversation.chat([{"content": "x"}], None, None))
    with pytest.raises(ChatRefused, match=r"message 0 of 'messages' is not valid Unicode: .* surrogates not allowed"):
        asyncio.run(conversation.chat([{"role": "user", "content": "\ud83d"}], None, None))
    conversation, _ = open_conversation(Tokenizer(tiny_model), "a")
    with pytest.raises(ChatRefused, match=r"tools cannot be used with this model: .* has no tools"):
        asyncio.run(conversation.chat([QUESTION], TOOLS, None))
    with pytest.raises(ValueError, match="before the model had a turn"):
        conversation.rollout(Result(1.0), 1)


class MultiTurnEnv:
    """An environment whose episode is one turn; it fails where the model says so."""

    train_tasks = eval_tasks = (TASK,)

    async def score(self, task: Task, completion: str) -> float:
        assert not is_played(task)
        return 0.5

    async def play(self, task: Task, model: ModelProxy) -> Result:
        model.restart()
        reply = await model.chat([QUESTION], None, None)
        if reply["message"]["content"] == "fail":
            raise LookupError("as told")
        return Result(float(len(reply["message"]["content"])))


def make_group(
    policy: Says, tokenizer: Tokenizer, tries: int = 2, task: Task = TASK
) -> tuple[Group | None, list[Attempt]]:
    attempts: list[Attempt] = []
    environment = MultiTurnEnv()
    maker = RolloutMaker(
        policy,
        environment,
        tokenizer,
        tries=tries,
        record=attempts.append,
        delays_s=(0.0,),
        episodes=Episodes(environment, tokenizer, 512),
    )
    sampling = SamplingRequest(n=3, max_tokens=40, temperature=1.0, seed=5)
    try:
        return asyncio.run(maker.make_group(task, [1], 0, sampling)), attempts
    except TaskFailed:
        return None, attempts


def test_a_group_of_episodes(tokenizer: Tokenizer) -> None:
    policy = Says(tokenizer, "a", "bb", "ccc")
    group, attempts = make_group(policy, tokenizer)
    assert group is not None and group.rewards == [1.0, 2.0, 3.0]
    assert 0 < group.generate_s < 60 and group.score_s == 0
    seeds = [request_seed(request_seed(5, "rollout", number), "turn", 0) for number in range(3)]
    assert [(request.seed, request.n, request.session) for request in policy.requests] == [
        (seed, 1, 5) for seed in seeds
    ]
    assert all(isinstance(rollout, Rollout) and rollout.ended == "done" for rollout in group.rollouts)
    assert attempts[0].failed == []


def test_an_episode_that_fails_is_played_again_and_counted(tokenizer: Tokenizer) -> None:
    group, attempts = make_group(Says(tokenizer, "a", "fail", "ccc", "dddd"), tokenizer)
    assert group is not None and group.rewards == [1.0, 3.0, 4.0]
    (failed,) = attempts[0].failed
    assert (failed.completion, failed.failure.reason) == ("fail", "LookupError: as told")
    group, _ = make_group(Says(tokenizer, "fail", "fail", "fail"), tokenizer, tries=1)
    assert group is None


def test_a_task_that_is_not_played_is_scored_where_others_are_played(tokenizer: Tokenizer) -> None:
    group, _ = make_group(Says(tokenizer, "a"), tokenizer, task=HeldTask(3, [QUESTION], ""))
    assert group is not None and group.rewards == [0.5] * 3


def test_environments_in_processes_can_have_conversations(tokenizer: Tokenizer) -> None:
    assert open_episodes(MultiTurnEnv(), tokenizer, 64) is None
    mixture = Mixture({})
    episodes = open_episodes(mixture, tokenizer, 64)
    assert episodes is not None and episodes.environment is mixture
    assert (episodes.format.tokenizer, episodes.format.seq_len) == (tokenizer, 64)


class TwoTurns:
    """An environment: the first turn earns 1 if it is "yes", the whole episode 2 if the last one is."""

    async def play(self, task: Task, model: ModelProxy) -> Result:
        first = (await model.chat([QUESTION], None, None))["message"]
        messages = [QUESTION, first, {"role": "user", "content": "sure?"}]
        second = (await model.chat(messages, None, None))["message"]
        return Result(2.0 * (second["content"] == "yes"), turn_rewards=[float(first["content"] == "yes"), 0.0])


def test_each_turn_of_two_is_credited_with_what_it_earned(tokenizer: Tokenizer) -> None:
    """Returns of the first turn: 1, 2, 3; of the second: 0, 2, 2."""

    async def play(*texts: str) -> Rollout:
        conversation, _ = open_conversation(tokenizer, *texts)
        return conversation.rollout(await TwoTurns().play(TASK, conversation), 1)

    async def run() -> list[Rollout]:
        return [await play("yes", "no"), await play("no", "yes"), await play("yes", "yes")]

    group = Group(TASK, 0, asyncio.run(run()))
    assert group.rewards == [1.0, 2.0, 3.0]
    assert [rollout.earned for rollout in group.rollouts] == [[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    advantages = make_batch_advantages(AdvantageConfig(type="per_turn"))([group], [group.rewards])
    unit, most = 1.5**0.5, 2**0.5
    expected = [[-unit, -most], [0, 1 / most], [unit, 1 / most]]
    for own, by_hand in zip(advantages[0], expected, strict=True):
        assert own == pytest.approx(by_hand, abs=1e-5)

    for rollout, own in zip(group.rollouts, advantages[0], strict=True):
        assert isinstance(own, list)
        [sample] = make_samples(rollout, rollout.reward, own)
        learned = [a for a, mask in zip(sample.streams["advantages"], sample.loss_mask, strict=True) if mask]
        first, second = (len(turn.completion.token_ids) for turn in rollout.turns)
        assert learned == [own[0]] * first + [own[1]] * second
        assert not any(a for a, mask in zip(sample.streams["advantages"], sample.loss_mask, strict=True) if not mask)


def test_rewards_of_turns_that_were_not_taken_are_an_error(tokenizer: Tokenizer) -> None:
    conversation, _ = open_conversation(tokenizer, "yes")
    asyncio.run(conversation.chat([QUESTION], None, None))
    with pytest.raises(ValueError, match="turn_rewards has 2 numbers; the model had 1 turns"):
        conversation.rollout(Result(1.0, turn_rewards=[1.0, 0.0]), 1)


def test_credit_goes_by_time_where_two_conversations_take_turns() -> None:
    """Turns 0 and 2 belong to one training sequence, 1 and 3 to another."""
    assert earned_before([1.0, 2.0, 4.0, 8.0], [0, 2, 1, 3]) == [0.0, 3.0, 1.0, 7.0]
    assert earned_before([1.0, 2.0], [0, 5]) == [0.0, 1.0], "turns between them failed"
    assert earned_before([], [0, 1]) == []
