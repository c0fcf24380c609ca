"""`align` and `reward-server` as a user starts them, on the made-up preferences of examples/preference."""

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from tests.integration.processes import Starter, run_in_turn, wait_until

from tandem.rewards.server_client import RewardClient, RewardServerError
from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory, load_script: Callable[[str], ModuleType]) -> Path:
    target = tmp_path_factory.mktemp("preferences")
    load_script("preference/make_data").main(target)
    return target


@pytest.fixture(scope="module")
def few_preferences(preferences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For runs of a few steps: all rows are read, and compared with the reference, before the first of them."""
    target = tmp_path_factory.mktemp("few_preferences")
    for file in preferences.iterdir():
        (target / file.name).write_text("".join(file.read_text().splitlines(keepends=True)[:200]))
    return target


@pytest.fixture
def align(starter: Starter, tmp_path: Path) -> Callable[..., RunDir]:
    def run(name: str, model: Path, data: Path, *arguments: str) -> RunDir:
        words, run_dir = command(tmp_path / name, model, data, *arguments)
        done = starter.run(*words)
        assert done.returncode == 0, done.stdout
        return run_dir

    return run


def command(root: Path, model: Path, data: Path, *arguments: str) -> tuple[list[str], RunDir]:
    options = ["--model.name", str(model), "--data.path", str(data), "--output-dir", str(root)]
    return ["align", *arguments, *options], RunDir(root)


def metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    """What was written of each step, without what depends on the machine."""
    machine = ("time", "process", "tokens_per_s", "memory_gib")
    return [
        {name: value for name, value in line.items() if name not in machine}
        for line in read_json_lines(run_dir.metrics)
    ]


def assert_alike(run: RunDir, other: RunDir) -> None:
    for line, expected in zip(metrics(run), metrics(other), strict=True):
        if line["step"] == 1 and "accuracy" in line:
            # Policy and reference are the same still: rounding decides which of two equal rewards is above the other.
            line["accuracy"] = expected["accuracy"]
        assert line == pytest.approx(expected, rel=2e-3, abs=2e-4)


def reversals(model_dir: Path) -> float:
    """The share of held-out rows that the model reverses, greedily, as transformers runs it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tandem.envs.reverse_text import ReverseText

    tasks = ReverseText().eval_tasks[:64]
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModelForCausalLM.from_pretrained(model_dir)
    prompts = [
        tokenizer.apply_chat_template(task.messages, add_generation_prompt=True, return_dict=False) for task in tasks
    ]
    token_ids, generating = torch.tensor(prompts), cast(Any, model)
    with torch.no_grad():
        written = generating.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=10, do_sample=False
        )
    texts = [tokenizer.decode(row[token_ids.shape[1] :], skip_special_tokens=True) for row in written]
    return sum(text == task.answer for text, task in zip(texts, tasks, strict=True)) / len(tasks)


@pytest.mark.filterwarnings("ignore")
def test_dpo_makes_the_model_prefer_what_was_chosen(align, warm_model: Path, preferences: Path) -> None:
    """The warm model copies more often than it reverses."""
    run_dir = align(
        "run", warm_model, preferences / "pairs.jsonl", "@", "examples/preference/dpo.toml", "--max-steps", "40"
    )
    steps = metrics(run_dir)
    evaluations = [line for line in steps if "eval/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert [line["step"] for line in evaluations] == [10, 20, 30, 40]
    # Nothing has been learned in the first step: policy and reference are the same, bit for bit or nearly.
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert evaluations[-1]["eval/accuracy"] > 0.9 and evaluations[-1]["eval/margin"] > 1.0
    for name in ("rewards_chosen", "rewards_rejected", "margin", "accuracy", "kl", "grad_norm", "entropy", "lr"):
        assert name in steps[-1]
    before, after = reversals(warm_model), reversals(run_dir.weights / "latest")
    assert after > 0.8 > before


SHORT = ("--max-steps", "6", "--batch-size", "8", "--deterministic", "--checkpoint.every", "3", "--threads", "1")
SHORT += ("--data.eval-size", "20")


def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    tmp_path: Path, warm_model: Path, few_preferences: Path
) -> None:
    """What lies after step 3 is taken away; BCO's running shift has to come back with the rest."""
    commands, runs = zip(
        *(
            command(
                tmp_path / loss_type,
                warm_model,
                few_preferences / "labeled.jsonl",
                *("@", "examples/preference/kto.toml", "--loss.type", loss_type, *SHORT),
            )
            for loss_type in ("bco", "kto")
        ),
        strict=True,
    )
    run_in_turn(*commands)
    whole = [(metrics(run_dir), weights_of(run_dir)) for run_dir in runs]
    for run_dir in runs:
        shutil.rmtree(run_dir.checkpoints / "step_000006")
        shutil.rmtree(run_dir.weights)  # or it would count as finished
    said = run_in_turn(*([*words, "--resume"] for words in commands))
    assert said.count("resuming after step 3") == 2, said
    assert [(metrics(run_dir), weights_of(run_dir)) for run_dir in runs] == whole
    assert whole[0] != whole[1]


