"""LoRA adapters under vLLM: loaded, replaced in place while requests run, every token with the version that made it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from tests.integration.processes import wait_until
from tests.scale.vllm_server import TRIES, VllmServer, send_until_running, start
from transformers import AutoModelForCausalLM

from tandem.config.lora import LoRAConfig
from tandem.config.vllm import adapter_flags
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder
from tandem.models.lora_training import adapter_config, adapter_tensors, attach_lora, targets_of
from tandem.weights.files import WeightsPublisher

PROMPT = [1, 4, 101, 71, 72, 73, 74, 2, 101, 1, 5, 101]
NAME = "tandem-policy"
LORA = LoRAConfig(rank=4, alpha=8.0)
NUM_TOKENS = 300  # enough for an update to arrive in between


@pytest.fixture(scope="module")
def server(vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in adapter_flags(LORA.rank).items()]
    started = start(vllm_python, tiny_model, log, "--drain-timeout-s", "1", "--max-sequences", "8", *flags)
    yield started
    started.end()


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Random adapters, far from the model and from each other, as the trainer publishes them."""
    folder = tmp_path_factory.mktemp("weights")
    made = {}
    for version in (1, 2, 3):
        decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
        attach_lora(decoder, LORA)
        generator = torch.Generator().manual_seed(version)
        for name, parameter in decoder.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.15, generator=generator)
        made[version] = publish(decoder, LORA, tiny_model, folder, version)
    return made


def publish(decoder: Decoder, lora: LoRAConfig, model_dir: Path, folder: Path, version: int) -> Path:
    described = adapter_config(lora, model_dir, targets_of(lora))
    publisher = WeightsPublisher(folder, model_dir, "float32", keep=9, adapter_config=described)
    return publisher.publish(adapter_tensors(decoder), version)


def load(server: VllmServer, path: Path, version: int | None, **options: Any) -> httpx.Response:
    body = {"lora_name": NAME, "lora_path": str(path), "load_inplace": True, "version": version, **options}
    return server.http.post("/load_lora_adapter", json=body)


def logprobs_by_version(model_dir: Path, adapters: dict[int, Path], completion: list[int]) -> dict[int, torch.Tensor]:
    """What each version says of every token, by PEFT; 0 is the model itself."""
    found = {}
    for version in (0, *adapters):
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        if version:
            model = PeftModel.from_pretrained(model, str(adapters[version]))
        with torch.no_grad():
            logits = model.eval()(torch.tensor([PROMPT + completion])).logits[0, len(PROMPT) - 1 : -1]
        found[version] = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    return found


def assert_made_by_their_versions(choice: dict[str, Any], model_dir: Path, adapters: dict[int, Path]) -> None:
    given = torch.tensor(choice["logprobs"]["token_logprobs"])
    versions = choice["weight_versions"]
    assert len(versions) == len(choice["token_ids"]) == len(given)
    expected = logprobs_by_version(model_dir, adapters, choice["token_ids"])
    for version, logprobs in expected.items():
        own = torch.tensor([made_by == version for made_by in versions])
        if own.any():
            torch.testing.assert_close(given[own], logprobs[own], rtol=1e-3, atol=2e-3)
        if (~own).any():
            assert (given - logprobs)[~own].abs().mean() > 0.05, "versions that cannot be told apart prove nothing"


def test_rollouts_come_from_the_adapter_that_was_loaded_last(
    server: VllmServer, tiny_model: Path, adapters: dict[int, Path]
) -> None:
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 24, "ignore_eos": True, "seed": 1}
    for version in (1, 2):
        answer = load(server, adapters[version], version)
        assert (answer.status_code, answer.json()["lora_name"]) == (200, NAME), answer.text
        for choice in server.complete(model=NAME, **body):
            assert choice["weight_versions"] == [version] * 24
            assert_made_by_their_versions(choice, tiny_model, adapters)
        for choice in server.complete(**body):
            assert choice["weight_versions"] == [0] * 24
            assert_made_by_their_versions(choice, tiny_model, adapters)


