"""Which task comes when, seeds that depend on the task alone, and prompts that fit."""

from pathlib import Path
from typing import Any

import pytest

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.process import HeldTask
from tandem.envs.reverse_text import ReverseText, reverse_task
from tandem.orchestrator.tasks import TaskOrder, encode_prompts, request_seed
from tandem.types.rollout import Task
from tandem.utils.errors import UserError


def test_seeds_repeat_and_differ() -> None:
    seeds = [
        request_seed(seed, purpose, group_id)
        for seed in (0, 1)
        for purpose in ("train", "eval")
        for group_id in range(20)
    ]
    assert len(set(seeds)) == 80
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, "train", 0) == request_seed(0, "train", 0)


def test_a_seed_is_the_same_on_every_machine() -> None:
    """blake2b of "5/train/7", eight bytes, shifted right by one: written down so that old runs can be repeated."""
    assert request_seed(5, "train", 7) == 281572532098470925


def test_every_epoch_has_each_task_once_in_an_order_of_its_own() -> None:
    tasks = [Task(100 + index, [], "") for index in range(20)]
    group_id = TaskOrder(tasks, seed=3)
    epochs = [[group_id[20 * epoch + number].index for number in range(20)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100, 120))
    assert epochs[0] != epochs[1]
    assert epochs[0] == [TaskOrder(tasks, seed=3)[number].index for number in range(20)]
    assert epochs[0] != [TaskOrder(tasks, seed=4)[number].index for number in range(20)]
    assert group_id.place(7) == group_id[7].index - 100


def test_setting_tasks_aside_moves_no_other() -> None:
    tasks = [Task(index, [], "") for index in range(3)]
    whole, without = TaskOrder(tasks, seed=0), TaskOrder(tasks, seed=0, set_aside=[1, 2])
    assert [whole[group_id] for group_id in range(9)] == [without[group_id] for group_id in range(9)]
    assert not without.is_exhausted
    without.set_aside.add(0)
    assert without.is_exhausted


def config(seq_len: int, **options: Any) -> OrchestratorConfig:
    tree = {"model": {"name": "m"}, "seq_len": seq_len, "sampling": {"max_tokens": 10}} | options
    return OrchestratorConfig.model_validate(tree)


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_prompts_that_fit_are_accepted(tokenizer: Tokenizer) -> None:
    """A prompt of 8 letters: start, user, newline, 8 letters, end, newline, start, assistant, newline: 16 tokens."""
    environment = ReverseText(num_train=4, num_eval=2)
    prompts = encode_prompts(environment, tokenizer, config(seq_len=26))
    assert [len(prompt) for prompt in prompts.train] == [16] * 4 and len(prompts.held_out) == 2
    assert list(prompts.train[3]) == tokenizer.encode_chat(
        environment.train_tasks[3].messages, add_generation_prompt=True
    )


def test_a_prompt_that_does_not_fit_is_refused_with_the_length_that_does(tokenizer: Tokenizer) -> None:
    environment = ReverseText(num_train=4, num_eval=2)
    message = (
        r"seq_len = 25 is too short: the prompt of training task 2 has 16 tokens, plus sampling.max_tokens = 10; "
        r"the smallest seq_len that fits is 26"
    )
    with pytest.raises(UserError, match=message):
        encode_prompts(environment, tokenizer, config(seq_len=25))


def test_held_out_prompts_are_checked_too(tokenizer: Tokenizer) -> None:
    environment = ReverseText(num_train=4, num_eval=2)
    environment.eval_tasks = [reverse_task(0, "abcdefghijk")]
    with pytest.raises(UserError, match="the prompt of held-out task 0 has 19 tokens"):
        encode_prompts(environment, tokenizer, config(seq_len=26))


