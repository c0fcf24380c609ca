"""Work functions for `Cluster.start`: what an inference worker and a trainer rank do on their node.

Messages, each a table, and each with an answer; an answer with "error" says what went wrong:

    {"cmd": "init_engine", "model_name": …, "options": {…}, "weight_roots": […]}  →  {"status": "ready"} (also: gpu_id)
    {"cmd": "generate", "prompts": [{"prompt_ids": […], "sampling": {…}}, …]}     →  {"completions": [[…], …]}
    {"cmd": "update_weights", "path": …, "version": …}                            →  {"status": "loaded"}
    {"cmd": "train", "config": "{…}", "environment": {…}}                         →  {"exit_code": …, "log": …, …}
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tandem.commands.trainer import TrainerConfig
from tandem.launch.supervisor import last_lines
from tandem.orchestrator.client import InferenceError
from tandem.python.engines import InferenceEngine, NativeEngine, VLLMEngine
from tandem.python.pool import Job
from tandem.python.sglang import SGLangEngine
from tandem.types.rollout import SamplingOptions, SamplingRequest
from tandem.utils.errors import UserError
from tandem.utils.files import json_text, write_config
from tandem.utils.processes import SUPERVISOR_PID

ENGINES: dict[str, type[InferenceEngine]] = {"native": NativeEngine, "vllm": VLLMEngine, "sglang": SGLangEngine}


class Channel(Protocol):
    """What a work function is given to talk through."""

    def recv(self, max_size: int | None = None) -> Any: ...

    def send(self, message: Any) -> None: ...


def inference(handle: Channel, rank: int, world_size: int) -> None:
    """An engine on this node, which completes prompts and takes new weights."""
    with asyncio.Runner() as runner:
        worker = InferenceWorker()
        try:
            while True:
                handle.send(runner.run(worker.answer(handle.recv())))
        finally:
            runner.run(worker.close())


class InferenceWorker:
    """Answers the messages of an inference worker."""

    def __init__(self) -> None:
        self.engine: InferenceEngine | None = None

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._answer(message)
        except (UserError, InferenceError) as error:
            return {"error": str(error)}

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()

    async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        match message:
            case {"cmd": "init_engine", "model_name": model}:
                options = dict(message.get("options") or {})
                options |= {name: message[name] for name in ("gpu_id", "gpu_ids") if name in message}
                engine = options.pop("engine", "native")
                if engine not in ENGINES:
                    raise UserError(f"engine = {engine!r} is none of {', '.join(ENGINES)}")
                await self.close()
                self.engine = ENGINES[engine](model, **options)
                await self.engine.start(weight_roots=[Path(root) for root in message.get("weight_roots", [])])
                return {"status": "ready"}
            case {"cmd": "generate", "prompts": prompts}:
                loop = asyncio.get_running_loop()
                jobs = [Job(one["prompt_ids"], _sampling(one["sampling"]), loop.create_future()) for one in prompts]
                found = await self._started.sample(jobs)
                return {"completions": [[asdict(one) for one in group] for group in found]}
            case {"cmd": "update_weights", "path": path, "version": version}:
                await self._started.load(Path(path), version)
                return {"status": "loaded"}
        raise UserError(f"an inference worker does not know the message {str(message)[:200]}")

    @property
    def _started(self) -> InferenceEngine:
        if self.engine is None:
            raise UserError("the worker has no engine yet; send it init_engine first")
        return self.engine


def train(handle: Channel, rank: int, world_size: int) -> None:
    """A rank of the trainer, in a process of its own, which finds the others by what `Cluster` has set. It answers when
    the process has ended."""
    while True:
        match handle.recv():
            case {"cmd": "train", "config": config, "environment": environment}:
                handle.send(run_rank(json.loads(config), environment, rank))
            case message:
                handle.send({"error": f"a trainer rank does not know the message {str(message)[:200]}"})


def train_message(config: TrainerConfig, environment: dict[str, str]) -> dict[str, Any]:
    """The configuration as text: Python's JSON has infinity, that of messages has not."""
    return {"cmd": "train", "config": json_text(config.model_dump(mode="json")).decode(), "environment": environment}


def run_rank(config: dict[str, Any], environment: dict[str, str], rank: int) -> dict[str, Any]:
    folder = Path(config["output_dir"])
    path, log = folder / "config" / f"trainer_rank_{rank}.json", folder / "logs" / f"trainer_rank_{rank}.log"
    log.parent.mkdir(exist_ok=True)
    write_config(path, config)
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem.entrypoints.trainer", "@", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | {SUPERVISOR_PID: str(os.getpid())},
        )
    return {"exit_code": process.wait(), "log": str(log), "last_lines": last_lines(log)}


def _sampling(values: dict[str, Any]) -> SamplingRequest:
    options: dict[str, Any] = {**values["options"], "stop": tuple(values["options"]["stop"])}
    request: dict[str, Any] = {**values, "options": SamplingOptions(**options)}
    return SamplingRequest(**request)
