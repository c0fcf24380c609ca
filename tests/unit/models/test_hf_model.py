"""Architectures our decoder does not know, through transformers: the same log-probs and gradients, packed or not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from tests.require import require
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.models.attention import PackedAttention
from tandem.models.hf import load_decoder
from tandem.models.hf_model import HFDecoder, lay_out, load_hf_model
from tandem.models.trainable import load_trainable
from tandem.utils.errors import UserError
from tandem.utils.files import read_json, write_json
from tandem.weights.files import WeightsPublisher

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 4}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}),
}
MIXED = {**KINDS["qwen3_moe"][1], "mlp_only_layers": [0]}
MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    made: dict[str, Path] = {}

    def make(kind: str, family: str | None = None, **options: Any) -> Path:
        if kind not in made:
            known = KINDS.get(kind, (family, {}))
            config = AutoConfig.for_model(require(known[0]), **(SMALL | known[1] | options))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 and "bias" not in name else 0.2 * noise)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


# Three sequences after one beginning, and one for itself.
PREFIX = [5, 9, 33, 12]
RESTS = [[60, 7], [21, 40, 11, 3, 64], [90]]
ALONE = [17, 18, 19, 4, 2, 8]


def packed() -> tuple[Tensor, Tensor, PackedAttention]:
    segments = [PREFIX, RESTS[0], ALONE, RESTS[1], RESTS[2]]
    positions = [range(4), range(4, 6), range(6), range(4, 9), range(4, 5)]
    context = PackedAttention(torch.tensor([4, 2, 6, 5, 1]), torch.tensor([-1, 0, -1, 0, 0]))
    token_ids, places = ([entry for part in parts for entry in part] for parts in (segments, positions))
    return torch.tensor(token_ids), torch.tensor(places), context


# Where the tokens of each sequence lie in the packed ones.
PLACES = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 12, 13, 14, 15, 16], [0, 1, 2, 3, 17], list(range(6, 12))]


def packed_loss(decoder: Any) -> tuple[list[Tensor], Tensor]:
    """Logits of each sequence, and the sum of their losses."""
    token_ids, positions, context = packed()
    logits = decoder.logits(decoder(token_ids, positions, context))
    return with_loss([(logits[place], token_ids[place]) for place in PLACES])


def separate_loss(model: Callable[..., Any]) -> tuple[list[Tensor], Tensor]:
    token_ids, _, _ = packed()
    return with_loss([(model(token_ids[place][None]).logits[0], token_ids[place]) for place in PLACES])


def with_loss(sequences: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Tensor]:
    losses = [nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum") for logits, ids in sequences]
    return [logits for logits, _ in sequences], torch.stack(losses).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logits_and_gradients_are_those_of_the_model_itself(kind: str, make_model: MakeModel) -> None:
    folder = make_model(kind)
    decoder = load_hf_model(folder, torch.float32, CPU)
    decoder.train()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits, loss = packed_loss(decoder)
    expected, expected_loss = separate_loss(reference)
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected_loss.backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in decoder.model.named_parameters():
        gradient = theirs[name].grad
        assert gradient is not None and parameter.grad is not None, name
        limit = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=limit)
    assert len(decoder.layers) == 2


def test_qwen3_is_what_our_decoder_computes(make_model: MakeModel) -> None:
    folder = make_model("qwen3", "qwen3", head_dim=8, tie_word_embeddings=True)
    native, hf = load_decoder(folder, torch.float32, CPU), load_hf_model(folder, torch.float32, CPU)
    (ours, loss), (theirs, hf_loss) = packed_loss(native), packed_loss(hf)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.log_softmax(-1), other.log_softmax(-1), rtol=1e-5, atol=1e-5)
    loss.backward()
    hf_loss.backward()
    embedding = hf.model.model.embed_tokens.weight.grad
    torch.testing.assert_close(native.embed_tokens.weight.grad, embedding, rtol=1e-5, atol=1e-5)
    qkv = [getattr(hf.layers[1].self_attn, f"{name}_proj").weight.grad for name in "qkv"]
    gradient = native.get_parameter("layers.1.self_attn.qkv_proj.weight").grad
    torch.testing.assert_close(gradient, torch.cat(qkv), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_is_loaded_by_transformers(kind: str, make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(kind)
    decoder = load_hf_model(folder, torch.float32, CPU)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.01)
    published = WeightsPublisher(tmp_path, folder, "float32", keep=1).publish(decoder.merged_tensors(), version=1)
    assert load_file(published / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    again = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).eval()
    (ours, _), (theirs, _) = packed_loss(decoder.eval()), separate_loss(again)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def randomize(decoder: HFDecoder) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, parameter in decoder.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.2, generator=generator)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("phi3", ["qkv_proj", "down_proj"]), ("gpt2", "all-linear"), ("mixtral", "all-linear"), ("qwen3_moe", ["q_proj"])],
)
def test_adapters_go_through_peft(kind: str, targets: Any, make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(kind)
    config = LoRAConfig(rank=3, alpha=5.0, targets=targets)
    decoder = load_hf_model(folder, torch.float32, CPU)
    plain, _ = packed_loss(decoder)
    decoder.attach_lora(config, seed=1)
    fresh, _ = packed_loss(decoder)
    assert all(torch.equal(one, other) for one, other in zip(plain, fresh, strict=True))
    randomize(decoder)
    assert all(".lora_" in name for name, parameter in decoder.named_parameters() if parameter.requires_grad)
    logits, loss = packed_loss(decoder)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in decoder.parameters() if p.requires_grad)

    described = decoder.adapter_config(config, folder)
    publisher = WeightsPublisher(tmp_path / "adapter", folder, "float32", keep=1, adapter_config=described)
    published = publisher.publish(decoder.adapter_tensors(), version=1)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, _ = separate_loss(PeftModel.from_pretrained(base, str(published)).eval())
    merged = WeightsPublisher(tmp_path / "merged", folder, "float32", keep=1).publish(decoder.merged_tensors(), 1)
    exported, _ = separate_loss(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval())
    for ours, before, theirs, whole in zip(logits, plain, expected, exported, strict=True):
        assert not torch.allclose(ours, before, atol=1e-2)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-4)


def test_the_start_of_an_adapter_depends_on_the_seed_alone(make_model: MakeModel) -> None:
    def start(seed: int) -> dict[str, Tensor]:
        decoder = load_hf_model(make_model("olmo2"), torch.float32, CPU)
        decoder.attach_lora(LoRAConfig(rank=2), seed)
        return decoder.adapter_tensors()

    before = torch.get_rng_state()
    one = start(4)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    two, other = start(4), start(5)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_unknown_targets_are_refused_with_the_valid_ones(make_model: MakeModel) -> None:
    decoder = load_hf_model(make_model("gpt_neox"), torch.float32, CPU)
    with pytest.raises(UserError, match=r"names 'q_proj', .*valid: dense, dense_4h_to_h, .*query_key_value"):
        decoder.attach_lora(LoRAConfig(targets=["q_proj"]), seed=0)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_adapters_of_stacked_experts_are_refused(make_model: MakeModel) -> None:
    """A dense layer among the others has projections of the names that PEFT takes for the experts'."""
    decoder = load_hf_model(make_model("dense_first", "qwen3_moe", **MIXED), torch.float32, CPU)
    with pytest.raises(UserError, match=r"the stacked experts of Qwen3MoeFor.*for example \['k_proj', 'o_proj', 'q_"):
        decoder.attach_lora(LoRAConfig(), seed=0)
    decoder = load_hf_model(make_model("dense_first"), torch.float32, CPU)
    with pytest.raises(UserError, match=r"lora\.targets = \['up_proj'\]: PEFT refuses it: Cannot convert"):
        decoder.attach_lora(LoRAConfig(targets=["up_proj"]), seed=0)


