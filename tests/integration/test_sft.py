"""`sft` as users run it: every kind of source, evaluation, policies for bad rows, going on after an interruption."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tests.integration.processes import Starter
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir

SMALL = ("--seq-len", "64", "--batch-size", "4", "--optimizer.lr", "1e-3", "--device", "cpu", "--threads", "1")
Run = Callable[..., RunDir]


@pytest.fixture
def arguments(tiny_model: Path, tmp_path: Path) -> list[str]:
    return ["--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run"), *SMALL]


@pytest.fixture
def sft(starter: Starter, arguments: list[str], tmp_path: Path) -> Run:
    def run(*extra: str) -> RunDir:
        done = starter.run("sft", *arguments, *extra)
        assert done.returncode == 0, done.stdout
        return RunDir(tmp_path / "run")

    return run


@pytest.fixture
def refused(starter: Starter, arguments: list[str], tmp_path: Path) -> Callable[..., str]:
    def run(*extra: str) -> str:
        done = starter.run("sft", *arguments, *extra, timeout_s=60)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stdout
        assert not (tmp_path / "run").exists(), "something was started"
        return done.stdout.strip().splitlines()[-1]

    return run


def conversation(number: int) -> dict[str, Any]:
    word = "abcdefgh"[number % 5 : number % 5 + 3]
    answers = [{"role": "assistant", "content": word[::-1]}, {"role": "user", "content": "again"}]
    return {"messages": [{"role": "user", "content": word}, *answers, answers[0]]}


ROWS = [conversation(number) for number in range(12)]
EMPTY = {"prompt": "a", "completion": ""}
LONG = {"prompt": "a", "completion": "b" * 80}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_evaluation_is_that_of_the_published_model(sft: Run, tmp_path: Path) -> None:
    """The last evaluation, computed again with transformers on what was published: a mean over all learned tokens."""
    data, held_out = write(tmp_path / "rows.jsonl", ROWS), [*ROWS[:3], {"prompt": "xy", "completion": "yx"}]
    options = ("--data.path", data, "--data.eval-path", write(tmp_path / "eval.jsonl", held_out))
    run_dir = sft(*options, "--max-steps", "6", "--eval.every", "0.3", "--tokens-per-microbatch", "64")
    lines = read_json_lines(run_dir.metrics)
    losses = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert list(losses) == [2, 4, 6]
    assert losses[6] < losses[2]
    assert losses[6] == pytest.approx(mean_loss(run_dir.weights / "latest", held_out), abs=1e-4)


def mean_loss(model_dir: Path, rows: list[dict[str, Any]]) -> float:
    """Answers and their closing tokens, told apart by hand: <|im_start|> assistant \\n answer <|im_end|>."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    losses: list[float] = []
    for row in rows:
        answers = {"role": "assistant", "content": row.get("completion", "")}
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}, answers]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        tokens = tokenizer.convert_ids_to_tokens(ids)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        is_learned = False
        for place, token in enumerate(tokens):
            if is_learned:
                losses.append(-float(logprobs[place - 1, ids[place]]))
            is_learned = (is_learned or tokens[place - 1 : place] == ["assistant"]) and token != "<|im_end|>"
    return sum(losses) / len(losses)


@pytest.mark.parametrize("streaming", [(), ("--data.streaming",)], ids=["at once", "streamed"])
def test_sources_of_every_kind_mixed_with_bad_rows_left_out(sft: Run, tmp_path: Path, streaming: tuple[str]) -> None:
    datasets.Dataset.from_list(ROWS[:4]).to_parquet(tmp_path / "rows.parquet")
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[4:8])})
    saved.save_to_disk(tmp_path / "saved")
    sources = [
        {"path": str(tmp_path / "rows.parquet"), "weight": 2},
        {"path": str(tmp_path / "saved"), "split": "train"},
        {"path": write(tmp_path / "rows.jsonl", [EMPTY, *ROWS[8:], LONG])},
    ]
    options = ("--data.sources", json.dumps(sources), "--data.on-bad-row", "skip", "--max-steps", "5")
    run_dir = sft(*options, *streaming, "--no-data.shuffle")
    first, last = (line for line in read_json_lines(run_dir.events) if line["event"] == "data")
    if streaming:
        assert (first["rows"], last["rows"]) == (None, None)
        # 20 rows, 5 of them from the third source, which has 4: its second epoch has begun.
        assert last["rows_skipped"] == 3
    else:
        assert (first["rows"], first["rows_skipped"], first["rows_held_out"]) == (12, 2, 0)
        assert last["rows_skipped"] == 2
    assert len(read_json_lines(run_dir.metrics)) == 5


