"""Shared values: given once, anywhere; given twice, the same."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.commands.rl import SECTIONS, SHARED_KEYS, RLConfig, share_values
from tandem.config.base import load_config

PLACES = ("", "trainer", "orchestrator", "inference")
SCALARS: dict[tuple[str, ...], st.SearchStrategy[Any]] = {
    ("model", "name"): st.sampled_from(["m/one", "m/two"]),
    ("model", "dtype"): st.sampled_from(["float32", "bfloat16"]),
    ("output_dir",): st.sampled_from(["out/a", "out/b"]),
    ("max_steps",): st.integers(1, 500),
    ("seq_len",): st.integers(200, 4096),
    ("sync_every",): st.integers(1, 2),
    ("seed",): st.integers(0, 9),
    ("checkpoint", "every"): st.integers(1, 9),
    ("checkpoint", "keep_last"): st.integers(1, 9),
    ("resume",): st.booleans(),
    ("log_level",): st.sampled_from(["debug", "error"]),
}


def has(place: str, path: tuple[str, ...]) -> bool:
    return place == "" or path[0] in SECTIONS[place].model_fields


def put(tree: dict[str, Any], place: str, path: tuple[str, ...], value: Any) -> None:
    for key in [*([place] if place else []), *path[:-1]]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def value_at(tree: dict[str, Any], place: str, path: tuple[str, ...]) -> Any:
    value: Any = tree[place] if place else tree
    for key in path:
        value = value[key]
    return value


@st.composite
def consistent_trees(draw: st.DrawFn) -> tuple[dict[str, Any], dict[tuple[str, ...], Any]]:
    """Any shared values, each given at one or more places that have it, always the same."""
    tree: dict[str, Any] = {"inference": {}}
    given_values: dict[tuple[str, ...], Any] = {}
    for path, strategy in SCALARS.items():
        owners = [place for place in PLACES if has(place, path)]
        places = draw(st.lists(st.sampled_from(owners), unique=True, max_size=len(owners)))
        value = draw(strategy)
        for place in places:
            put(tree, place, path, value)
            given_values[path] = value
    return tree, given_values


def test_every_shared_key_is_tried() -> None:
    assert {path[0] for path in SCALARS} | {"deterministic"} == set(SHARED_KEYS)


@settings(max_examples=40)
@given(consistent_trees())
def test_a_value_given_anywhere_reaches_all_that_have_it(case: tuple[dict, dict]) -> None:
    tree, given_values = case
    before = copy.deepcopy(tree)
    spread = share_values(tree)
    assert tree == before
    for path, value in given_values.items():
        for place in PLACES:
            if has(place, path):
                assert value_at(spread, place, path) == value


@settings(max_examples=40)
@given(consistent_trees())
def test_nothing_else_is_invented(case: tuple[dict, dict]) -> None:
    tree, given_values = case
    spread = share_values(tree)
    for path in set(SCALARS) - set(given_values):
        for place in PLACES:
            if has(place, path):
                with pytest.raises(KeyError):
                    value_at(spread, place, path)


@settings(max_examples=40)
@given(consistent_trees())
def test_spreading_twice_changes_nothing(case: tuple[dict, dict]) -> None:
    once = share_values(case[0])
    assert share_values(once) == once


@settings(max_examples=40)
@given(st.data())
def test_contradictions_are_refused_naming_both(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([path for path in SCALARS if path != ("resume",)]))
    owners = [place for place in PLACES if has(place, path)]
    first, second = data.draw(st.permutations(owners))[:2]
    value = data.draw(SCALARS[path])
    other = data.draw(SCALARS[path].filter(lambda candidate: candidate != value))
    tree: dict[str, Any] = {"inference": {}}
    put(tree, first, path, value)
    put(tree, second, path, other)
    with pytest.raises(ValueError, match="contradict each other") as caught:
        share_values(tree)
    dotted = ".".join(path)
    for place, shown in ((first, value), (second, other)):
        name = f"{place}.{dotted}" if place else dotted
        assert f"{name} = {shown!r}" in str(caught.value)


def test_the_spread_values_validate() -> None:
    config = RLConfig.model_validate(
        {
            "trainer": {"model": {"name": "m"}, "max_steps": 7},
            "orchestrator": {"model": {"dtype": "bfloat16"}, "seq_len": 256},
            "inference": {},
            "checkpoint": {"every": 3},
        }
    )
    assert config.inference is not None
    for section in (config, config.trainer, config.orchestrator, config.inference):
        assert (str(section.model.name), section.model.dtype) == ("m", "bfloat16")
    assert config.max_steps == config.orchestrator.max_steps == 7
    assert config.seq_len == config.inference.seq_len == 256
    assert config.trainer.checkpoint.every == config.orchestrator.checkpoint.every == 3


def test_without_an_inference_section_no_server_is_started() -> None:
    assert RLConfig.model_validate({"model": {"name": "m"}}).inference is None


def test_the_client_is_led_to_the_server() -> None:
    server = {"host": "0.0.0.0", "port": 9001, "api_key": "k"}
    config = RLConfig.model_validate({"model": {"name": "m"}, "inference": {"server": server}})
    assert config.orchestrator.client.base_url == "http://127.0.0.1:9001"
    assert config.orchestrator.client.api_key == "k"


def test_a_client_with_its_own_key_variable_keeps_it() -> None:
    tree = {"model": {"name": "m"}, "inference": {"server": {"api_key": "k"}}}
    config = RLConfig.model_validate(tree | {"orchestrator": {"client": {"api_key_var": "K"}}})
    assert (config.orchestrator.client.api_key, config.orchestrator.client.api_key_var) == (None, "K")


@pytest.mark.parametrize("flag", ["--max-steps", "--trainer.max-steps", "--orchestrator.max-steps"])
def test_a_flag_wins_over_files_wherever_either_gives_the_value(flag: str, rl_toml: str, tmp_path: Path) -> None:
    section = tmp_path / "orchestrator.toml"
    section.write_text("max_steps = 60\n")
    config = load_config(RLConfig, ["@", rl_toml, "--orchestrator", "@", str(section), flag, "9"])
    assert (config.max_steps, config.trainer.max_steps, config.orchestrator.max_steps) == (9, 9, 9)


def test_weights_must_outlive_their_use(refusal: Callable[..., str], rl_toml: str) -> None:
    message = refusal("@", rl_toml, "--orchestrator.max-staleness", "3")
    assert "trainer.keep_weights = 4" in message and "the smallest valid value is 5" in message


TRUNCATED = ("--orchestrator.sampling.top-p", "0.9")


def test_log_probs_of_other_distributions_are_refused(refusal: Callable[..., str], rl_toml: str) -> None:
    """vLLM's are those after truncation; the native engine's are those before it, as the trainer's are."""
    vllm = ("@", rl_toml, "--inference.engine", "vllm", *TRUNCATED)
    message = refusal(*vllm)
    assert "orchestrator.sampling.top_p = 0.9 with inference.engine = 'vllm'" in message
    assert message.endswith('set trainer.loss.old_logprobs = "recomputed"')
    for remedy in (["--trainer.loss.old-logprobs", "recomputed"], ["--trainer.loss.type", "reinforce"]):
        load_config(RLConfig, [*vllm, *remedy])
    load_config(RLConfig, ["@", rl_toml, *TRUNCATED])


