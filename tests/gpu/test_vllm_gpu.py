"""vLLM on a GPU, with CUDA graphs and asynchronous scheduling as users run it. Needs an environment with vLLM:

    TANDEM_VLLM_PYTHON=/path/to/vllm/bin/python pytest tests/gpu/test_vllm_gpu.py

The tests of its CPU build run against a GPU too: TANDEM_VLLM_PYTHON=… pytest tests/scale/test_vllm.py (they ask for
float32 log-probs within 1e-4 of transformers on the CPU, which some attention kernels do not reach).
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.scale.vllm_models import FIRST_TOKEN, publish_counting, publish_random
from tests.scale.vllm_server import VllmServer, start

pytestmark = pytest.mark.gpu
PROMPT = [1, 4, 101, 71, 72, 73, 74, 2, 101, 1, 5, 101]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    python = os.environ.get("TANDEM_VLLM_PYTHON")
    if python is None:
        pytest.skip("set TANDEM_VLLM_PYTHON to the Python of an environment with vLLM")
    options = ["--model.dtype", request.param, "--gpu-memory-utilization", "0.3"]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    started = start(Path(python), tiny_model, log, *options, environment={})
    yield started
    started.end()


def reference(model_dir: Path, token_ids: list[int], temperature: float) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def test_completions_before_and_after_a_swap(server: VllmServer, tiny_model: Path, tmp_path: Path) -> None:
    """The swap must reach everything, the output matrix of a tied model included."""
    new = publish_random(tiny_model, tmp_path / "new", version=3, seed=5)
    for path, version in ((tiny_model, 0), (new, 3), (tiny_model, 0)):
        server.update(path, version)
        [choice] = server.complete(prompt=PROMPT, max_tokens=24, temperature=0.7, seed=1, ignore_eos=True)
        assert choice["weight_versions"] == [version] * 24
        difference = reference(path, choice["token_ids"], 0.7) - torch.tensor(choice["logprobs"]["token_logprobs"])
        print(f"version {version}: log-probs differ by at most {difference.abs().max():.2e}")
        assert difference.abs().max() < 0.05


def test_versions_are_exact_while_requests_run(server: VllmServer, tiny_model: Path, tmp_path: Path) -> None:
    weights = {v: publish_counting(tiny_model, tmp_path / str(v), v) for v in range(1, 8)}
    server.update(weights[1], 1)
    body = {"prompt": [PROMPT, [7, 8, 9]], "n": 4, "max_tokens": 450, "ignore_eos": True, "temperature": 0.3}
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.complete, **body) for _ in range(24)]
        version = 1
        while not all(future.done() for future in futures):
            version = version % 7 + 1
            server.update(weights[version], version)
            time.sleep(0.05)
        choices = [choice for future in futures for choice in future.result()]
    for choice in choices:
        assert choice["weight_versions"] == [token - FIRST_TOKEN for token in choice["token_ids"]]
    spans = [len(set(choice["weight_versions"])) for choice in choices]
    print(f"{len(choices)} completions of 450 tokens, {max(spans)} versions in one")
    assert max(spans) > 1


def test_a_bad_checkpoint_changes_nothing(server: VllmServer, tiny_model: Path, tmp_path: Path) -> None:
    server.update(tiny_model, 0)
    ask = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    [before] = server.complete(**ask)
    bad = publish_random(tiny_model, tmp_path / "bad", version=2, seed=8)
    weights = bad / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    answer = server.http.post("/update_weights", json={"path": str(bad), "version": 2})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "weights_refused"
    [after] = server.complete(**ask)
    assert after["token_ids"] == before["token_ids"] and server.health()["version"] == 0


def test_abort(server: VllmServer, tiny_model: Path) -> None:
    with ThreadPoolExecutor() as pool:
        body = {"prompt": [PROMPT] * 64, "n": 4, "max_tokens": 450, "ignore_eos": True}
        running = pool.submit(server.complete, **body)
        time.sleep(0.3)
        server.update(tiny_model, 0, mode="abort")
        choices = running.result()
    assert {choice["finish_reason"] for choice in choices} <= {"abort", "length"}
    assert any(choice["finish_reason"] == "abort" for choice in choices)
