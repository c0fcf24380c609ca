"""Who gets which GPU: worlds of made-up ids, on a machine that need not have any."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.rl import RLConfig
from tandem.launch.local import gpus
from tandem.launch.local.gpus import GpuPlan, find_gpu_plan, plan_gpus
from tandem.launch.plan import make_plan
from tandem.utils.errors import UserError

MakeConfig = Callable[..., RLConfig]
WORLD = ["4", "5", "6", "7"]
VLLM = {"engine": "vllm"}


def planned(config: RLConfig, world: list[str]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    plan = plan_gpus(config, world)
    assert plan is not None
    return plan.servers, plan.trainer


@pytest.mark.parametrize(
    ("options", "servers", "trainer"),
    [
        ({}, ((0,),), (1,)),
        ({"gpus": {"inference": 2, "trainer": 2}}, ((0,), (1,)), (2, 3)),
        ({"gpus": {"inference": [3], "trainer": [0, 2]}}, ((3,),), (0, 2)),
        ({"gpus": {"trainer": [0, 1]}}, ((2,),), (0, 1)),
        ({"trainer": {"parallel": {"ranks": 3}}}, ((0,),), (1, 2, 3)),
        ({"gpus": {"inference": 3}, "inference": VLLM}, ((0, 1, 2),), (3,)),
        ({"inference": VLLM | {"vllm": {"flags": {"tensor-parallel-size": 2}}}}, ((0, 1),), (2,)),
        ({"inference": VLLM | {"vllm": {"flags": {"-tp": "1", "-dp": "3"}}}}, ((0, 1, 2),), (3,)),
        ({"deployment": "shared"}, ((0,),), (0,)),
        ({"deployment": "colocated", "gpus": {"trainer": [2]}}, ((2,),), (2,)),
        ({"inference": {"device": "cpu"}}, (), (0,)),
        ({"inference": None, "gpus": {"trainer": 4}}, (), (0, 1, 2, 3)),
        ({"inference": {"engine": "sglang"}}, (), (0,)),
    ],
)
def test_each_gets_its_own(make_config: MakeConfig, options: dict[str, Any], servers: object, trainer: object) -> None:
    assert planned(make_config(**options), WORLD) == (servers, trainer)


def test_one_gpu_is_shared_unless_more_is_asked_for(make_config: MakeConfig) -> None:
    assert planned(make_config(), ["0"]) == (((0,),), (0,))
    with pytest.raises(UserError, match="2 are asked for"):
        plan_gpus(make_config(deployment="split"), ["0"])
    with pytest.raises(UserError, match="3 are asked for"):
        plan_gpus(make_config(trainer={"parallel": {"ranks": 2}}), ["0"])


def test_without_a_gpu_nothing_is_planned_unless_one_is_asked_for(make_config: MakeConfig) -> None:
    assert plan_gpus(make_config(), []) is None
    assert plan_gpus(make_config(trainer={"device": "cpu"}, inference={"device": "cpu"}), WORLD) is None
    with pytest.raises(UserError, match=r"gpus: 2 are asked for; 0 visible.* The plan: inference 1 that are not there"):
        plan_gpus(make_config(gpus={"trainer": 1}), [])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"inference": 2, "trainer": 3},
            "gpus: 5 are asked for; 4 visible (CUDA_VISIBLE_DEVICES = '4,5,6,7'), 0 to 3. The plan: inference 0, 1; "
            "trainer 2, 3 and 1 more",
        ),
        (
            {"inference": [0, 1], "trainer": [1, 2]},
            "gpus: GPU 1 is given twice; 4 visible (CUDA_VISIBLE_DEVICES = '4,5,6,7'), 0 to 3. The plan: inference 0, "
            "1; trainer 1, 2",
        ),
        (
            {"trainer": [4]},
            "gpus: there is no GPU 4; 4 visible (CUDA_VISIBLE_DEVICES = '4,5,6,7'), 0 to 3. The plan: inference 0; "
            "trainer 4",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_told(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with pytest.raises(UserError) as caught:
        plan_gpus(make_config(gpus=asked), WORLD)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": {"trainer": 2}, "trainer": {"parallel": {"ranks": 3}}}, "trainer.parallel.ranks = 3: there is one"),
        ({"gpus": {"trainer": 2}, "trainer": {"device": "cpu"}}, "trainer.device = 'cpu'; leave gpus.trainer out"),
        ({"gpus": {"inference": 1}, "inference": None}, "`rl` starts no server that could use them"),
        ({"gpus": {"inference": 3}, "inference": VLLM | {"vllm": {"flags": {"-tp": 2}}}}, "ask for 2 GPUs a copy"),
        ({"gpus": {"inference": 1, "trainer": 2}, "deployment": "shared"}, "give gpus.trainer alone"),
        ({"gpus": {"trainer": 2}, "deployment": "shared"}, "is for one GPU, and 2 are asked for"),
    ],
)
def test_what_contradicts_another_option(make_config: MakeConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_gpus(make_config(**options), WORLD)


def test_processes_see_their_own_gpus(make_config: MakeConfig) -> None:
    config = make_config(gpus={"inference": 2, "trainer": [3, 0]})
    plans = {plan.name: plan for plan in make_plan(config, Path("c"), num_cores=8, gpus=plan_gpus(config, WORLD))}
    seen = {name: plan.environment.get("CUDA_VISIBLE_DEVICES") for name, plan in plans.items()}
    assert seen == {"inference_0": "5", "inference_1": "6", "orchestrator": None, "trainer": "7,4"}
    assert [plans[name].config["server"]["port"] for name in ("inference_0", "inference_1")] == [8000, 8001]
    assert plans["orchestrator"].config["client"]["base_url"] == "http://127.0.0.1:8000,http://127.0.0.1:8001"
    assert plans["trainer"].config["parallel"]["ranks"] == 2 and plans["trainer"].config["threads"] == 2
    assert plans["inference_1"].command[2:] == ["tandem.entrypoints.inference", "@", "c/inference_1.json"]


def test_a_server_on_the_cpu_sees_what_the_launcher_sees(make_config: MakeConfig) -> None:
    config = make_config(inference={"device": "cpu"})
    plans = {plan.name: plan for plan in make_plan(config, Path("c"), gpus=plan_gpus(config, WORLD))}
    assert "CUDA_VISIBLE_DEVICES" not in plans["inference"].environment
    assert plans["trainer"].environment["CUDA_VISIBLE_DEVICES"] == "4"


def test_vllm_spreads_over_its_gpus_and_leaves_room_on_one_it_shares(make_config: MakeConfig) -> None:
    config = make_config(gpus={"inference": 2}, inference=VLLM)
    (server, *_) = make_plan(config, Path("c"), gpus=plan_gpus(config, WORLD))
    assert server.config["vllm"]["flags"] == {"data-parallel-size": 2}
    assert server.config["gpu_memory_utilization"] is None
    config = make_config(inference=VLLM)
    (server, *_) = make_plan(config, Path("c"), gpus=plan_gpus(config, ["0"]))
    assert server.config["gpu_memory_utilization"] == 0.5 and server.config["vllm"]["flags"] == {}


def test_a_dry_run_believes_the_variable_where_there_is_no_gpu(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    monkeypatch.setattr(gpus, "gpu_memory_bytes", tuple)
    assert find_gpu_plan(make_config()) is None
    assert find_gpu_plan(make_config(dry_run=True)) == GpuPlan(("2", "GPU-abc"), ((0,),), (1,))
    monkeypatch.setattr(gpus, "gpu_memory_bytes", lambda: (100,))  # CUDA takes no notice of what comes after a wrong id
    assert find_gpu_plan(make_config(dry_run=True)) == GpuPlan(("2",), ((0,),), (0,), (100,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpus, "gpu_memory_bytes", lambda: (100, 200))
    assert find_gpu_plan(make_config()) == GpuPlan(("0", "1"), ((0,),), (1,), (100, 200))


def test_one_card_named_twice(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 1")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES = '1, 1' names GPU 1 twice"):
        find_gpu_plan(make_config(dry_run=True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,-1,4")
    assert find_gpu_plan(make_config(dry_run=True)) == GpuPlan(("3",), ((0,),), (0,))