def weights_of(run_dir: RunDir) -> bytes:
    return (run_dir.weights / "latest" / "model.safetensors").read_bytes()


WAYS = {"dpo": "ddp", "orpo": "zero2", "kto": "zero3", "reward": "zero2"}


def test_two_ranks_do_what_one_does(tmp_path: Path, warm_model: Path, few_preferences: Path) -> None:
    def commands(folder: Path) -> tuple[tuple[list[str], ...], tuple[RunDir, ...]]:
        made = []
        for loss_type, strategy in WAYS.items():
            data = few_preferences / ("labeled.jsonl" if loss_type == "kto" else "pairs.jsonl")
            arguments = ["@", "examples/preference/dpo.toml", "--loss.type", loss_type, "--max-steps", "4"]
            # Small enough that each rank has several micro-batches.
            arguments += ["--batch-size", "10", "--seq-len", "32", "--tokens-per-microbatch", "80"]
            arguments += ["--optimizer.lr", "1e-4", "--data.eval-size", "20", "--parallel.strategy", strategy]
            made.append(command(folder / loss_type, warm_model, data, *arguments))
        words, runs = zip(*made, strict=True)
        return words, runs

    for_one, alone = commands(tmp_path / "alone")
    for_two, together = commands(tmp_path / "together")
    run_in_turn(*for_one)
    run_in_turn(*for_two, num_ranks=2)
    for one, two in zip(alone, together, strict=True):
        assert_alike(two, one)
        assert "eval/loss" in metrics(two)[-1]


def test_the_reference_may_be_a_model_in_memory(tmp_path: Path, warm_model: Path, few_preferences: Path) -> None:
    arguments = ("@", "examples/preference/dpo.toml", "--max-steps", "4", "--batch-size", "8", "--data.eval-size", "20")
    commands, runs = zip(
        *(
            command(
                tmp_path / source, warm_model, few_preferences / "pairs.jsonl", *arguments, "--loss.reference", source
            )
            for source in ("precomputed", "model")
        ),
        strict=True,
    )
    run_in_turn(*commands)
    assert runs[0].reference.exists() and not runs[1].reference.exists()
    assert_alike(*runs)


@pytest.fixture
def refused(starter: Starter, tmp_path: Path, tiny_model: Path) -> Callable[..., str]:
    def run(row: str, *arguments: str) -> str:
        data = tmp_path / "rows.jsonl"
        data.write_text(row)
        options = ["--model.name", str(tiny_model), "--data.path", str(data), "--output-dir", str(tmp_path / "run")]
        done = starter.run("align", *options, *arguments, timeout_s=60)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stdout and not (tmp_path / "run").exists()
        return done.stdout

    return run


PAIR = json.dumps({"prompt": "ab", "chosen": "ba", "rejected": "ab"}) + "\n"


