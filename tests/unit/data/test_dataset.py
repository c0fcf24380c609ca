"""From a configuration to samples: policies for bad rows, counts, held-out rows, mixtures, streams.

Rows are texts of letters; a text of n letters has n + 1 tokens, its end included."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.data import SFTDataConfig
from tandem.data.conversations import encode_sft_row
from tandem.data.dataset import Dataset, hold_out, load_dataset
from tandem.data.sources import InMemory
from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import TrainingSequence
from tandem.utils.errors import UserError

Load = Callable[..., Dataset[TrainingSequence]]


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


@pytest.fixture
def load(tokenizer: Tokenizer) -> Load:
    def run(
        seq_len: int = 8, seed: int = 0, vocab_size: int | None = None, **options: Any
    ) -> Dataset[TrainingSequence]:
        config = SFTDataConfig.model_validate(options)
        encode = partial(encode_sft_row, tokenizer=tokenizer)
        return load_dataset(config, encode, seq_len=seq_len, seed=seed, vocab_size=vocab_size)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def rows(*values: Any, name: str = "rows.jsonl") -> str:
        """Texts stand for rows with that text."""
        lines = (json.dumps({"text": value} if isinstance(value, str) else value) for value in values)
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return str(tmp_path / name)

    return rows


@pytest.fixture
def texts(tokenizer: Tokenizer) -> Callable[..., list[str]]:
    return lambda samples: [tokenizer.decode(sample.token_ids) for sample in samples]


def test_a_token_that_the_model_has_no_embedding_for_is_a_bad_row(load: Load, write, tokenizer: Tokenizer) -> None:
    path, (token,) = write("a", "~"), tokenizer.encode("~")
    assert load(path=path, vocab_size=token + 1).num_train == 2
    with pytest.raises(UserError) as caught:
        load(path=path, vocab_size=token)
    problem = f"token id {token} is beyond vocab_size = {token} in the model's config.json; give the model its own"
    assert str(caught.value).startswith(f"data.path = {path!r}, row 1 (line 2): {problem}")
    assert load(path=path, vocab_size=token, on_bad_row="skip").summary["rows_skipped"] == 1


LONG, EMPTY, MISSING = "abcdefghij", "", {"txt": "a"}
LONG_PROMPT = {"prompt": "abcdefgh", "completion": "a"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (LONG, "11 tokens do not fit seq_len = 8; give at least 11, or data.on_bad_row = 'skip' or 'truncate'"),
        (EMPTY, "'text' must be text that is not empty; it is ''"),
        (MISSING, "a row needs 'messages', 'prompt' and 'completion', or 'text'; it has ['txt']"),
        ([1], "a row must be a table, not list"),
    ],
)
def test_a_bad_row_ends_the_run_with_its_place(load: Load, write, row: Any, problem: str, streaming: bool) -> None:
    path = write("a", "b", row)
    with pytest.raises(UserError) as caught:
        load(path=path, streaming=streaming, shuffle=False).train.batch(0, 3)
    assert str(caught.value) == f"data.path = {path!r}, row 2 (line 3): {problem}"


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_are_left_out_and_counted(load: Load, write, texts, streaming: bool) -> None:
    path = write(LONG, "a", EMPTY, MISSING, [1], "b", LONG_PROMPT)
    data = load(path=path, on_bad_row="skip", shuffle=False, streaming=streaming)
    assert texts(data.train.batch(0, 2)) == ["a", "b"]
    if not streaming:
        assert data.summary.items() >= {"rows": 2, "rows_held_out": 0, "rows_skipped": 5, "rows_truncated": 0}.items()
    assert texts(data.train.batch(2, 3)) == ["a", "b", "a"]


def test_streamed_rows_are_counted_as_they_are_read(load: Load, write) -> None:
    data = load(path=write("a", EMPTY, "b"), on_bad_row="skip", shuffle=False, streaming=True)
    before = data.counts.skipped
    data.train.batch(0, 6)  # three epochs
    assert (before, data.counts.skipped, data.summary["rows"]) == (0, 3, None)


def test_rows_are_cut_at_their_end(load: Load, write, texts) -> None:
    data = load(path=write(LONG, "a", LONG_PROMPT), on_bad_row="truncate", shuffle=False)
    cut, whole = data.train.batch(0, 2)
    assert texts([cut, whole]) == [LONG[:8], "a"]
    assert cut.loss_mask == [0] + [1] * 7
    # Of the third row, only the prompt would be left.
    assert data.summary.items() >= {"rows": 2, "rows_held_out": 0, "rows_skipped": 1, "rows_truncated": 1}.items()


def test_prompts_that_are_too_long_are_cut_at_their_beginning(load: Load, write) -> None:
    path = write({"prompt": "abcdef", "completion": "x"}, {"prompt": "ab", "completion": "y"})
    options: dict[str, Any] = {"path": path, "shuffle": False, "seq_len": 40}
    whole, short = load(**options).train.batch(0, 2)
    options["max_prompt_len"] = longest = short.num_context_tokens
    with pytest.raises(
        UserError, match=f"is longer than data.max_prompt_len = {longest}; raise it, or give data.on_bad"
    ):
        load(**options)
    data = load(**options, on_bad_row="truncate")
    cut, kept = data.train.batch(0, 2)
    assert cut.num_context_tokens == longest and kept == short
    assert cut.token_ids == whole.token_ids[-len(cut.token_ids) :]
    assert data.counts.truncated == 1
    assert load(**options, on_bad_row="skip").train.batch(0, 1) == [short]


@pytest.mark.parametrize("row", [EMPTY, MISSING])
def test_what_cannot_be_cut_right_still_ends_the_run(load: Load, write, row: Any) -> None:
    with pytest.raises(UserError, match=r"row 1 \(line 2\)"):
        load(path=write("a", row), on_bad_row="truncate")


@pytest.mark.parametrize(("rows", "problem"), [([], "holds no rows"), ([EMPTY], "holds no row that can be used")])
def test_no_rows(load: Load, write, rows: list[Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load(path=write(*rows), on_bad_row="skip")
    with pytest.raises(UserError, match=r"no row that can be used is left to learn from$"):
        load(path=write(*rows), on_bad_row="skip", streaming=True)


def test_fields_by_other_names(load: Load, write, texts) -> None:
    path = write({"body": "ab", "text": "no"})
    assert texts(load(path=path, fields={"text": "body"}).train.batch(0, 1)) == ["ab"]
    with pytest.raises(UserError, match=r"row 0 \(line 1\): field 'boddy' is missing; it has \['body', 'text'\]"):
        load(path=path, fields={"text": "boddy"})


def test_fields_may_change_places(load: Load, write) -> None:
    path = write({"prompt": "ab", "completion": "cd"})
    sample = load(seq_len=64, path=path, fields={"prompt": "completion", "completion": "prompt"}).train.batch(0, 1)[0]
    mirrored = load(seq_len=64, path=write({"prompt": "cd", "completion": "ab"})).train.batch(0, 1)[0]
    assert sample == mirrored


def test_a_field_that_a_row_may_do_without_may_be_null(load: Load, write, caplog) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = write({"messages": messages, "functions": None}, {"messages": messages, "functions": tools})
    assert load(seq_len=512, path=path, fields={"tools": "functions"}).num_train == 2
    assert "no row has that field" not in caplog.text  # other tests may have let more be logged
    load(seq_len=512, path=path, fields={"tools": "function"})
    assert "data.fields.tools = 'function': no row has that field; they have ['functions', 'messages']" in caplog.text


def test_rows_of_a_file_to_evaluate_on(load: Load, write, texts) -> None:
    data = load(path=write("a"), eval_path=write("b", "c", name="eval.jsonl"))
    assert (texts(data.train.batch(0, 2)), texts(data.held_out)) == (["a", "a"], ["b", "c"])
    with pytest.raises(UserError, match=r"data.eval_path = .*none.jsonl' does not exist"):
        load(path=write("a"), eval_path="none.jsonl")


@pytest.mark.parametrize(("eval_size", "expected"), [(1, 1), (3, 3), (0.25, 2), (0.01, 1)])
def test_held_out_rows_are_not_learned(load: Load, write, texts, eval_size: float, expected: int) -> None:
    letters = "abcdefgh"
    path = write(*letters)
    data = load(path=path, eval_size=eval_size)
    train, held_out = texts(data.train.batch(0, 8 - expected)), texts(data.held_out)
    assert len(held_out) == expected
    assert sorted(train + held_out) == list(letters)
    assert texts(load(path=path, eval_size=eval_size).held_out) == held_out
    other_seeds = [texts(load(path=path, eval_size=eval_size, seed=seed).held_out) for seed in range(8)]
    assert any(other != held_out for other in other_seeds)


def test_nothing_left_to_learn(load: Load, write) -> None:
    with pytest.raises(UserError, match=r"data.eval_size = 2 leaves no row of data.path = .* to learn from"):
        load(path=write("a", "b"), eval_size=2)
    with pytest.raises(UserError, match="no row that can be used is left to learn from; 2 are held out"):
        load(path=write("a", "b"), eval_size=2, streaming=True)


def test_a_stream_holds_out_its_first_rows(load: Load, write, texts) -> None:
    data = load(path=write(*"abcdef"), eval_size=2, streaming=True, shuffle_buffer=3)
    assert texts(data.held_out) == ["a", "b"]
    assert sorted(texts(data.train.batch(0, 4))) == ["c", "d", "e", "f"]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any), st.floats(0.01, 0.99))
def test_parts_lose_what_is_held_out_and_nothing_else(sizes: list[int], fraction: float) -> None:
    parts = [[(number, index) for index in range(size)] for number, size in enumerate(sizes)]
    rest, held_out = hold_out(parts, fraction, seed=1)
    assert len(held_out) == max(round(fraction * sum(sizes)), 1)
    assert [sorted(left + [row for row in held_out if row[0] == n]) for n, left in enumerate(rest)] == parts


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_are_mixed_by_weight(load: Load, write, texts, streaming: bool) -> None:
    sources = [
        {"path": write(*"abc", name="small.jsonl"), "weight": 3},
        {"path": write(*"wxyz", name="large.jsonl"), "weight": 1},
    ]
    data = load(sources=sources, shuffle=False, streaming=streaming)
    # 3 : 1, each in its own order, and the smaller one again when it is through.
    taken = texts(data.train.batch(0, 16))
    assert [letter for letter in taken if letter in "abc"] == list("abcabcabcabc")
    assert [letter for letter in taken if letter in "wxyz"] == list("wxyz")
    assert [sum(letter in "wxyz" for letter in taken[n : n + 4]) for n in range(0, 16, 4)] == [1, 1, 1, 1]


def test_a_bad_row_of_a_source_says_which(load: Load, write) -> None:
    sources = [{"path": write("a")}, {"path": write("b", EMPTY, name="other.jsonl")}]
    with pytest.raises(UserError, match=r"data.sources.1.path = .*other.jsonl', row 1 \(line 2\): "):
        load(sources=sources)


def test_rows_and_their_order_are_there_for_who_needs_them_all(load: Load, write, texts) -> None:
    sources = [{"path": write("a", "b")}, {"path": write("c", name="other.jsonl")}]
    train = load(sources=sources, shuffle=False).train
    assert isinstance(train, InMemory)
    assert texts(train.rows) == ["a", "b", "c"]
    assert list(train.indices.batch(0, 4)) == [0, 2, 1, 2]


def test_going_on_gives_what_would_have_come(load: Load, write, texts) -> None:
    path = write(*"abcdefgh", EMPTY, LONG)
    for options in ({}, {"streaming": True, "shuffle_buffer": 3}):
        whole = texts(load(path=path, on_bad_row="skip", **options).train.batch(0, 30))
        assert texts(load(path=path, on_bad_row="skip", **options).train.batch(11, 9)) == whole[11:20]


def test_rows_have_a_checksum(load: Load, write: Callable[..., str]) -> None:
    def checksum(*rows: Any, **options: Any) -> int | None:
        return load(path=write(*rows), **options).checksum

    first = checksum("a", "b")
    assert first == checksum("a", "b") and first is not None
    others = {checksum("a", "c"), checksum("b", "a"), checksum("a", "b", "b"), checksum("a")}
    assert len(others) == 4 and first not in others
    odd = {"text": "a", "big": 2**70, "half": "\ud800"}
    assert checksum(odd) != checksum(odd | {"big": 2**71})
    assert checksum("a", "b", streaming=True) is None
