"""What a resumed run may be told differently."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.align import AlignConfig
from tandem.commands.changes import review_changes
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.config.base import Config
from tandem.config.lora import TARGETS
from tandem.utils.errors import UserError
from tandem.utils.files import write_json


def rl(**options: Any) -> RLConfig:
    tree: dict[str, Any] = {"model": {"name": "some/model"}, "seq_len": 256, "inference": {}}
    return RLConfig.model_validate(tree | options)


def sft(**options: Any) -> SFTConfig:
    return SFTConfig.model_validate({"model": {"name": "m"}, "data": {"path": "rows.jsonl"}} | options)


def align(**options: Any) -> AlignConfig:
    return AlignConfig.model_validate({"model": {"name": "m"}, "data": {"path": "rows.jsonl"}} | options)


def review(old: Config, new: Config, folder: Path, **options: Any) -> dict[str, list[Any]]:
    write_json(folder / "stored.json", old.model_dump(mode="json"))
    return review_changes(new, folder / "stored.json", 50, **({"allowed": False} | options))


def test_the_same_run(tmp_path: Path) -> None:
    assert review(rl(), rl(resume=True), tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seed": 7}, "seed = 0 → 7"),
        ({"orchestrator": {"prompts_per_step": 4}}, "orchestrator.prompts_per_step = 16 → 4"),
        ({"orchestrator": {"group_size": 4}}, "orchestrator.group_size = 8 → 4"),
        ({"orchestrator": {"env": {"id": "a:B"}}}, "orchestrator.env.id = 'reverse-text' → 'a:B'"),
        ({"orchestrator": {"env": {"args": {"n": 1}}}}, "orchestrator.env.args.n = None → 1"),
        ({"orchestrator": {"sampling": {"temperature": 0.5}}}, "orchestrator.sampling.temperature = 1.0 → 0.5"),
        ({"trainer": {"loss": {"type": "gspo"}}}, "trainer.loss.type = 'grpo' → 'gspo'"),
        ({"model": {"name": "other"}}, "model.name = 'some/model' → 'other'"),
        (
            {"trainer": {"optimizer": {"lr": 1e-3}}},
            r"trainer.optimizer.lr = 1e-05 → 0.001 (the learning rate of step 51 becomes 0.001 instead of 1e-05)",
        ),
    ],
)
def test_another_run_is_refused_unless_told(tmp_path: Path, options: dict[str, Any], told: str, caplog) -> None:
    with pytest.raises(UserError) as caught:
        review(rl(), rl(**options), tmp_path)
    assert f"resume: these options change what the run learns ({tmp_path}/stored.json): {told}" in str(caught.value)
    assert str(caught.value).endswith("; give the old values, or continue anyway with --allow-changes")
    changes = review(rl(), rl(**options), tmp_path, allowed=True)
    assert len(changes) == 1
    assert f"continues with options that change what is learned: {told}" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (None, {"rank": 4}, "lora = None → {"),
        ({"rank": 4}, None, "→ None"),
        ({"rank": 4}, {"rank": 8}, "lora.rank = 4 → 8"),
        ({"targets": ["q_proj"]}, {"targets": ["v_proj"]}, "lora.targets = ['q_proj'] → ['v_proj']"),
    ],
)
@pytest.mark.parametrize("command", ["rl", "sft"])
def test_another_adapter_cannot_be_resumed(tmp_path: Path, command: str, old: Any, new: Any, told: str) -> None:
    def config(lora: Any) -> RLConfig | SFTConfig:
        return rl(trainer={"lora": lora}) if command == "rl" else sft(lora=lora)

    (tmp_path / "config").mkdir()
    with pytest.raises(UserError) as caught:
        review(config(old), config(new), tmp_path / "config", allowed=True)
    assert "the checkpoints hold other parameters than these options train" in str(caught.value)
    assert told in str(caught.value) and f"`export-model --run-dir {tmp_path}`" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"loss": {"type": "dpo"}}, {"loss": {"type": "reward"}}),
        ({"loss": {"type": "reward"}}, {"loss": {"type": "kto"}}),
        ({}, {"model": {"name": "m", "impl": "hf"}}),
    ],
)
def test_another_head_or_implementation_cannot_be_resumed(tmp_path: Path, old: Any, new: Any) -> None:
    with pytest.raises(UserError, match="the checkpoints hold other parameters than these options train"):
        review(align(**old), align(**new), tmp_path, allowed=True)
    assert review(align(), align(loss={"type": "ipo"}), tmp_path, allowed=True)


def test_a_model_of_another_shape_cannot_be_resumed(tmp_path: Path) -> None:
    shape = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 16}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    shapes = {"old": shape, "same": shape | {"head_dim": 4, "num_key_value_heads": 2}, "wider": shape | {"head_dim": 8}}
    for name, found in shapes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(found))

    def resume(new: str) -> dict[str, Any]:
        old = sft(model={"name": tmp_path / "old"})
        return review(old, sft(model={"name": tmp_path / new}), tmp_path, allowed=True)

    assert list(resume("same")) == list(resume("unknown")) == ["model.name"]
    with pytest.raises(UserError, match=r"the checkpoints hold other parameters .*: model\.name = "):
        resume("wider")


def test_the_same_adapter_may_be_scaled_otherwise(tmp_path: Path) -> None:
    old = sft(lora={"targets": ["q_proj", "v_proj"]})
    new = sft(lora={"targets": ["v_proj", "q_proj"], "alpha": 4, "dropout": 0.1, "rslora": True})
    assert len(review(old, new, tmp_path, allowed=True)) == 4
    everything = sft(lora={"targets": list(TARGETS)})
    assert len(review(sft(lora={}), everything, tmp_path, allowed=True)) == 1


def test_harmless_changes_are_told_and_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    options = {
        "checkpoint": {"every": 5},
        "orchestrator": {
            "eval": {"every": 3},
            "metrics": {"report_to": ["wandb"]},
            "weights_timeout_s": 5,
            "max_failed_share": 0.9,
            "env": {"score_timeout_s": 5, "tries": 9, "check": False},
        },
        "trainer": {"parallel": {"ranks": 2}, "tokens_per_microbatch": 4096, "rollout_timeout_s": 7},
        "inference": {"server": {"port": 8123, "api_key": "secret"}},
        "log_level": "error",
        "max_steps": 400,
    }
    changes = review(rl(), rl(**options), tmp_path)
    assert "resume: max_steps = 100 → 400" in caplog.text and "secret" not in caplog.text + str(changes)
    assert {"checkpoint.every", "orchestrator.eval.every", "inference.server.port", "max_steps"} <= changes.keys()
    assert not any(key.startswith(("trainer.checkpoint", "orchestrator.max_steps")) for key in changes), "told once"


def test_secrets_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    old, new = (rl(orchestrator={"env": {"args": {"token": token}}}) for token in ("s3cret-1", "s3cret-2"))
    with pytest.raises(UserError, match=r"orchestrator\.env\.args\.token \(not shown\)") as refused:
        review(old, new, tmp_path)
    changes = review(old, new, tmp_path, allowed=True)
    assert "s3cret" not in f"{refused.value} {changes} {caplog.text}"


def test_another_length_of_a_decaying_schedule_is_refused_with_the_jump(tmp_path: Path) -> None:
    linear: dict[str, Any] = {"scheduler": {"type": "linear"}, "optimizer": {"lr": 1e-3}}
    with pytest.raises(
        UserError,
        match=r"max_steps = 100 → 200 \(the learning rate of step 51 becomes 0\.00075 instead of 0\.0005\)",
    ):
        review(sft(**linear), sft(**linear, max_steps=200), tmp_path)
    assert review(sft(**linear), sft(**linear, max_steps=200), tmp_path, allowed=True) == {"max_steps": [100, 200]}
    linear["scheduler"]["warmup_steps"] = 60
    with pytest.raises(UserError, match=r"200 \(the learning rate, scheduler\.type = 'linear', depends on it\)"):
        review(sft(**linear), sft(**linear, max_steps=200), tmp_path)
    share = {"scheduler": {"warmup_steps": 0.1}}
    with pytest.raises(UserError, match=r"200 \(the learning rate, scheduler\.warmup_steps = 0\.1, depends on it\)"):
        review(sft(**share), sft(**share, max_steps=200), tmp_path)


def test_one_place_under_two_names_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert review(sft(), sft(data={"path": str(tmp_path / "rows.jsonl")}), tmp_path) == {}
    with pytest.raises(UserError, match=r"data\.path"):
        review(sft(), sft(data={"path": "others.jsonl"}), tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"seed": "x"}', "[" * 100_000])
def test_a_damaged_record_is_told_and_does_not_stop_anybody(tmp_path: Path, text: str, caplog) -> None:
    (tmp_path / "stored.json").write_text(text)
    assert review_changes(rl(), tmp_path / "stored.json", 5, allowed=False) == {}
    assert review_changes(rl(), tmp_path / "nowhere.json", 5, allowed=False) == {}
    assert caplog.text.count("options are not compared with those of the run") == 2


def test_an_option_that_has_come_since_counts_as_its_default(tmp_path: Path) -> None:
    tree = rl().model_dump(mode="json")
    del tree["trainer"]["loss"]
    write_json(tmp_path / "stored.json", tree)
    assert review_changes(rl(), tmp_path / "stored.json", 5, allowed=False) == {}
