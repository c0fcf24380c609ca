"""Probing a SGLang server: wait until it answers, and refuse it if it is not the one the configuration describes."""

import asyncio
import contextlib
import logging
import re
from pathlib import Path
from typing import Any

import orjson

from tandem.config.inference import InferenceConfig
from tandem.engine.protocol import EngineError
from tandem.serving.sglang.backend import Weights
from tandem.serving.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.serving.sglang.translate import Abilities
from tandem.utils.errors import UserError
from tandem.utils.waiting import Deadline
from tandem.weights.check import ServedModel, compare_configs

logger = logging.getLogger(__name__)

OLDEST = (0, 5, 7)  # a pause that retracts loses requests before
POLL_S = 0.5
UNAUTHORIZED = (401, 403)
UNHEALTHY = 503


async def probe(client: SGLangClient, config: InferenceConfig) -> tuple[Abilities, Weights]:
    """What the server can do, and what it serves. Raises UserError with what is wrong and how to mend it."""
    try:
        await _wait_until_healthy(client, config.sglang.startup_timeout_s)
        model, server = await client.info("/model_info"), await client.info("/server_info")
        at_temperature = await logprobs_are_at_temperature(client)
    except (EngineError, TimeoutError, orjson.JSONDecodeError) as error:
        raise UserError(f"sglang.base_url: {error}") from error
    check_server(server, config)
    check_model(model, config.model.name)
    label = str(model["weight_version"])
    logger.info("SGLang %s at %s serves %s (%s)", server["version"], client.base_url, model["model_path"], label)
    abilities = Abilities(
        deterministic=bool(server.get("enable_deterministic_inference")),
        has_tokenizer=not server.get("skip_tokenizer_init"),
        has_adapters=bool(server.get("enable_lora")),
        logprobs_at_temperature=at_temperature,
    )
    return abilities, Weights(label, model["model_path"], int(label) if label.isdecimal() else 0)


async def _wait_until_healthy(client: SGLangClient, timeout_s: float) -> None:
    """SGLang says that it is healthy after it has generated a token."""
    deadline = Deadline(
        f"the SGLang server at {client.base_url}",
        timeout_s,
        "is it started, and is sglang.base_url right? Start it with: python -m sglang.launch_server --model-path …",
    )
    while True:
        try:
            await client.get("/health")
            return
        except SGLangUnreachable:
            pass
        except SGLangRefused as error:
            if error.status in UNAUTHORIZED:
                raise UserError(f"sglang.api_key_var: {error}; set it to the key of the SGLang server") from error
            if error.status == UNHEALTHY:  # it may have been left paused, by a client that died
                with contextlib.suppress(EngineError):
                    await client.post("/continue_generation")
        deadline.check()
        await asyncio.sleep(POLL_S)


def check_server(server: dict[str, Any], config: InferenceConfig) -> None:
    """Raise UserError unless the server (/server_info) does what we are configured for."""
    if version_numbers(server["version"]) < OLDEST:
        raise UserError(f"SGLang {server['version']} is too old; 0.5.7 is the oldest that can hold running requests")
    most, seq_len = server["max_req_input_len"], config.seq_len
    if seq_len > most:
        raise UserError(
            f"seq_len = {seq_len} is more than the {most} tokens SGLang serves; lower seq_len, or start SGLang with "
            f"--context-length {seq_len + 6} or more and room for it in memory"
        )
    if server.get("preferred_sampling_params"):
        raise UserError("SGLang runs with --preferred-sampling-params, which changes requests; start it without")
    if server.get("disaggregation_mode", "null") != "null":
        raise UserError("SGLang runs with --disaggregation-mode; give the address of one that does prefill and decode")
    if config.deterministic and not server.get("enable_deterministic_inference"):
        raise UserError("deterministic is set: start SGLang with --enable-deterministic-inference")


def check_model(model: dict[str, Any], model_dir: Path) -> None:
    """SGLang must serve model.name, or a later version of it that was put there by an earlier server of ours."""
    served, label = Path(model["model_path"]), str(model["weight_version"])
    if served.exists() and served.samefile(model_dir):
        return
    start = f"start SGLang with --model-path {model_dir.resolve()}"
    if not label.isdecimal():
        raise UserError(f"SGLang serves {served}, not model.name = {str(model_dir)!r}; {start}")
    try:
        compare_configs(ServedModel(model_dir).config, ServedModel(served).config)
    except (OSError, ValueError) as error:
        raise UserError(
            f"SGLang serves {served} (version {label}), which is no version of model.name = {str(model_dir)!r}: "
            f"{error}; {start}"
        ) from error


async def logprobs_are_at_temperature(client: SGLangClient) -> bool:
    """No route tells whether SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB. But at a very high temperature all
    tokens are about equally likely."""
    sampling = {"max_new_tokens": 1, "temperature": 1000.0, "ignore_eos": True}
    body = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 20}
    output = orjson.loads(await client.post("/generate", **body))
    (likeliest, *_), *_, (least, *_) = output["meta_info"]["output_top_logprobs"][0]
    return likeliest - least < 0.05


def version_numbers(version: str) -> tuple[int, ...]:
    """0.5.10.post1 and 0.5.10rc2 are 0.5.10 here."""
    return tuple(int(re.split(r"\D", part)[0] or 0) for part in version.split(".")[:3])
