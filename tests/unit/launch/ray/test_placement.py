"""Which process of a run goes to which node of a Ray cluster, worked out without one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.rl import RLConfig
from tandem.launch.local.gpus import find_gpu_plan
from tandem.launch.plan import API_KEY_VAR, ProcessPlan, make_plan
from tandem.launch.ray import placement as placement_module
from tandem.launch.ray.nodes import Node
from tandem.launch.ray.placement import find_places, place_on_ray, write_servers
from tandem.launch.ray.process import Placement, announce
from tandem.launch.run_plan import describe_run
from tandem.utils.errors import UserError

NODES = [Node("a", "10.0.0.1", 8), Node("b", "10.0.0.2", 8), Node("c", "10.0.0.3", 0)]


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_module, "ask_nodes", lambda address: NODES)
    monkeypatch.setattr("socket.gethostname", lambda: "a")


def make_config(tmp_path: Path, ranks: int = 1, inference: dict[str, Any] | None = None, **ray: Any) -> RLConfig:
    given: dict[str, Any] = {
        "model": {"name": "models/x"},
        "output_dir": str(tmp_path / "run"),
        "trainer": {"parallel": {"ranks": ranks}},
        "orchestrator": {},
        "inference": {} if inference is None else inference,
        "ray": {"address": "10.0.0.1:6379"} | ray,
    }
    return RLConfig.model_validate(given)


def plan(config: RLConfig) -> dict[str, ProcessPlan]:
    places = find_places(config)
    made = place_on_ray(config, make_plan(config, config.output_dir / "config", gpus=find_gpu_plan(config)), places)
    return {one.name: one for one in made}


def placement(one: ProcessPlan) -> Placement:
    assert one.command[1:3] == ["-m", "tandem.launch.ray.process"]
    return Placement(**json.loads(one.command[3]))


def test_servers_and_ranks_go_to_the_named_nodes(tmp_path: Path) -> None:
    config = make_config(tmp_path, 4, inference_nodes=["b", "10.0.0.2"], trainer_nodes=["10.0.0.1", "c"])
    plans = plan(config)
    assert list(plans) == ["inference_0", "inference_1", "orchestrator", "trainer"]
    assert placement(plans["inference_1"]).nodes == ["10.0.0.2"] and placement(plans["inference_1"]).num_gpus == 1
    assert [placement(plans[name]).port for name in ("inference_0", "inference_1")] == [8000, 8001]
    trainer = placement(plans["trainer"])
    assert trainer.nodes == ["10.0.0.1", "10.0.0.1", "10.0.0.3", "10.0.0.3"] and trainer.port is None
    assert trainer.num_gpus == 0, "c has no GPU"
    assert plans["trainer"].command[4:6] == ["tandem.entrypoints.trainer", "@"]
    assert plans["orchestrator"].command[2] == "tandem.entrypoints.orchestrator"
    client = plans["orchestrator"].config["client"]
    assert client["base_url"] == "http://10.0.0.2:8000,http://10.0.0.2:8001"
    (tmp_path / "run" / "config").mkdir(parents=True)
    write_servers(config, find_places(config))
    assert Path(client["servers_file"]).read_text() == "http://10.0.0.2:8000\nhttp://10.0.0.2:8001\n"


def test_servers_have_a_key_that_is_in_no_file(tmp_path: Path) -> None:
    plans = plan(make_config(tmp_path))
    keys = {one.environment[API_KEY_VAR] for one in plans.values()}
    assert len(keys) == 1 and len(keys.pop()) > 20
    assert plans["inference"].config["server"]["api_key_var"] == API_KEY_VAR
    assert plans["orchestrator"].config["client"]["api_key_var"] == API_KEY_VAR
    given = plan(make_config(tmp_path, inference={"server": {"api_key": "mine"}}))
    assert {one.environment[API_KEY_VAR] for one in given.values()} == {"mine"}
    assert "mine" not in json.dumps([one.config for one in given.values()])
    named = plan(make_config(tmp_path, inference={"server": {"api_key_var": "MY_KEY"}}))
    assert placement(named["inference"]).key_variables == ["MY_KEY", "MY_KEY"]
    assert named["inference"].config["server"]["api_key_var"] == "MY_KEY"


def test_without_names_inference_is_elsewhere_and_training_on_the_others(tmp_path: Path) -> None:
    plans = plan(make_config(tmp_path, 2, gpus_per_server=0.5))
    assert placement(plans["inference"]).nodes == ["10.0.0.2"] and placement(plans["inference"]).num_gpus == 0.5
    assert placement(plans["trainer"]).nodes == ["10.0.0.1", "10.0.0.3"]


def test_without_ray_the_plan_is_as_it_was(tmp_path: Path) -> None:
    config = make_config(tmp_path, address=None)
    plans = make_plan(config, tmp_path)
    assert find_places(config) is None and place_on_ray(config, plans, None) is plans


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ray.inference_nodes: 'd' is no live node.*a \(10.0.0.1\)"):
        plan(make_config(tmp_path, inference_nodes=["d"]))
    with pytest.raises(UserError, match=r"parallel.ranks = 3 cannot be spread over 2.*4"):
        plan(make_config(tmp_path, 3, trainer_nodes=["a", "b"]))


def test_a_dry_run_says_where_everything_goes(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    lines = describe_run(config, list(plan(config).values()), None)
    assert lines[0] == "on the Ray cluster at 10.0.0.1:6379:" and "http://10.0.0.2:8000" in lines[1]


def test_a_server_that_moves_changes_its_own_line_only(tmp_path: Path) -> None:
    path = tmp_path / "servers.txt"
    path.write_text("http://10.0.0.2:8000\nhttp://10.0.0.2:8001\n")
    announce(Placement("auto", ["b"], 0, [], port=8000, servers_file=str(path)), "10.0.0.3")
    assert sorted(path.read_text().splitlines()) == ["http://10.0.0.2:8001", "http://10.0.0.3:8000"]
