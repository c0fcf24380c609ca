"""What is exported is what was trained, for transformers as for us."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.commands.export import ExportConfig
from tandem.config.lora import LoRAConfig
from tandem.config.shared import CheckpointConfig
from tandem.entrypoints.export import export
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder, named_tensors
from tandem.models.lora_training import attach_lora, merged_tensors
from tandem.models.reward_model import load_scorer, new_scorer
from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.model.language_model import LanguageModel
from tandem.trainer.offline.reward_model import ScoringModel
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.errors import UserError
from tandem.utils.files import write_json
from tandem.utils.manifest import verify_manifest
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

CPU = torch.device("cpu")


def save_run(root: Path, model_dir: Path, model: LanguageModel | ScoringModel, step: int, **config: Any) -> None:
    """What a run leaves: its configuration and a checkpoint."""
    run_dir = RunDir(root)
    write_json(run_dir.config / "sft.json", {"model": {"name": str(model_dir), "dtype": "float32"}} | config)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    run_log = RunLog(run_dir, "sft", enabled=False)
    checkpoint = CheckpointConfig(keep_last=9)
    saver = Checkpointer(run_dir, checkpoint, Ranks.single(CPU), model, optimizer, run_log, max_steps=9)
    saver.save(step)
    saver.close()


def changed(model_dir: Path, seed: int) -> Decoder:
    """The model with other weights, as if trained."""
    decoder = load_decoder(model_dir, torch.float32, CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return decoder


def test_transformers_loads_what_was_trained(tiny_model: Path, tmp_path: Path) -> None:
    for step in (2, 4):
        decoder = changed(tiny_model, seed=step)
        save_run(tmp_path, tiny_model, LanguageModel(decoder, torch.nn.Linear(decoder.spec.hidden_size, 1)), step)
        export(ExportConfig(run_dir=tmp_path, step=step))
        folder = tmp_path / "export" / f"step_{step:06d}"
        verify_manifest(folder, step)
        expected = named_tensors(decoder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        found = model.state_dict()
        assert expected.keys() <= found.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], tensor), name
    text = "hello"
    ours, given = (AutoTokenizer.from_pretrained(path)(text)["input_ids"] for path in (folder, tiny_model))
    assert ours == given


def test_the_newest_in_another_precision_to_another_place(tiny_model: Path, tmp_path: Path, capsys) -> None:
    for step in (2, 4):
        decoder = changed(tiny_model, seed=step)
        save_run(tmp_path, tiny_model, LanguageModel(decoder, None), step)
    elsewhere = tmp_path / "some" / "where" / "else"
    export(ExportConfig(run_dir=tmp_path, output_dir=elsewhere, dtype="bfloat16"))
    assert "the model of step 4 is in" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(elsewhere)
    assert model.dtype == torch.bfloat16
    expected = named_tensors(decoder)
    for name, tensor in load_file(elsewhere / "model.safetensors").items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


def test_an_adapter_is_merged(tiny_model: Path, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=2, alpha=6, targets=["q_proj", "down_proj"])
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    base = {name: tensor.clone() for name, tensor in named_tensors(decoder).items()}
    attach_lora(decoder, lora, seed=3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(4))
    expected = merged_tensors(decoder)
    save_run(tmp_path, tiny_model, LanguageModel(decoder, None), 1, lora=lora.model_dump(mode="json"))
    export(ExportConfig(run_dir=tmp_path))
    exported = load_file(tmp_path / "export" / "step_000001" / "model.safetensors")
    assert exported.keys() == base.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, expected[name]), name
        is_changed = "q_proj" in name or "down_proj" in name
        assert torch.equal(tensor, base[name]) != is_changed, name


def test_a_reward_model_keeps_its_head(tiny_model: Path, tmp_path: Path) -> None:
    scorer = new_scorer(tiny_model, torch.float32, CPU, seed=3)
    save_run(tmp_path, tiny_model, ScoringModel(scorer), 2, loss={"type": "reward"})
    export(ExportConfig(run_dir=tmp_path))
    folder = tmp_path / "export" / "step_000002"
    verify_manifest(folder, 2)
    found, expected = load_scorer(folder, torch.float32, CPU).named_tensors(), scorer.named_tensors()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(model.score.weight, scorer.score.weight)


def test_what_cannot_be_exported_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run_dir = .* holds no complete checkpoint"):
        export(ExportConfig(run_dir=tmp_path))
    model = LanguageModel(load_decoder(tiny_model, torch.float32, CPU), None)
    save_run(tmp_path, tiny_model, model, 4)
    with pytest.raises(
        UserError, match=r"step = 3: there is no directory .* the nearest complete checkpoint is of step 4"
    ):
        export(ExportConfig(run_dir=tmp_path, step=3))
    (tmp_path / "export" / "step_000004").mkdir(parents=True)
    with pytest.raises(UserError, match=r"output_dir = '.*step_000004' already exists; remove it"):
        export(ExportConfig(run_dir=tmp_path))
    save_run(tmp_path, tiny_model, model, 5, lora={"rank": 2})
    with pytest.raises(UserError, match="does not fit the model in the run's configuration: 'embed_tokens"):
        export(ExportConfig(run_dir=tmp_path))
    save_run(tmp_path, tmp_path / "nowhere", model, 5)
    with pytest.raises(UserError, match=r"model\.name = '.*nowhere' is not a directory"):
        export(ExportConfig(run_dir=tmp_path))
    (tmp_path / "config" / "sft.json").unlink()
    with pytest.raises(UserError, match=r"there is no trainer\.json, sft\.json or align\.json in"):
        export(ExportConfig(run_dir=tmp_path))
    assert not (tmp_path / "export" / "step_000005").exists()


def test_help_answers_without_torch() -> None:
    probe = "import sys; from tandem.entrypoints.export import main; sys.argv[1:] = ['--help']\n"
    probe += "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == "False\n"
    for flag in ("--run-dir", "--step", "--output-dir", "--dtype"):
        assert flag in done.stdout