@pytest.mark.parametrize(
    ("row", "arguments", "expected"),
    [
        ('{"prompt": "ab", "chosen": "ba"}\n', [], ["row 0 (line 1)", "'rejected'"]),
        (PAIR + "{\n", [], ["row 1 (line 2)", "not JSON"]),
        (PAIR, ["--seq-len", "4"], ["do not fit seq_len = 4"]),
        (PAIR, ["--loss.type", "simpo", "--loss.reference", "model"], ["loss: reference = 'model'", "valid: none"]),
        (PAIR, ["--resume"], ["resume", "no complete checkpoint"]),
    ],
)
def test_bad_input_is_refused_before_anything_starts(refused, row: str, arguments: list[str], expected: list[str]):
    message = refused(row, *arguments)
    for part in expected:
        assert part in message


def test_a_dry_run_starts_nothing(starter: Starter, tiny_model: Path, preferences: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    options = ["--model.name", str(tiny_model), "--data.path", str(preferences / "pairs.jsonl")]
    done = starter.run("align", *options, "--output-dir", str(run_dir.root), "--dry-run")
    assert done.returncode == 0, done.stdout
    assert {path.name for path in run_dir.root.iterdir()} == {"dry_run"}
    assert json.loads((run_dir.dry_run / "align.json").read_text())["loss"]["type"] == "dpo"


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_reward_model_is_trained_served_and_asked(
    starter: Starter, align, warm_model: Path, preferences: Path, free_port: int, load_script
) -> None:
    arguments = ("@", "examples/preference/reward.toml", "--max-steps", "30")
    run_dir = align("run", warm_model, preferences / "pairs.jsonl", *arguments)
    assert metrics(run_dir)[-1]["eval/accuracy"] > 0.75
    key = {"REWARD_KEY": "secret"}
    starter.environment |= key
    options = ["--model.name", str(run_dir.weights / "latest"), "--port", str(free_port), "--seq-len", "64"]
    server = starter.start("reward_server", *options, "--api-key-var", "REWARD_KEY")
    url = f"http://127.0.0.1:{free_port}"
    wait_until(lambda: server.poll() is not None or is_healthy(url), 60, "the reward server")
    assert server.poll() is None, server.stdout.read() if server.stdout else ""
    pairs = [json.loads(line) for line in (preferences / "pairs.jsonl").read_text().splitlines()[:64]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REWARD_KEY", "secret")
        asyncio.run(ask(url, pairs, run_dir.weights / "latest"))
        environment = load_script("preference/scored").Scored(reward_url=url, api_key_var="REWARD_KEY")
        task = environment.eval_tasks[0]
        scores = [asyncio.run(environment.score(task, answer)) for answer in (task.answer, task.answer[::-1])]
        assert scores[0] > scores[1], "the environment's judge prefers a copy"


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


async def ask(url: str, pairs: list[dict[str, Any]], model_dir: Path) -> None:
    def conversation(pair: dict[str, Any], name: str) -> list[dict[str, Any]]:
        return [*pair["prompt"], {"role": "assistant", "content": pair[name]}]

    client = RewardClient(url, api_key_var="REWARD_KEY")
    chosen, rejected = [
        await asyncio.gather(*(client.score(conversation(pair, name)) for pair in pairs))
        for name in ("chosen", "rejected")
    ]
    right = sum(good > bad for good, bad in zip(chosen, rejected, strict=True))
    assert right > 0.75 * len(pairs)
    together = await client.score_all([conversation(pair, "chosen") for pair in pairs])
    assert together == pytest.approx(chosen, abs=1e-4)
    theirs = transformers_scores(model_dir, [conversation(pair, "chosen") for pair in pairs[:8]])
    assert chosen[:8] == pytest.approx(theirs, abs=1e-4)
    assert await client.score_texts(["abc"]) != await client.score_texts(["abd"])
    with pytest.raises(RewardServerError, match=r"400: messages\.0 has \d+ tokens, more than seq_len = 64"):
        await client.score([{"role": "user", "content": "a" * 100}])
    await client.close()
    stranger = RewardClient(url)
    with pytest.raises(RewardServerError, match="401: a valid API key is needed"):
        await stranger.score_texts(["abc"])
    await stranger.close()


def transformers_scores(model_dir: Path, conversations: list[list[dict[str, Any]]]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir)
    with torch.no_grad():
        return [
            model(torch.tensor([tokenizer.apply_chat_template(each, return_dict=False)])).logits.item()
            for each in conversations
        ]
