"""What would be started: cores shared, secrets kept."""

import json
from pathlib import Path

import pytest

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import load_config
from tandem.config.inference import InferenceConfig
from tandem.launch.plan import API_KEY_VAR, make_plan, run_config, share_cores
from tandem.utils.errors import UserError


def test_three_processes_in_the_order_they_start(make_config, tmp_path: Path) -> None:
    plans = make_plan(make_config(), tmp_path / "config", num_cores=4)
    assert [plan.name for plan in plans] == ["inference", "orchestrator", "trainer"]
    for plan in plans:
        assert plan.command[1:] == [
            "-m",
            f"tandem.entrypoints.{plan.name}",
            "@",
            f"{tmp_path}/config/{plan.name}.json",
        ]
        assert plan.log == tmp_path / "run" / "logs" / f"{plan.name}.log"
        json.dumps(plan.config)


def test_without_an_inference_section_two_are_started(make_config, tmp_path: Path) -> None:
    plans = make_plan(make_config(inference=None), tmp_path, num_cores=4)
    assert [plan.name for plan in plans] == ["orchestrator", "trainer"]


@pytest.mark.parametrize(
    ("num_cores", "staleness", "expected"),
    [
        (8, 1, {"trainer": 4, "inference": 4}),
        (5, 1, {"trainer": 3, "inference": 2}),
        (1, 1, {"trainer": 1, "inference": 1}),
        (8, 0, {"trainer": 8, "inference": 8}),  # they take turns
    ],
)
def test_cores_are_split_when_work_overlaps(make_config, num_cores: int, staleness: int, expected: dict) -> None:
    config = make_config(orchestrator={"max_staleness": staleness})
    assert share_cores(config, num_cores) == expected
    plans = {plan.name: plan for plan in make_plan(config, Path("c"), num_cores=num_cores)}
    assert {name: plans[name].config["threads"] for name in expected} == expected


def test_threads_that_are_given_stay_and_a_lone_trainer_gets_every_core(make_config) -> None:
    config = make_config(trainer={"threads": 7}, inference={"threads": 3})
    assert share_cores(config, 8) == {"trainer": 7, "inference": 3}
    assert share_cores(make_config(inference=None), 8) == {"trainer": 8}
    assert share_cores(make_config(inference=None, trainer={"parallel": {"ranks": 4}}), 8) == {"trainer": 2}


def test_the_server_may_load_what_the_run_publishes(make_config, tmp_path: Path) -> None:
    inference, *_ = make_plan(make_config(inference={"server": {"weight_roots": ["/more"]}}), tmp_path, num_cores=2)
    assert inference.config["server"]["weight_roots"] == ["/more", str(tmp_path / "run")]


def test_an_api_key_travels_in_the_environment_only(make_config, tmp_path: Path) -> None:
    plans = make_plan(make_config(inference={"server": {"api_key": "s3cret"}}), tmp_path, num_cores=2)
    for plan in plans:
        assert "s3cret" not in json.dumps(plan.config)
        assert "s3cret" not in json.dumps(plan.describe())
        assert "s3cret" not in json.dumps(plan.command)
    by_name = {plan.name: plan for plan in plans}
    server, client = by_name["inference"].config["server"], by_name["orchestrator"].config["client"]
    for section, name in ((server, "inference"), (client, "orchestrator")):
        assert section["api_key"] is None
        assert by_name[name].environment[section["api_key_var"]] == "s3cret"


def test_what_a_resumed_run_reads_holds_no_key_and_no_share_of_these_cores(make_config) -> None:
    server = {"engine": "sglang", "server": {"api_key": "s3cret"}, "sglang": {"api_key": "an0ther"}}
    stored = run_config(make_config(inference=server))
    assert "s3cret" not in json.dumps(stored) and "an0ther" not in json.dumps(stored)
    assert stored["inference"]["server"]["api_key_var"] == API_KEY_VAR
    assert stored["orchestrator"]["client"]["api_key_var"] == API_KEY_VAR
    assert stored["trainer"]["threads"] is None
    (inference, *_) = make_plan(make_config(inference=server), Path("config"))
    assert "an0ther" not in json.dumps(inference.config)
    assert inference.environment[inference.config["sglang"]["api_key_var"]] == "an0ther"


def test_a_key_in_a_variable_stays_there(make_config, tmp_path: Path) -> None:
    plans = make_plan(make_config(inference={"server": {"api_key_var": "MY_KEY"}}), tmp_path, num_cores=2)
    assert plans[0].config["server"]["api_key_var"] == "MY_KEY"
    assert plans[1].config["client"]["api_key_var"] == "MY_KEY"
    assert all("TANDEM_API_KEY" not in plan.environment for plan in plans)


def test_describe_names_variables_without_their_values(make_config, tmp_path: Path) -> None:
    plan = make_plan(make_config(inference={"server": {"api_key": "s3cret"}}), tmp_path, num_cores=2)[0]
    description = plan.describe()
    assert "TANDEM_API_KEY" in description["environment"]
    assert description["log"].endswith("logs/inference.log")


def test_what_is_planned_is_what_the_process_parses(make_config, tmp_path: Path) -> None:
    config = make_config(inference={"server": {"port": 9001}}, trainer={"threads": 3})
    classes = {"inference": InferenceConfig, "orchestrator": OrchestratorConfig, "trainer": TrainerConfig}
    for plan in make_plan(config, tmp_path, num_cores=2):
        path = tmp_path / f"{plan.name}.json"
        path.write_text(json.dumps(plan.config))
        parsed = load_config(classes[plan.name], ["@", str(path)])
        assert parsed.model_dump(mode="json") == plan.config


def test_vllm_is_told_of_the_adapter_to_come(make_config, tmp_path: Path) -> None:
    lora = {"lora": {"rank": 12}}
    vllm = {"engine": "vllm", "vllm": {"flags": {"max-loras": 2}}}
    plan = make_plan(make_config(inference=vllm, trainer=lora), tmp_path, num_cores=2)[0]
    # vLLM knows certain ranks only; the next one is taken.
    assert plan.config["vllm"]["flags"] == {"enable-lora": True, "max-lora-rank": 16, "max-loras": 2}
    given = {"engine": "vllm", "vllm": {"flags": {"max-lora-rank": 64}}}
    plan = make_plan(make_config(inference=given, trainer=lora), tmp_path, num_cores=2)[0]
    assert plan.config["vllm"]["flags"] == {"enable-lora": True, "max-lora-rank": 64}
    assert make_plan(make_config(inference=vllm), tmp_path, num_cores=2)[0].config["vllm"] == {
        "python": None,
        "flags": {"max-loras": 2},
    }
    with pytest.raises(UserError, match=r"lora\.rank = 513 .* is 512"):
        make_plan(make_config(inference=vllm, trainer={"lora": {"rank": 513}}), tmp_path, num_cores=2)


def test_unknown_targets_are_refused_before_anything_starts(make_config) -> None:
    with pytest.raises(ValueError, match=r"lora\.targets names 'wq', .*valid: q_proj"):
        make_config(trainer={"lora": {"targets": ["wq"]}})
    # Which names another architecture has, transformers will tell.
    make_config(model={"name": "some/model", "impl": "hf"}, trainer={"lora": {"targets": ["wq"]}})