def test_requests_under_way_go_on_under_the_new_adapter_token_by_token(
    server: VllmServer, tiny_model: Path, adapters: dict[int, Path]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    asked = [{"model": NAME, "n": 2, "seed": 0}, {"model": NAME, "n": 2, "seed": 1}, {}]
    for _ in range(TRIES):
        assert load(server, adapters[1], 1).status_code == 200
        with ThreadPoolExecutor() as pool:
            *adapted, plain = send_until_running(
                server, lambda pool=pool: [pool.submit(server.complete, **options, **body) for options in asked]
            )
            for version in (2, 3):
                assert load(server, adapters[version], version).status_code == 200
            choices = [choice for future in adapted for choice in future.result()]
            [unchanged] = plain.result()
        for choice in choices:
            assert_made_by_their_versions(choice, tiny_model, adapters)
        assert unchanged["weight_versions"] == [0] * NUM_TOKENS
        assert_made_by_their_versions(unchanged, tiny_model, adapters)
        if any(len(set(choice["weight_versions"])) > 1 for choice in choices):
            return
    pytest.fail("no update came in between")


def test_wait_lets_requests_end_under_the_old_adapter(server: VllmServer, adapters: dict[int, Path]) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    for _ in range(TRIES):
        assert load(server, adapters[1], 1).status_code == 200
        with ThreadPoolExecutor() as pool:
            [future] = send_until_running(server, lambda pool=pool: [pool.submit(server.complete, model=NAME, **body)])
            assert load(server, adapters[2], 2, mode="wait").status_code == 200
            versions = future.result()[0]["weight_versions"]
        assert versions in ([1] * NUM_TOKENS, [2] * NUM_TOKENS)
        if versions[0] == 1:
            break
    else:
        pytest.fail("no update came while the request ran")
    assert server.complete(model=NAME, **(body | {"max_tokens": 2}))[0]["weight_versions"] == [2, 2]


def test_whole_weights_below_an_adapter_leave_its_version(
    server: VllmServer, tiny_model: Path, adapters: dict[int, Path]
) -> None:
    assert load(server, adapters[3], 3).status_code == 200
    server.update(tiny_model, 0)
    [choice] = server.complete(model=NAME, prompt=PROMPT, max_tokens=16, ignore_eos=True)
    assert choice["weight_versions"] == [3] * 16
    assert_made_by_their_versions(choice, tiny_model, adapters)


def test_what_cannot_be_loaded_is_refused_and_nothing_changes(
    server: VllmServer, tiny_model: Path, adapters: dict[int, Path], tmp_path: Path
) -> None:
    assert load(server, adapters[1], 1).status_code == 200
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in adapters[2].iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    too_large = LoRAConfig(rank=64)
    decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    attach_lora(decoder, too_large)
    large = publish(decoder, too_large, tiny_model, tmp_path / "large", 5)
    for path, reason in ((damaged, "does not match its checksum"), (tiny_model, "holds no adapter"), (large, "rank")):
        answer = load(server, path, 9)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    answer = load(server, adapters[2], 2, load_inplace=False)
    assert answer.status_code == 400 and "set load_inplace to replace it" in answer.text
    [choice] = server.complete(model=NAME, prompt=PROMPT, max_tokens=8, ignore_eos=True)
    assert choice["weight_versions"] == [1] * 8
    assert_made_by_their_versions(choice, tiny_model, adapters)


def test_an_unloaded_adapter_is_no_longer_served(server: VllmServer, adapters: dict[int, Path]) -> None:
    assert load(server, adapters[1], 1).status_code == 200
    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": NAME}).status_code == 200
    answer = server.http.post("/v1/completions", json={"model": NAME, "prompt": PROMPT, "max_tokens": 1})
    assert answer.status_code == 404, answer.text
    answer = server.http.post("/unload_lora_adapter", json={"lora_name": NAME})
    assert answer.status_code == 404 and "is not loaded; loaded: none" in answer.text
    assert load(server, adapters[2], 2, load_inplace=False).status_code == 200


def num_waiting(server: VllmServer) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_waiting{"))


def test_who_waits_when_the_server_has_to_leave_is_told(server: VllmServer) -> None:
    """The last test with this server."""
    asked = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "n": 64}
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(server.http.post, "/v1/completions", json=asked) for _ in range(4)]
        wait_until(lambda: num_waiting(server) >= 3 * 64, 60, "the requests to wait")
        server.stop()
        for answer in [future.result() for future in waiting]:
            assert answer.status_code == 503 and answer.json()["error"]["code"], answer.text
