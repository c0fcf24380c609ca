"""Weight updates while serving: versions, recomputed caches, and checkpoints that must be refused."""

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import EngineBusy, GeneratedSample, GenerationRequest, Sampling
from tandem.utils.files import read_json, write_json
from tandem.utils.manifest import write_manifest
from tandem.weights.versions import WeightUpdateRefused

Generate = Callable[[NativeEngine, list[GenerationRequest]], list[list[GeneratedSample]]]
HoldAfter = Callable[[NativeEngine, int], threading.Event]
Start = Callable[[NativeEngine, GenerationRequest], "Future[list[GeneratedSample]]"]
PROMPT = [5, 9, 33, 12, 60, 7, 21, 40, 11]


def publish(source: Path, target: Path, version: int) -> Path:
    shutil.copytree(source, target)
    write_manifest(target, version)
    return target


def test_tokens_before_and_after_an_update_carry_their_versions_and_logprobs(
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    start: Start,
    hold_after: HoldAfter,
    reference_logprobs: Callable[..., list[float]],
    tmp_path: Path,
) -> None:
    engine = make_engine()
    new = publish(make_model(seed=1), tmp_path / "new", version=3)
    six_steps = hold_after(engine, 6)
    future = start(engine, GenerationRequest(PROMPT, Sampling(14, seed=5, ignore_eos=True), n=3))
    assert six_steps.wait(30)
    engine.update_weights(new, 3)
    assert engine.version == 3
    engine.resume()
    for sample in future.result(timeout=30):
        assert sample.versions == [0] * 6 + [3] * 8
        old = reference_logprobs(make_model(seed=0), PROMPT, sample.token_ids)
        updated = reference_logprobs(make_model(seed=1), PROMPT, sample.token_ids)
        assert sample.logprobs == pytest.approx(old[:6] + updated[6:], abs=1e-4)


def test_an_update_may_go_back_to_an_older_version(
    make_model: Callable[..., Path], make_engine: Callable[..., NativeEngine], generate: Generate, tmp_path: Path
) -> None:
    engine = make_engine()
    request = GenerationRequest(PROMPT, Sampling(5, 0.0, ignore_eos=True))
    before = generate(engine, [request])[0][0]
    engine.update_weights(publish(make_model(seed=1), tmp_path / "new", 7), 7)
    changed = generate(engine, [request])[0][0]
    engine.update_weights(publish(make_model(seed=0), tmp_path / "old", 0), 0)
    again = generate(engine, [request])[0][0]
    assert changed.versions == [7] * 5 and changed.logprobs != before.logprobs
    assert again == before


@pytest.mark.parametrize("free_bytes", [1 << 33, 1 << 10], ids=["memory to pack", "no memory to pack"])
def test_an_update_in_bfloat16_answers_as_an_engine_of_those_weights(
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    generate: Generate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
) -> None:
    """A CPU computes with a second copy of the weights, where there is memory for one."""
    monkeypatch.setattr("tandem.engine.build.free_memory_bytes", lambda: free_bytes)
    new = make_model(seed=1)
    model = {"dtype": "bfloat16"}
    updated = make_engine(device="cpu", kv_cache_tokens=256, model=model | {"name": make_model(seed=0)})
    fresh = make_engine(device="cpu", kv_cache_tokens=256, model=model | {"name": new})
    can_pack = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert updated.core.decoder.is_packed == (can_pack and free_bytes == 1 << 33)
    updated.update_weights(publish(new, tmp_path / "new", 1), 1)
    requests = [GenerationRequest(PROMPT, Sampling(8, seed=3, ignore_eos=True), n=2)]
    for ours, expected in zip(*(generate(engine, requests)[0] for engine in (updated, fresh)), strict=True):
        assert (ours.token_ids, ours.logprobs) == (expected.token_ids, expected.logprobs)


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def flipped_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def without_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def wrong_shape(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"model.norm.weight": torch.ones(33)})


def missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: {name: t for name, t in tensors.items() if name != "model.norm.weight"})


def not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors here")
    write_manifest(folder, 1)


def another_model(folder: Path) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | {"num_hidden_layers": 3})
    write_manifest(folder, 1)


def whole_numbers(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int64)})


def with_config(text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "config.json").write_text(text)
        write_manifest(folder, 1)

    return damage


def with_size(key: str, value: object) -> Callable[[Path], None]:
    return lambda folder: with_config(json.dumps(read_json(folder / "config.json") | {key: value}))(folder)


def with_manifest(manifest: object) -> Callable[[Path], None]:
    return lambda folder: write_json(folder / "manifest.json", manifest)


def other_version(folder: Path) -> None:
    write_manifest(folder, 2)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)
    write_manifest(folder, 1)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_weights, "is missing"),
        (flipped_byte, "does not match its checksum"),
        (cut_short, "bytes, the manifest says"),
        (without_manifest, r"has no manifest\.json"),
        (wrong_shape, r"model\.norm\.weight has shape \(33,\), the model needs \(32,\)"),
        (missing_tensor, r"1 tensors are missing, first 'model\.norm\.weight'"),
        (not_safetensors, "model.safetensors|header"),
        (another_model, "another model"),
        (other_version, "holds version 2, not 1"),
        (whole_numbers, r"model\.norm\.weight is of type torch\.int64"),
        (with_config("[]"), r"config\.json must hold a JSON object, not list"),
        (with_config("{"), r"config\.json is not JSON"),
        (with_config("[" * 100_000), r"config\.json is not JSON"),
        (with_config("{}"), "is not supported"),
        (with_size("vocab_size", "64"), "vocab_size = '64' must be a whole number"),
        (with_size("hidden_size", -32), "hidden_size = -32 must be a whole number"),
        (with_size("num_hidden_layers", 10**12), "num_hidden_layers = 1000000000000 must be a whole number"),
        (with_size("architectures", "Qwen3ForCausalLM"), "architectures = .* must be a list of names"),
        (with_size("rope_parameters", [1]), r"rope_parameters = \[1\] must be a table"),
        (with_manifest([]), r"manifest\.json cannot be read: .* not list"),
        (with_manifest({"version": "1", "files": {}}), "version = '1' is not a number"),
        (with_manifest({"version": 1, "files": []}), "files must be a table"),
        (with_manifest({"version": 1, "files": {"config.json": 7}}), "files.config.json must have size_bytes"),
        (with_manifest({"version": 1, "files": {"config.json": {"size_bytes": "1"}}}), "must have size_bytes"),
        (
            with_manifest({"version": 1, "files": {"../../etc/passwd": {"size_bytes": 1, "sha256": ""}}}),
            r"files\.'\.\./\.\./etc/passwd' is not a file of this directory",
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_and_the_old_weights_keep_serving(
    damage: Callable[[Path], None],
    reason: str,
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    generate: Generate,
    tmp_path: Path,
) -> None:
    engine = make_engine(prefix_caching=False)  # which would compute the prompt in other batches the second time
    request = GenerationRequest(PROMPT, Sampling(5, 0.0, ignore_eos=True))
    before = generate(engine, [request])
    folder = publish(make_model(seed=1), tmp_path / "bad", version=1)
    damage(folder)
    with pytest.raises(WeightUpdateRefused, match=reason):
        engine.update_weights(folder, 1)
    assert engine.version == 0 and generate(engine, [request]) == before


def test_a_missing_folder_and_a_negative_version_are_refused(
    make_engine: Callable[..., NativeEngine], tmp_path: Path
) -> None:
    engine = make_engine()
    with pytest.raises(WeightUpdateRefused, match="there is no directory"):
        engine.update_weights(tmp_path / "nowhere", 1)
    with pytest.raises(WeightUpdateRefused, match="0 or more, not -1"):
        engine.update_weights(tmp_path, -1)


def test_version_0_may_be_any_model_directory_but_not_a_damaged_one(
    make_model: Callable[..., Path], make_engine: Callable[..., NativeEngine], tmp_path: Path
) -> None:
    engine = make_engine()
    engine.update_weights(publish(make_model(seed=1), tmp_path / "new", 7), 7)
    engine.update_weights(make_model(seed=0), 0)  # never published: it has no manifest
    assert engine.version == 0
    engine.update_weights(tmp_path / "new", 0)  # the end of one run is where the next one starts
    flipped_byte(tmp_path / "new")
    with pytest.raises(WeightUpdateRefused, match="does not match its checksum"):
        engine.update_weights(tmp_path / "new", 0)


def test_wait_lets_running_requests_end_and_begins_no_new_ones(
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(max_sequences=2, kv_cache_tokens=68)
    new = publish(make_model(seed=1), tmp_path / "new", version=1)
    begun, asked, call = threading.Event(), threading.Event(), engine._call

    def hold(index: int, part: object) -> None:
        """The engine waits until the update is asked for: reading weights takes longer than all that is generated."""
        begun.set()
        assert asked.wait(60)

    def tell_and_call(*arguments: Any) -> Any:
        asked.set()
        return call(*arguments)

    running = start(engine, GenerationRequest(PROMPT, Sampling(40, seed=1, ignore_eos=True)))
    engine.submit(GenerationRequest(PROMPT, Sampling(3, ignore_eos=True)), lambda _: None, hold)
    assert begun.wait(60)
    waiting = [start(engine, GenerationRequest(PROMPT, Sampling(5, seed=i, ignore_eos=True))) for i in range(3)]
    monkeypatch.setattr(engine, "_call", tell_and_call)
    engine.update_weights(new, 1, mode="wait")
    assert running.done() and running.result()[0].versions == [0] * 40
    # What had not begun was generated by the new weights alone, even if it was queued before.
    versions = [version for future in waiting for version in future.result(timeout=30)[0].versions]
    assert set(versions[-5:]) == {1}
    for future in waiting:
        assert len(set(future.result()[0].versions)) == 1


def test_wait_is_refused_while_paused_and_abandoned_when_the_engine_stops(
    make_model: Callable[..., Path], make_engine: Callable[..., NativeEngine], start: Start, tmp_path: Path
) -> None:
    engine = make_engine()
    new = publish(make_model(seed=1), tmp_path / "new", version=1)
    engine.pause()
    with pytest.raises(EngineBusy, match="paused"):
        engine.update_weights(new, 1, mode="wait")
    assert engine.version == 0
    engine.resume()
    start(engine, GenerationRequest(PROMPT, Sampling(50, ignore_eos=True)))
    engine.pause(mode="wait")
    assert engine.paused and engine.stats.num_running == 0


def test_abort_ends_what_has_begun_with_what_it_has(
    make_model: Callable[..., Path],
    make_engine: Callable[..., NativeEngine],
    start: Start,
    hold_after: HoldAfter,
    tmp_path: Path,
) -> None:
    engine = make_engine(max_sequences=2)
    new = publish(make_model(seed=1), tmp_path / "new", version=1)
    reached = hold_after(engine, 5)
    running = start(engine, GenerationRequest(PROMPT, Sampling(30, seed=1, ignore_eos=True), n=2))
    queued = start(engine, GenerationRequest(PROMPT, Sampling(3, seed=1, ignore_eos=True)))
    assert reached.wait(30)
    engine.update_weights(new, 1, mode="abort")
    for sample in running.result(timeout=30):
        assert sample.finish_reason == "abort" and sample.versions == [0] * 5
    engine.resume()
    assert queued.result(timeout=30)[0].versions == [1] * 3
    assert engine.stats.finished == {"abort": 2, "length": 1}