def test_rows_that_are_cut_are_counted(sft: Run, tmp_path: Path) -> None:
    run_dir = sft(
        *("--data.path", write(tmp_path / "rows.jsonl", [*ROWS, LONG]), "--data.on-bad-row", "truncate"),
        *("--max-steps", "1", "--data.eval-size", "2"),
    )
    events = {line["event"]: line for line in read_json_lines(run_dir.events)}
    counts = {name: events["data"][name] for name in ("rows", "rows_held_out", "rows_skipped", "rows_truncated")}
    assert counts == {"rows": 11, "rows_held_out": 2, "rows_skipped": 0, "rows_truncated": 1}


@pytest.mark.parametrize(
    "streaming", [(), ("--data.streaming", "--data.shuffle-buffer", "4")], ids=["at once", "streamed"]
)
def test_a_resumed_run_sees_the_rows_it_would_have_seen(sft: Run, tmp_path: Path, streaming: tuple[str, ...]) -> None:
    options = ("--data.path", write(tmp_path / "rows.jsonl", ROWS), *streaming, "--deterministic")
    whole = [line["loss"] for line in read_json_lines(sft(*options, "--max-steps", "6").metrics)]
    sft(*options, "--max-steps", "3", "--checkpoint.every", "3", "--clean")
    run_dir = sft(*options, "--max-steps", "6", "--checkpoint.every", "3", "--resume")
    assert [line["loss"] for line in read_json_lines(run_dir.metrics)] == whole


def test_one_option_spreads_a_run_over_ranks(sft: Run, tmp_path: Path) -> None:
    options = ("--data.path", write(tmp_path / "rows.jsonl", ROWS), "--max-steps", "4", "--data.eval-size", "4")
    alone = read_json_lines(sft(*options).metrics)
    run_dir = sft(*options, "--parallel.ranks", "2", "--parallel.strategy", "zero3", "--clean")
    together = read_json_lines(run_dir.metrics)
    assert [line["step"] for line in together] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in together] == pytest.approx([line[name] for line in alone], rel=1e-3)
    assert together[-1]["eval/loss"] == pytest.approx(alone[-1]["eval/loss"], rel=1e-3)
    assert [event["ranks"] for event in read_json_lines(run_dir.events) if event["event"] == "started"] == [2]


def test_bad_input_is_refused_before_anything_starts(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused("--data.path", "none.jsonl").startswith(
        "sft: data.path = 'none.jsonl' does not exist; give a .jsonl"
    )
    path = write(tmp_path / "rows.jsonl", [*ROWS, EMPTY])
    assert refused("--data.path", path) == (
        f"sft: data.path = {path!r}, row 12 (line 13): 'completion' is empty: there is nothing to learn in it"
    )
    path = write(tmp_path / "rows.jsonl", [LONG])
    assert "do not fit seq_len = 64; give at least 91, or data.on_bad_row" in refused("--data.path", path)
    assert refused("--data.path", path, "--eval.every", "2") == (
        "sft: eval.every = 2 needs held-out rows; set data.eval_size or data.eval_path"
    )


def test_a_dry_run_checks_the_rows(starter: Starter, arguments: list[str], tmp_path: Path) -> None:
    options = ("--data.path", write(tmp_path / "rows.jsonl", ROWS), "--data.eval-size", "0.25", "--dry-run")
    done = starter.run("sft", *arguments, *options)
    assert done.returncode == 0, done.stdout
    assert "dry run: 9 rows to learn from, 3 held out" in done.stdout
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