def test_an_episode_may_begin_without_a_prompt_and_with_tools_only_where_the_model_knows_them(
    tokenizer: Tokenizer,
) -> None:
    environment = ReverseText(num_train=4, num_eval=2)
    environment.train_tasks[0] = HeldTask(3, [], "", is_interactive=True)
    assert list(encode_prompts(environment, tokenizer, config(seq_len=64)).train[0]) == []
    environment.train_tasks[0] = Task(3, [], "")  # no episode: the model begins
    prompt = encode_prompts(environment, tokenizer, config(seq_len=64)).train[0]
    assert list(prompt) == tokenizer.encode_chat([], add_generation_prompt=True) != []
    messages = [{"role": "user", "content": "x"}]
    environment.train_tasks[0] = HeldTask(3, messages, "", is_interactive=True, tools=[{"type": "function"}])
    with pytest.raises(UserError, match=r"training task 3: it gives the model tools, .* template has no tools"):
        encode_prompts(environment, tokenizer, config(seq_len=64))


def test_an_environment_without_tasks_is_refused(tokenizer: Tokenizer) -> None:
    environment = ReverseText(num_train=4, num_eval=2)
    environment.eval_tasks = []
    with pytest.raises(UserError, match=r"env\.id = 'reverse-text' has no held-out tasks"):
        encode_prompts(environment, tokenizer, config(seq_len=64))


def test_messages_that_make_no_prompt_are_refused_with_their_task(tokenizer: Tokenizer) -> None:
    environment = ReverseText(num_train=4, num_eval=2)
    environment.train_tasks[1] = Task(17, [{"role": "user"}], "")
    with pytest.raises(UserError, match="training task 17: the chat template refuses these messages"):
        encode_prompts(environment, tokenizer, config(seq_len=64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": {"min_tokens": 11}}, r"^filters\.min_tokens = 11 is more than sampling\.max_tokens = 10, "),
        (
            {"filters": {"min_reward": 1.5}, "env": {"reward": "numeric"}},
            r"^filters\.min_reward = 1\.5 with env\.reward = 'numeric', which is from 0 to 1, so nothing would be left",
        ),
        ({"filters": {"max_reward": -0.5}, "env": {"reward": "lcs"}}, r"^filters\.max_reward = -0\.5 with env\.reward"),
        (
            {"filters": {"min_reward": 2}, "env": {"rewards": [{"type": "lcs"}, {"type": "numeric", "weight": 0.5}]}},
            r"^filters\.min_reward = 2 with the sum of env\.rewards, which is from 0 to 1\.5, so nothing would be left",
        ),
    ],
)
def test_filters_that_no_task_can_pass_are_refused(tokenizer: Tokenizer, options: dict, message: str) -> None:
    environment = ReverseText(num_train=4, num_eval=2)
    with pytest.raises(UserError, match=message):
        encode_prompts(environment, tokenizer, config(seq_len=64, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"filters": {"min_tokens": 10, "max_reward": -0.5}},
        {"filters": {"min_reward": 1.0, "max_reward": 1.0}, "env": {"reward": "numeric"}},
        {"filters": {"min_reward": 1.5}, "env": {"reward": "./mine.py:reward"}},
        {"filters": {"max_reward": -0.5}, "env": {"rewards": [{"type": "numeric", "weight": -1.0}]}},
    ],
)
def test_filters_that_a_task_might_pass_are_taken(tokenizer: Tokenizer, options: dict) -> None:
    """The environment's own rewards, and users' functions, may be anything."""
    environment = ReverseText(num_train=4, num_eval=2)
    assert len(encode_prompts(environment, tokenizer, config(seq_len=64, **options)).train) == 4


def test_a_conversation_may_have_more_tokens_than_one_turn(tokenizer: Tokenizer) -> None:
    environment = ReverseText(num_train=4, num_eval=2)
    environment.train_tasks[:] = [HeldTask(3, [], "", is_interactive=True), reverse_task(4, "abc")]
    assert len(encode_prompts(environment, tokenizer, config(seq_len=64, filters={"min_tokens": 11})).train) == 2


def test_orders_of_tasks_that_are_set_aside_or_skipped_are_passed_over() -> None:
    tasks = TaskOrder([Task(index, [], "") for index in range(3)], seed=0)
    tasks.set_aside.add(tasks.place(1))
    assert [tasks.take(), tasks.take(), tasks.position] == [0, 2, 3]
    expected = next(group_id for group_id in range(5, 9) if tasks.place(group_id) not in tasks.set_aside)
    assert tasks.take(lambda group_id, place: group_id < 5) == expected and tasks.position == expected + 1
