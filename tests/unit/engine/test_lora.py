"""LoRA adapters made by PEFT, served beside the model and beside each other."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import EngineBusy, GenerationRequest, GenerationResult, Sampling
from tandem.models.hf import load_decoder
from tandem.models.lora import WEIGHTS, AdapterBank, read_adapter
from tandem.utils.files import read_json, write_json
from tandem.utils.manifest import write_manifest
from tandem.weights.versions import AdapterRefused

PROMPT = [5, 9, 33, 12, 60, 7, 21, 40, 11]
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MakeEngine = Callable[..., NativeEngine]
MakeAdapter = Callable[..., Path]


@pytest.fixture
def make_adapter(make_model: Callable[..., Path], tmp_path: Path) -> MakeAdapter:
    def make(name: str, targets: list[str], seed: int, family: str = "qwen3", **options: Any) -> Path:
        model = AutoModelForCausalLM.from_pretrained(make_model(family), dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_modules=targets, **options))
        torch.manual_seed(seed)
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(str(tmp_path / name))
        return tmp_path / name

    return make


def ask(engine: NativeEngine, adapter: str | None, sampling: Sampling, n: int = 1) -> "queue.Queue[Any]":
    answers: queue.Queue[Any] = queue.Queue()
    engine.submit(GenerationRequest(PROMPT, sampling, n, adapter=adapter), answers.put)
    return answers


def logprobs_of(model: Any, completion: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + completion])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_adapters_and_the_model_run_side_by_side(
    family: str, make_model: Callable[..., Path], make_adapter: MakeAdapter, make_engine: MakeEngine
) -> None:
    paths = {
        "all": make_adapter("all", EVERYWHERE, 1, family),
        "attention": make_adapter("attention", ["q_proj", "v_proj"], 2, family, use_rslora=True),
    }
    engine = make_engine(family)
    for name, path in paths.items():
        engine.load_adapter(name, path, version=len(name))
    assert engine.adapters == {name: str(path) for name, path in paths.items()}
    engine.pause()
    asked = {
        name: ask(engine, name, Sampling(8, seed=3, ignore_eos=True), n=2) for name in ("all", None, "attention", None)
    }
    engine.resume()
    completions = set()
    for name, answers in asked.items():
        model = AutoModelForCausalLM.from_pretrained(make_model(family), dtype=torch.float32)
        reference = model if name is None else PeftModel.from_pretrained(model, str(paths[name]))
        result = answers.get(timeout=30)
        assert isinstance(result, GenerationResult)
        for sample in result.samples:
            assert sample.logprobs == pytest.approx(logprobs_of(reference.eval(), sample.token_ids), abs=1e-4)
            assert sample.versions == [0 if name is None else len(name)] * 8
            completions.add(tuple(sample.token_ids))
    assert len(completions) == 6
    # The same prompt under another adapter is another prefix.
    again = ask(engine, "all", Sampling(2)).get(timeout=30)
    assert again.num_cached_tokens == 8


def test_an_adapter_is_swapped_in_place_while_its_requests_run(
    make_model: Callable[..., Path],
    make_adapter: MakeAdapter,
    make_engine: MakeEngine,
    hold_after: Callable[[NativeEngine, int], threading.Event],
) -> None:
    old, new = make_adapter("old", EVERYWHERE, 1), make_adapter("new", EVERYWHERE, 2)
    engine = make_engine()
    engine.load_adapter("policy", old, version=1)
    with pytest.raises(AdapterRefused, match="'policy' is loaded already"):
        engine.load_adapter("policy", new, version=2)
    reached = hold_after(engine, 4)
    answers = ask(engine, "policy", Sampling(9, seed=1, ignore_eos=True), n=2)
    assert reached.wait(30)
    engine.load_adapter("policy", new, version=2, replace=True)
    engine.resume()
    model = AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32)
    for sample in answers.get(timeout=30).samples:
        assert sample.versions == [1] * 4 + [2] * 5
        before = logprobs_of(PeftModel.from_pretrained(model, str(old)).eval(), sample.token_ids)
        model = AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32)
        after = logprobs_of(PeftModel.from_pretrained(model, str(new)).eval(), sample.token_ids)
        model = AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32)
        assert sample.logprobs == pytest.approx(before[:4] + after[4:], abs=1e-4)
    assert ask(engine, "policy", Sampling(2)).get(timeout=30).num_cached_tokens == 8


def test_a_bank_replaces_an_adapter_where_it_lies(make_model: Callable[..., Path], make_adapter: MakeAdapter) -> None:
    decoder = load_decoder(make_model(), torch.float32, torch.device("cpu"))
    everywhere, other, attention = (
        read_adapter(make_adapter(str(seed), targets, seed), decoder)
        for seed, targets in enumerate((EVERYWHERE, EVERYWHERE, ["q_proj", "v_proj"]))
    )
    bank, tokens = AdapterBank(decoder), np.arange(4)
    device = torch.device("cpu")
    assert bank.route(tokens, device) == 0
    bank.put(1, everywhere)
    [place] = bank.places.values()
    held = {name: part.up.data_ptr() for name, part in everywhere.items()}
    bank.put(1, other)
    assert bank.places == {1: place}
    for name, part in everywhere.items():
        assert part.up.data_ptr() == held[name] and torch.equal(part.up, other[name].up)
        assert torch.equal(part.down, other[name].down)
    bank.put(1, attention)
    assert bank.places[1] != place
    bank.put(2, other)
    assert len(set(bank.places.values())) == 2
    assert bank.route(np.full(4, 2), device) == 2 and bank.route(np.zeros(4, np.int64), device) == 0
    assert bank.route(np.array([2, 2, 0, 2]), device) is None and bank.route(np.array([1, 2]), device) is None
    bank.remove(1)
    assert bank.places.keys() == {2}


def test_wait_lets_requests_end_under_the_adapter_they_began_with(
    make_adapter: MakeAdapter, make_engine: MakeEngine, hold_after: Callable[[NativeEngine, int], threading.Event]
) -> None:
    old, new = make_adapter("old", EVERYWHERE, 1), make_adapter("new", EVERYWHERE, 2)
    engine = make_engine()
    engine.load_adapter("policy", old, version=1)
    reached = hold_after(engine, 4)
    running = ask(engine, "policy", Sampling(9, ignore_eos=True))
    assert reached.wait(30)
    with pytest.raises(EngineBusy, match="resume it first"):
        engine.load_adapter("policy", new, version=2, replace=True, mode="wait")
    engine.resume()
    engine.load_adapter("policy", new, version=2, replace=True, mode="wait")
    assert running.get(timeout=30).samples[0].versions == [1] * 9
    assert ask(engine, "policy", Sampling(3, ignore_eos=True)).get(timeout=30).samples[0].versions == [2] * 3


def test_unloading_ends_its_requests_and_forgets_it(
    make_adapter: MakeAdapter,
    make_engine: MakeEngine,
    hold_after: Callable[[NativeEngine, int], threading.Event],
) -> None:
    engine = make_engine()
    engine.load_adapter("policy", make_adapter("policy", EVERYWHERE, 1))
    reached = hold_after(engine, 3)
    answers = ask(engine, "policy", Sampling(30, ignore_eos=True))
    assert reached.wait(30)
    engine.unload_adapter("policy")
    assert answers.get(timeout=30).samples[0].finish_reason == "abort"
    engine.resume()
    for call in (lambda: ask(engine, "policy", Sampling(2)), lambda: engine.unload_adapter("policy")):
        with pytest.raises(AdapterRefused, match="no adapter named 'policy'; loaded: none"):
            call()
    assert len(ask(engine, None, Sampling(2, ignore_eos=True)).get(timeout=30).samples[0].token_ids) == 2


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def with_dora(folder: Path) -> None:
    write_json(folder / "adapter_config.json", read_json(folder / "adapter_config.json") | {"use_dora": True})


def damaged(folder: Path) -> None:
    write_manifest(folder, 1)
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def with_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_text(text)


def with_key(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        write_json(folder / "adapter_config.json", read_json(folder / "adapter_config.json") | {key: value})

    return change


def with_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    """The first projection of the first layer, in another shape; its neighbours stay."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        name = next(name for name in tensors if "layers.0.self_attn.q_proj.lora_A" in name)
        save_file(tensors | {name: torch.ones(shape, dtype=dtype)}, folder / WEIGHTS)

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (with_config("[]"), "adapter_config.json must hold a JSON object, not list"),
        (with_config("7"), "adapter_config.json must hold a JSON object, not int"),
        (with_config("{"), "adapter_config.json is not JSON"),
        (with_config("[" * 100_000), "adapter_config.json is not JSON"),
        (with_key("peft_type", ["LORA"]), "peft_type is"),
        (with_key("lora_alpha", "16"), "lora_alpha is '16', not a number"),
        (with_key("lora_alpha", True), "lora_alpha is True, not a number"),
        (with_key("lora_alpha", float("inf")), "lora_alpha is inf, not a number"),
        (with_key("lora_alpha", float("nan")), "lora_alpha is nan, not a number"),
        (with_key("use_rslora", "no"), "use_rslora is 'no'"),
        (with_key("bias", {"a": 1}), "bias = .* is not supported"),
        (with_tensor(()), "must be matrices"),
        (with_tensor((4,)), "must be matrices"),
        (with_tensor((0, 32)), "must be matrices"),
        (with_tensor((4, 32), torch.int64), "must be matrices"),
        (with_tensor((4, 31)), "q_proj has shapes"),
        (without_config, "no adapter_config.json"),
        (without_weights, "adapter_model.safetensors cannot be read"),
        (with_dora, "use_dora = True is not supported"),
        (damaged, "does not match its checksum"),
    ],
)
def test_a_bad_adapter_is_refused(
    damage: Callable[[Path], None], reason: str, make_adapter: MakeAdapter, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    folder = make_adapter("bad", EVERYWHERE, 1)
    damage(folder)
    with pytest.raises(AdapterRefused, match=reason):
        engine.load_adapter("bad", folder)
    assert engine.adapters == {}


def test_an_adapter_of_another_model_is_refused(make_adapter: MakeAdapter, make_engine: MakeEngine) -> None:
    folder = make_adapter("other", ["o_proj"], 1, "llama")  # heads of another size
    engine = make_engine("qwen3")
    with pytest.raises(AdapterRefused, match=r"o_proj has shapes .* the model needs"):
        engine.load_adapter("other", folder)
    save_file({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 64)}, folder / WEIGHTS)
    with pytest.raises(AdapterRefused, match="not a weight of a LoRA adapter that can be served"):
        engine.load_adapter("other", folder)


def test_a_request_that_was_on_its_way_meets_nothing_of_a_replaced_adapter(
    make_model: Callable[..., Path], make_adapter: MakeAdapter, make_engine: MakeEngine
) -> None:
    """The adapter changes between a request's submission and its arrival in the engine's thread."""
    old, new = make_adapter("old", EVERYWHERE, 1), make_adapter("new", EVERYWHERE, 2)
    engine = make_engine()
    engine.load_adapter("policy", old)
    ask(engine, "policy", Sampling(2)).get(timeout=30)  # now cached under the old adapter
    add = engine.core.add

    def replace_then_add(request: Any) -> None:
        engine.core.put_adapter(1, read_adapter(new, engine.core.decoder), None)
        add(request)

    engine.core.add = replace_then_add  # type: ignore[method-assign]
    result = ask(engine, "policy", Sampling(6, seed=1, ignore_eos=True)).get(timeout=30)
    assert result.num_cached_tokens == 0
    model = AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32)
    expected = logprobs_of(PeftModel.from_pretrained(model, str(new)).eval(), result.samples[0].token_ids)
    assert result.samples[0].logprobs == pytest.approx(expected, abs=1e-4)
