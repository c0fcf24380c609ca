"""Training adapters on the fused decoder, with PEFT on transformers' model as the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.require import require
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.config.lora import TARGETS, LoRAConfig
from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder, named_tensors
from tandem.models.lora import AdapterBank, AdapterMismatch, read_adapter
from tandem.models.lora_training import (
    LoRALinear,
    adapter_config,
    adapter_tensors,
    attach_lora,
    load_adapter,
    merged_tensors,
)
from tandem.utils.errors import UserError
from tandem.utils.manifest import verify_manifest
from tandem.weights.files import WeightsPublisher

CPU = torch.device("cpu")
TOKENS = [5, 9, 33, 12, 60, 7, 21, 40, 11, 3, 64, 90]
LORA = LoRAConfig(rank=3, alpha=5.0)
SOME = LoRAConfig(rank=2, alpha=3.0, rslora=True, targets=["k_proj", "up_proj", "o_proj"])
MakeReference = Callable[[str], PreTrainedModel]


@pytest.fixture
def model_dir(make_reference: MakeReference, tmp_path: Path) -> Path:
    make_reference("llama-biases").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def adapted(model_dir: Path, config: LoRAConfig, seed: int = 0) -> Decoder:
    decoder = load_decoder(model_dir, torch.float32, CPU)
    attach_lora(decoder, config, seed)
    return decoder


def randomize(decoder: Decoder) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained(decoder).values():
            parameter.normal_(0, 0.2, generator=generator)


def trained(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


def logits_of(decoder: Decoder) -> Tensor:
    ids = torch.tensor(TOKENS)
    return decoder.logits(decoder(ids, torch.arange(len(ids)), PackedAttention(torch.tensor([len(ids)]))))


def reference_logits(model: Any) -> Tensor:
    return model(torch.tensor([TOKENS])).logits[0]


def peft_model(model_dir: Path, config: LoRAConfig) -> Any:
    targets: list[str] = [*(TARGETS if config.targets == "all-linear" else config.targets)]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return get_peft_model(
        model,
        LoraConfig(
            r=config.rank,
            lora_alpha=cast(int, config.alpha),
            use_rslora=config.rslora,
            target_modules=targets,
            task_type="CAUSAL_LM",
        ),  # type: ignore[arg-type]
    )


def publish(decoder: Decoder, config: LoRAConfig, model_dir: Path, folder: Path) -> Path:
    targets: list[str] = [*(TARGETS if config.targets == "all-linear" else config.targets)]
    described = adapter_config(config, model_dir, targets)
    publisher = WeightsPublisher(folder, model_dir, "float32", keep=2, adapter_config=described)
    return publisher.publish(adapter_tensors(decoder), version=7)


def test_a_fresh_adapter_changes_nothing_and_only_it_is_trained(model_dir: Path) -> None:
    plain = load_decoder(model_dir, torch.float32, CPU)
    decoder = adapted(model_dir, LORA)
    assert torch.equal(logits_of(decoder), logits_of(plain))
    assert all(".lora_" in name for name in trained(decoder))
    assert len(trained(decoder)) == 3 * 7 * 2  # layers, projections, A and B
    # A is uniform in ±1/sqrt(in) (kaiming with a = sqrt(5)), B is zero.
    tensors = adapter_tensors(decoder)
    down = tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
    assert 0.9 / 8 < down.abs().max() <= 1 / 8
    assert not any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    assert named_tensors(decoder).keys() == named_tensors(plain).keys()


def test_the_start_depends_on_the_seed_alone(model_dir: Path) -> None:
    torch.manual_seed(5)
    one = adapter_tensors(adapted(model_dir, LORA, seed=3))
    torch.manual_seed(6)
    two, other = adapter_tensors(adapted(model_dir, LORA, seed=3)), adapter_tensors(adapted(model_dir, LORA, seed=4))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("case", ["llama-biases", "qwen2", "qwen3-biases-window", "mistral-tied-window"])
@pytest.mark.parametrize("config", [LORA, SOME])
def test_logits_and_gradients_are_those_of_peft(
    case: str, config: LoRAConfig, make_reference: MakeReference, tmp_path: Path
) -> None:
    make_reference(case).save_pretrained(tmp_path / "model")
    decoder = adapted(tmp_path / "model", config)
    randomize(decoder)
    published = publish(decoder, config, tmp_path / "model", tmp_path / "weights")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    reference = PeftModel.from_pretrained(base, str(published), is_trainable=True)
    ours, theirs = logits_of(decoder), reference_logits(reference)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    targets = torch.tensor(TOKENS[1:])
    for logits in (ours, theirs):
        torch.nn.functional.cross_entropy(logits[:-1], targets).backward()
    gradients = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    found = gradient_tensors(decoder)
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-5)


def gradient_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The gradients under PEFT's names."""
    values = {id(parameter): parameter for parameter in trained(decoder).values()}
    gradients: dict[str, Tensor] = {}
    for path, module in decoder.named_modules():
        if isinstance(module, LoRALinear):
            for part in module.parts:
                for side in ("lora_A", "lora_B"):
                    weight = values[id(getattr(module, side)[part])]
                    gradients[f"base_model.model.model.{path.rpartition('.')[0]}.{part}.{side}.weight"] = require(
                        weight.grad
                    )
    return gradients


