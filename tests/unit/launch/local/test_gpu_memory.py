"""What `--dry-run` says of each GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.shapes import QWEN3_0_6B, QWEN3_4B

from tandem.commands.rl import RLConfig
from tandem.launch.local.deployment import colocate
from tandem.launch.local.gpu_memory import estimate_memory, table, trainer_memory
from tandem.launch.local.gpus import plan_gpus
from tandem.launch.plan import make_plan
from tandem.launch.run_plan import describe_run
from tandem.models.memory_estimate import kv_bytes, num_parameters
from tandem.models.spec import ModelSpec

GIB = 2**30
SPEC = ModelSpec.from_config(QWEN3_0_6B)
MakeConfig = Callable[..., RLConfig]


def estimate(config: RLConfig, *memory_gib: int):
    plan = plan_gpus(config, [str(place) for place in range(len(memory_gib))], [gib * GIB for gib in memory_gib])
    assert plan is not None
    return estimate_memory(config, SPEC, plan), plan


def test_each_gpu_has_what_runs_on_it(make_config: MakeConfig) -> None:
    uses, plan = estimate(make_config(), 80, 80, 80)
    assert [[name for name, _ in use.parts] for use in uses] == [["inference"], ["trainer rank 0"]]
    assert all(use.fits for use in uses)
    server, trainer = uses[0].parts[0][1], uses[1].parts[0][1]
    assert server.optimizer == 0 and trainer.kv_cache == 0
    assert server.kv_cache == 256 * 256 * kv_bytes(SPEC, 4)  # max_sequences of seq_len, in float32
    assert table(uses, plan)[-1] == "not used: GPU 2"


def test_a_shared_gpu_adds_up_and_the_trainer_takes_what_is_left(make_config: MakeConfig) -> None:
    model = {"name": "some/model", "dtype": "bfloat16"}
    options = {"model": model, "seq_len": 4096, "orchestrator": {"prompts_per_step": 64, "group_size": 8}}
    (alone, apart), _ = estimate(make_config(**options), 48, 48)
    (together,), _ = estimate(make_config(**options), 48)
    assert [name for name, _ in together.parts] == ["inference", "trainer rank 0"]
    held = num_parameters(SPEC) * 2  # the version that goes through memory: the trainer keeps it, the server copies it
    server, trainer = (use for _, use in together.parts)
    assert replace(server, weights=server.weights - held) == alone.parts[0][1]
    assert trainer.weights - held == apart.parts[0][1].weights
    assert together.parts[1][1].activations < apart.parts[0][1].activations
    assert together.total == sum(use.total for _, use in together.parts) and together.fits


def test_what_a_trainer_took_beside_a_server_of_an_h200(make_config: MakeConfig) -> None:
    """4B, 8 prompts × 8 completions of 640 tokens; the server left 126.4 GiB, of which 91.0 were taken."""
    model = {"name": "some/model", "dtype": "bfloat16"}
    options = {"model": model, "seq_len": 640, "orchestrator": {"prompts_per_step": 8, "group_size": 8}}
    use = trainer_memory(make_config(**options), ModelSpec.from_config(QWEN3_4B), 1, int(126.4 * GIB), 0)
    assert use.total / GIB == pytest.approx(91.0, rel=0.1)


@pytest.mark.parametrize(
    ("dtype", "trainer", "common"),
    [
        ("float32", {}, 4),  # bytes of a parameter that are there once: the masters
        ("bfloat16", {}, 2),  # rounded copies
        ("bfloat16", {"lora": {"rank": 8}}, 6),  # both, of what is frozen
    ],
)
def test_colocated_weights_are_there_once(make_config: MakeConfig, dtype: str, trainer: Any, common: int) -> None:
    options = {"model": {"name": "some/model", "dtype": dtype}, "trainer": trainer}
    (server, alone), _ = estimate(make_config(deployment="split", **options), 80, 80)
    (use,), _ = estimate(make_config(deployment="colocated", **options), 80)
    weights = [part.weights for _, part in use.parts]
    once = [server.parts[0][1].weights, alone.parts[0][1].weights - common * num_parameters(SPEC)]
    assert weights == once and weights[1] >= 0 and use.parts[0][1].kv_cache > 0


def test_colocated_copies_take_their_memory(make_config: MakeConfig) -> None:
    """The server's own weights, and the version that was published last."""
    (alone, _), _ = estimate(make_config(deployment="split"), 80, 80)
    (use,), _ = estimate(make_config(deployment="colocated", sync_every=2), 80)
    assert use.parts[0][1].weights == 2 * alone.parts[0][1].weights


def test_colocated_the_kv_cache_makes_room_where_it_must(make_config: MakeConfig) -> None:
    options = {"deployment": "colocated", "seq_len": 4096, "model": {"name": "some/model", "dtype": "bfloat16"}}
    options |= {"orchestrator": {"prompts_per_step": 64, "group_size": 8}, "inference": {"kv_cache_tokens": 100_000}}
    (use,), plan = estimate(make_config(**options), 40)
    cache = 100_000 * kv_bytes(SPEC, 2)
    assert use.released == use.parts[0][1].kv_cache == cache and use.fits
    assert use.total == sum(part.total for _, part in use.parts) - cache
    assert any("makes room" in line for line in table([use], plan))
    (kept,), _ = estimate(make_config(**options, release_cache=False), 40)
    assert kept.released == 0 and kept.parts[1][1].activations < use.parts[1][1].activations


def test_vllm_fills_its_share(make_config: MakeConfig) -> None:
    inference = {"engine": "vllm", "gpu_memory_utilization": 0.6}
    (server, _), _ = estimate(make_config(inference=inference), 80, 80)
    assert abs(server.total - 0.6 * 80 * GIB) < 2**20


def test_too_little_memory_is_said(make_config: MakeConfig) -> None:
    uses, plan = estimate(make_config(trainer={"tokens_per_microbatch": 32768}), 8, 8)
    assert not uses[1].fits
    assert any("GPU 1 has 8.0 GiB" in line and "do not fit" in line for line in table(uses, plan))


def test_a_dry_run_says_who_runs_where(make_config: MakeConfig, tiny_model: Path) -> None:
    config = make_config(model={"name": tiny_model}, gpus={"inference": 2})
    plan = plan_gpus(config, ["5", "6", "7"])
    lines = describe_run(config, make_plan(config, Path("c"), gpus=plan), plan)
    assert lines[:5] == [
        "deployment split:",
        "  inference_0   http://127.0.0.1:8000                             CUDA_VISIBLE_DEVICES=5",
        "  inference_1   http://127.0.0.1:8001                             CUDA_VISIBLE_DEVICES=6",
        "  orchestrator  asks http://127.0.0.1:8000,http://127.0.0.1:8001",
        "  trainer       1 rank                                            CUDA_VISIBLE_DEVICES=7",
    ]
    assert lines[5].endswith("there is no GPU here to ask; 80 GiB each are assumed")
    assert " ".join(lines[7].split()) == "GPU process weights gradients optimizer activations KV cache total"
    assert len(lines) == 11
    assert describe_run(config, make_plan(config, Path("c")), None)[0] == "on this machine's CPUs:"


def test_colocated_the_trainer_listens(make_config: MakeConfig) -> None:
    config = make_config(deployment="colocated")
    lines = describe_run(config, colocate(make_plan(config, Path("c")), Path("c")), None)
    assert lines[1].split(maxsplit=1) == ["trainer", "http://127.0.0.1:8000, 1 rank"]