def test_projections_of_a_class_of_their_own_are_found(make_model: MakeModel) -> None:
    decoder = load_hf_model(make_model("falcon", "falcon"), torch.float32, CPU)
    decoder.attach_lora(LoRAConfig(targets=["query_key_value"]), seed=0)
    assert decoder.adapter_targets == ["query_key_value"]


def test_capped_logits_are_refused_by_name(make_model: MakeModel) -> None:
    folder = make_model("gemma2", "gemma2", head_dim=8, final_logit_softcapping=2.0)
    with pytest.raises(UserError, match=r"final_logit_softcapping = 2\.0 caps the logits; impl = 'hf' trains"):
        load_hf_model(folder, torch.float32, CPU)


def test_a_biased_output_matrix_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(UserError, match="the output matrix has a bias"):
        load_hf_model(make_model("phi", "phi"), torch.float32, CPU)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 caps the logits"),
        ("phi", {}, "the output matrix has a bias"),
    ],
)
def test_what_cannot_be_measured_in_a_fresh_model_is_refused(
    family: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Its logits are far below the cap, and its bias is zero."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | options), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        load_hf_model(tmp_path, torch.float32, CPU)


def test_what_is_no_causal_model_is_refused_in_one_line(tmp_path: Path) -> None:
    shape = {"vocab_size": 97, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **shape)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"transformers cannot load it: .*T5Config") as raised:
        load_hf_model(tmp_path, torch.float32, CPU)
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "zorro"}, "model type `zorro`"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers': TypeError: .* expected int, got str"),
        ({"intermediate_size": 56}, "mismatched_sizes"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_one_line(
    change: dict[str, Any], reason: str, make_model: MakeModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(make_model("olmo2"), tmp_path / "changed")
    write_json(folder / "config.json", read_json(folder / "config.json") | change)
    with pytest.raises(UserError, match=rf"model\.name = .*: transformers cannot load it: .*{reason}") as raised:
        load_hf_model(folder, torch.float32, CPU)
    assert len(str(raised.value)) < 500 and "\n" not in str(raised.value)


def test_code_of_a_model_is_not_run_and_nobody_is_asked(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers knows such models, and none of them that writes."""
    folder = shutil.copytree(make_model("olmo2"), tmp_path / "code")
    described = {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "odd.Model"}}
    write_json(folder / "config.json", read_json(folder / "config.json") | described)
    (folder / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    with pytest.raises(UserError, match=r"'.*code' needs the Python code that it brings.* --model.trust-remote-code"):
        load_hf_model(folder, torch.float32, CPU)
    assert not asked and not (tmp_path / "ran").exists()


def test_what_does_not_compute_as_others_do_is_refused_in_one_line(make_model: MakeModel) -> None:
    """What lies below the output matrix of Llama 4 returns logits, without hidden states."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    folder = make_model("llama4", "llama4_text", head_dim=8, **experts)
    with pytest.raises(UserError, match=r"model\.impl = 'hf' does not work with Llama4ForCausalLM \(") as raised:
        load_trainable(ModelConfig(name=folder, impl="hf"), CPU)
    assert len(str(raised.value)) < 500 and "\n" not in str(raised.value)


def test_a_model_without_attention_heads(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba", vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    assert load_hf_model(tmp_path, torch.float32, CPU).spec.q_size == 0


def test_dropout_of_the_model_is_off(make_model: MakeModel) -> None:
    """GPT-2's configuration asks for 0.1 everywhere; rollouts know nothing of it."""
    decoder = load_hf_model(make_model("gpt2"), torch.float32, CPU).train()
    assert AutoConfig.from_pretrained(make_model("gpt2")).resid_pdrop == 0.1
    (one, _), (two, _) = packed_loss(decoder), packed_loss(decoder)
    assert all(torch.equal(first, second) for first, second in zip(one, two, strict=True))


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Roots, some with children after them."""
    lengths: list[int] = []
    parents: list[int] = []
    for num_children in draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        root = len(lengths)
        lengths += draw(st.lists(st.integers(1, 5), min_size=1 + num_children, max_size=1 + num_children))
        parents += [-1] + [root] * num_children
    return lengths, parents


@given(segments())
def test_every_row_is_a_sequence_and_every_token_has_a_cell(given_segments: tuple[list[int], list[int]]) -> None:
    lengths, parents = given_segments
    rows, cells = lay_out(torch.tensor(lengths), torch.tensor(parents))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    tokens = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]
    expected = [
        (tokens[parent] if parent >= 0 else []) + tokens[i] for i, parent in enumerate(parents) if i not in parents
    ]
    assert len(rows) == len(expected)
    for row, sequence in zip(rows.tolist(), expected, strict=True):
        assert row[: len(sequence)] == sequence
    assert rows.flatten()[cells].tolist() == list(range(sum(lengths)))
    # A token's cell lies in a row of its own sequence, at its place in it.
    columns = rows.shape[1]
    for token, cell in enumerate(cells.tolist()):
        assert expected[cell // columns][cell % columns] == token