def test_truncation_of_greedy_evaluation_is_refused(refusal: Callable[..., str], rl_toml: str) -> None:
    message = refusal("@", rl_toml, "--orchestrator.eval.top-k", "20")
    assert "orchestrator.eval: top_k = 20 has no effect with temperature = 0 (greedy)" in message
    config = load_config(
        RLConfig, ["@", rl_toml, "--orchestrator.eval.top-k", "20", "--orchestrator.eval.temperature", "0.7"]
    )
    assert config.orchestrator.eval.truncation == {"top_k": 20}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trainer.optimizer.lr", "inf"),
        ("orchestrator.sampling.temperature", "inf"),
        ("orchestrator.env.score_timeout_s", "inf"),
        ("orchestrator.filters.min_reward", "nan"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    refusal: Callable[..., str], rl_toml: str, option: str, value: str
) -> None:
    message = refusal("@", rl_toml, f"--{option.replace('_', '-')}", value)
    assert message == f"{option} = {value!r} is not valid: input should be a finite number"


def test_a_bound_may_be_infinite_where_that_means_none(rl_toml: str, refusal: Callable[..., str]) -> None:
    bounds = ("optimizer.max-grad-norm", "loss.clip-high", "loss.correction.high")
    flags = [word for bound in bounds for word in (f"--trainer.{bound}", "inf")]
    trainer = load_config(RLConfig, ["@", rl_toml, *flags]).trainer
    assert trainer.optimizer.max_grad_norm == trainer.loss.clip_high == trainer.loss.correction.high == math.inf
    for bound in bounds:
        assert "should be greater than 0" in refusal("@", rl_toml, f"--trainer.{bound}", "nan")


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_is_a_number_that_torch_takes(refusal: Callable[..., str], rl_toml: str, seed: int) -> None:
    assert f"seed = '{seed}' is not valid: input should be" in refusal("@", rl_toml, "--seed", str(seed))