def test_what_peft_saves_is_gone_on_with(model_dir: Path, tmp_path: Path) -> None:
    reference = peft_model(model_dir, LORA)
    torch.manual_seed(0)
    for name, parameter in reference.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    reference.save_pretrained(tmp_path / "theirs")
    decoder = adapted(model_dir, LORA)
    load_adapter(decoder, tmp_path / "theirs")
    torch.testing.assert_close(logits_of(decoder), reference_logits(reference), rtol=1e-5, atol=1e-5)


def test_what_we_publish_is_whole_gone_on_with_and_served(model_dir: Path, tmp_path: Path) -> None:
    decoder = adapted(model_dir, SOME)
    randomize(decoder)
    published = publish(decoder, SOME, model_dir, tmp_path / "weights")
    verify_manifest(published, 7)
    assert (tmp_path / "weights" / "latest").resolve() == published.resolve()
    again = adapted(model_dir, SOME, seed=9)
    load_adapter(again, published)
    assert torch.equal(logits_of(again), logits_of(decoder))
    served = load_decoder(model_dir, torch.float32, CPU)
    bank = AdapterBank(served)
    bank.put(1, read_adapter(published, served))
    bank.route(torch.ones(len(TOKENS), dtype=torch.int64).numpy(), CPU)
    torch.testing.assert_close(logits_of(served), logits_of(decoder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [LORA, LoRAConfig(rank=2, alpha=4.0, rslora=True, targets=SOME.targets)])
def test_an_adapter_of_another_shape_is_not_gone_on_with(other: LoRAConfig, model_dir: Path, tmp_path: Path) -> None:
    published = publish(adapted(model_dir, SOME), SOME, model_dir, tmp_path / "weights")
    with pytest.raises(AdapterMismatch, match=r"other projections|was trained with scale"):
        load_adapter(adapted(model_dir, other), published)


def test_merging_gives_what_peft_merges(model_dir: Path, tmp_path: Path) -> None:
    decoder = adapted(model_dir, LORA)
    randomize(decoder)
    before = {name: tensor.clone() for name, tensor in named_tensors(decoder).items()}
    published = publish(decoder, LORA, model_dir, tmp_path / "weights")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, str(published)).merge_and_unload().state_dict()
    merged = merged_tensors(decoder)
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    exported = WeightsPublisher(tmp_path / "merged", model_dir, "float32", keep=1).publish(merged, version=7)
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    torch.testing.assert_close(reference_logits(loaded), logits_of(decoder), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in named_tensors(decoder).items()), (
        "a copy was merged"
    )


def test_dropout_acts_in_training_alone(model_dir: Path) -> None:
    decoder = adapted(model_dir, LORA.model_copy(update={"dropout": 0.5}))
    randomize(decoder)
    decoder.train()
    torch.manual_seed(0)
    first, second = logits_of(decoder), logits_of(decoder)
    assert not torch.allclose(first, second)
    decoder.eval()
    plain = adapted(model_dir, LORA)
    randomize(plain)
    assert torch.equal(logits_of(decoder), logits_of(plain))


def test_dropout_keeps_the_mean(model_dir: Path) -> None:
    """E[B A dropout(x)] = B A x."""
    decoder = adapted(model_dir, LORA.model_copy(update={"dropout": 0.25}))
    module: Any = decoder.get_submodule("layers.0.mlp.down_proj")
    torch.nn.init.normal_(module.lora_B["down_proj"])
    x = torch.randn(1, module.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.manual_seed(0)
        drawn = module.train()(x.expand(40_000, -1)).mean(0)
        torch.testing.assert_close(drawn, module.eval()(x)[0], rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_survive_checkpointing_and_rounding(model_dir: Path, dtype: torch.dtype) -> None:
    def gradients(checkpointed: bool) -> list[Tensor]:
        decoder = adapted(model_dir, LORA)
        decoder.compute_dtype = dtype
        randomize(decoder)
        if checkpointed:
            for layer in decoder.layers:
                forward = layer.forward
                layer.forward = lambda *a, forward=forward: checkpoint(forward, *a, use_reentrant=False)
        logits = logits_of(decoder)
        assert logits.dtype == dtype
        torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(TOKENS[1:])).backward()
        found = [require(parameter.grad) for parameter in trained(decoder).values()]
        assert {gradient.dtype for gradient in found} == {torch.float32}
        return found

    for one, two in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(one, two)


def test_unknown_targets_are_refused_with_the_valid_ones(model_dir: Path) -> None:
    with pytest.raises(
        UserError, match=r"lora.targets names 'query', .*valid: q_proj, k_proj, .*down_proj, or 'all-linear'"
    ):
        adapted(model_dir, LoRAConfig(targets=["q_proj", "query"]))


def test_no_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="leaves nothing to train"):
        LoRAConfig(targets=[])
