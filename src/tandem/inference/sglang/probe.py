"""Probing a SGLang server: wait until it answers, and refuse it if it is not the one the configuration describes."""

import asyncio
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.inference.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.inference.sglang.translate import Abilities
from tandem.inference.weight_check import ServedModel, compare_configs
from tandem.utils.errors import UserError
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)

OLDEST = (0, 5, 7)  # a pause that retracts loses requests before
NO_FLUSH_WHILE_HELD = ((0, 5, 10), (0, 5, 20))  # these and all between
POLL_S = 0.5
PROBE_TOKENS = range(8)  # token ids to ask with
LEAST_GAP = 0.05  # between the two likeliest tokens, to tell log-probs at one temperature from another's
UNAUTHORIZED = (401, 403)


@dataclass(frozen=True)
class Probed:
    """The server as it was found."""

    abilities: Abilities
    model_path: str
    label: str  # SGLang's name of the weights it serves
    version: int


async def probe(client: SGLangClient, model_dir: Path, seq_len: int, deterministic: bool, timeout_s: float) -> Probed:
    """Raises UserError with what is wrong and how to mend it."""
    await _wait_until_healthy(client, timeout_s)
    try:
        model, server = await client.model_info(), await client.server_info()
        check_server(model, server, model_dir, seq_len, deterministic)
        at_temperature = await logprobs_are_at_temperature(client)
    except (SGLangRefused, SGLangUnreachable) as error:
        raise UserError(f"sglang.base_url: {error}") from error
    label = str(model["weight_version"])
    abilities = Abilities(
        version=server["version"],
        deterministic=bool(server.get("enable_deterministic_inference")),
        has_tokenizer=not server.get("skip_tokenizer_init"),
        has_adapters=bool(server.get("enable_lora")),
        logprobs_at_temperature=at_temperature,
    )
    logger.info("SGLang %s at %s serves %s (%s)", abilities.version, client.base_url, model["model_path"], label)
    if NO_FLUSH_WHILE_HELD[0] <= version_numbers(abilities.version) <= NO_FLUSH_WHILE_HELD[1]:
        logger.warning(
            "SGLang %s cannot empty its cache while it holds requests: weight updates with mode keep are refused "
            "while requests run; use wait or abort, or SGLang 0.5.21 or newer",
            abilities.version,
        )
    return Probed(abilities, model["model_path"], label, int(label) if label.isdecimal() else 0)


async def _wait_until_healthy(client: SGLangClient, timeout_s: float) -> None:
    deadline = Deadline(
        f"the SGLang server at {client.base_url}",
        timeout_s,
        "is it started, and is sglang.base_url right? Start it with: python -m sglang.launch_server --model-path …",
    )
    while True:
        try:
            if await client.is_healthy():
                return
            # It may have been left paused by a client that died before it could resume it, and generates nothing then.
            await client.resume()
        except SGLangUnreachable:
            pass
        except SGLangRefused as error:
            if error.status in UNAUTHORIZED:
                raise UserError(f"sglang.api_key_var: {error}; set it to the key of the SGLang server") from error
        try:
            deadline.check()
        except TimeoutError as error:
            raise UserError(str(error)) from error
        await asyncio.sleep(POLL_S)


def check_server(
    model: dict[str, Any], server: dict[str, Any], model_dir: Path, seq_len: int, deterministic: bool
) -> None:
    """Raise UserError unless `model` (/model_info) and `server` (/server_info) are what we are configured for."""
    if version_numbers(server["version"]) < OLDEST:
        raise UserError(f"SGLang {server['version']} is too old; 0.5.7 is the oldest that can hold running requests")
    check_model(model, model_dir)
    most = server["max_req_input_len"]
    if seq_len > most:
        raise UserError(
            f"seq_len = {seq_len} is more than the {most} tokens SGLang serves; lower seq_len, or start SGLang with "
            f"--context-length {seq_len + 6} or more and room for it in memory"
        )
    if server.get("preferred_sampling_params"):
        raise UserError("SGLang runs with --preferred-sampling-params, which changes requests; start it without")
    if server.get("disaggregation_mode", "null") != "null":
        raise UserError("SGLang runs with --disaggregation-mode; give the address of one that does prefill and decode")
    if deterministic and not server.get("enable_deterministic_inference"):
        raise UserError("deterministic is set: start SGLang with --enable-deterministic-inference")


def check_model(model: dict[str, Any], model_dir: Path) -> None:
    """SGLang must serve model.name, or a later version of it that was put there by an earlier server of ours."""
    if not model.get("is_generation", True):
        raise UserError(f"SGLang serves {model['model_path']}, which does not generate text")
    served = Path(model["model_path"])
    if served.exists() and served.samefile(model_dir):
        return
    start = f"start SGLang with --model-path {model_dir.resolve()}"
    if not str(model["weight_version"]).isdecimal():
        raise UserError(f"SGLang serves {served}, not model.name = {str(model_dir)!r}; {start}")
    try:
        compare_configs(ServedModel(model_dir).config, ServedModel(served).config)
    except (OSError, ValueError) as error:
        raise UserError(
            f"SGLang serves {served} (version {model['weight_version']}), which is no version of "
            f"model.name = {str(model_dir)!r}: {error}; {start}"
        ) from error


async def logprobs_are_at_temperature(client: SGLangClient) -> bool:
    """No route tells whether SGLang runs with SGLANG_RETURN_ORIGINAL_LOGPROB, so two answers have to: the distance
    between two tokens' log-probs halves from temperature 1 to 2, or does not."""
    for token in PROBE_TOKENS:
        gap = await _gap(client, token, 1.0)
        if gap >= LEAST_GAP:
            return await _gap(client, token, 2.0) < 0.75 * gap
    logger.warning("cannot tell whether SGLang's log-probs are at the sampling temperature; taking it that they are")
    return True


async def _gap(client: SGLangClient, token: int, temperature: float) -> float:
    """Between the log-probs of the two likeliest tokens after one token."""
    body = {
        "input_ids": [token],
        "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    output = await client.generate(body)
    (first, *_), (second, *_) = output["meta_info"]["output_top_logprobs"][0]
    return first - second


def version_numbers(version: str) -> tuple[int, ...]:
    """0.5.10.post1 and 0.5.10rc2 are 0.5.10 here."""
    return tuple(int(re.split(r"\D", part)[0] or 0) for part in version.split(".")[:3])
