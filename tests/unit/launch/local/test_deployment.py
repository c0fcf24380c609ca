"""Which processes a deployment starts, and which one is chosen."""

from pathlib import Path

import pytest

from tandem.launch.local.deployment import choose_deployment, deploy
from tandem.launch.local.gpus import plan_gpus
from tandem.launch.plan import make_plan
from tandem.launch.run_plan import plan_run


@pytest.mark.parametrize(
    ("options", "num_gpus", "expected"),
    [
        ({}, 0, "split"),
        ({}, 1, "shared"),
        ({}, 2, "split"),
        ({"deployment": "colocated"}, 1, "colocated"),
        ({"deployment": "colocated"}, 0, "colocated"),
        ({"inference": {"engine": "vllm"}}, 1, "split"),
    ],
)
def test_one_gpu_is_shared_unless_told_otherwise(make_config, options, num_gpus: int, expected: str) -> None:
    config = make_config(**options)
    gpus = plan_gpus(config, [str(number) for number in range(num_gpus)])
    assert choose_deployment(config, gpus) == expected


def test_a_colocated_trainer_listens_in_place_of_the_server(make_config, tmp_path: Path) -> None:
    before = {plan.name: plan for plan in make_plan(make_config(), tmp_path, num_cores=2)}
    trainer, orchestrator = deploy(list(before.values()), "colocated", tmp_path)
    assert (trainer.name, orchestrator.name) == ("trainer", "orchestrator")
    assert trainer.listens_as == "inference" and trainer.more_configs == {"inference": before["inference"].config}
    assert trainer.command[1:] == [
        *("-m", "tandem.entrypoints.colocated"),
        *("--trainer", "@", f"{tmp_path}/trainer.json", "--inference", "@", f"{tmp_path}/inference.json"),
    ]


def test_each_rank_of_a_colocated_trainer_takes_a_server_in(make_config, tmp_path: Path) -> None:
    config = make_config(deployment="colocated", trainer={"parallel": {"ranks": 3}}, release_cache=False)
    trainer, orchestrator = plan_run(config, tmp_path).processes
    assert (trainer.name, orchestrator.name) == ("trainer", "orchestrator")
    port = config.inference.server.port
    assert trainer.more_configs["inference"]["server"]["port"] == port, "of the first; the others add their number"
    urls = orchestrator.config["client"]["base_url"].split(",")
    assert urls == [f"http://127.0.0.1:{port + rank}" for rank in range(3)]
    assert trainer.listens_as is None and trainer.command[-2:] == ["--release-cache", "false"]


def test_gpus_of_a_colocated_trainer_have_a_server_each(make_config) -> None:
    plan = plan_gpus(make_config(deployment="colocated", gpus={"trainer": 2}), ["4", "5", "6"])
    assert plan is not None and plan.trainer == (0, 1) and plan.servers == ((0,), (1,))


def test_a_shared_trainer_is_told_to_share(make_config, tmp_path: Path) -> None:
    plans = deploy(make_plan(make_config(), tmp_path, num_cores=2), "shared", tmp_path)
    assert [plan.config.get("share_weights") for plan in plans] == [None, None, True]