def test_an_empty_stop_is_refused(refusal: Callable[..., str], rl_toml: str) -> None:
    assert "an empty text would end every completion" in refusal("@", rl_toml, "--orchestrator.sampling.stop", '[""]')


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_address_with_or_without_version(rl_toml: str, ending: str) -> None:
    url = f"http://127.0.0.1:8000{ending}"
    config = load_config(RLConfig, ["@", rl_toml, "--orchestrator.client.base-url", url])
    assert config.orchestrator.client.base_url == "http://127.0.0.1:8000"


def test_a_shared_mistake_is_told_once(refusal: Callable[..., str], rl_toml: str) -> None:
    assert refusal("@", rl_toml, "--max-steps", "none").count("max_steps") == 1


def test_a_missing_model_names_the_flag_that_gives_it(refusal: Callable[..., str]) -> None:
    assert "--model.name" in refusal("--max-steps", "3")


@pytest.mark.parametrize("url", ["localhost:8000", "http://host:xx", "http://"])
def test_an_address_that_is_none(refusal: Callable[..., str], rl_toml: str, url: str) -> None:
    message = refusal("@", rl_toml, "--orchestrator.client.base-url", url)
    assert "orchestrator.client.base_url" in message and repr(url) in message


def test_a_port_may_be_given_as_an_address(rl_toml: str, refusal: Callable[..., str]) -> None:
    url = "http://localhost:8001"
    for client, expected in ((["--orchestrator.client.base-url", f"{url}/v1"], url), ([], "http://127.0.0.1:8001")):
        config = load_config(RLConfig, ["@", rl_toml, "--inference.server.port", url, *client])
        assert config.inference is not None and config.inference.server.port == 8001
        assert config.orchestrator.client.base_url == expected
    for address in ("http://localhost", "http://localhost:x"):
        told = f"inference.server.port: {address!r} is an address without a port; give one like 8000"
        assert refusal("@", rl_toml, "--inference.server.port", address).startswith(told)


def test_a_deployment_that_shares_memory_needs_our_engine(rl_toml: str, refusal: Callable[..., str]) -> None:
    assert load_config(RLConfig, ["@", rl_toml, "--deployment", "colocated"]).deployment == "colocated"
    told = refusal("@", rl_toml, "--deployment", "shared", "--inference.engine", "vllm")
    assert "deployment = 'shared' with inference.engine = 'vllm': it needs the native engine" in told
    assert "with no inference section" in refusal("@", rl_toml, "--deployment", "shared", "--inference", "None")


def test_a_cache_is_released_to_a_trainer_in_the_same_process_only(rl_toml: str, refusal: Callable[..., str]) -> None:
    given = ["@", rl_toml, "--release-cache", "True"]
    assert load_config(RLConfig, [*given, "--deployment", "colocated"]).release_cache is True
    told = refusal(*given, "--deployment", "shared")
    assert "release_cache = True with deployment = 'shared'" in told and "'colocated'" in told
