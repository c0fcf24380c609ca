"""Options of `rl`: the three processes and what they share.

A shared value may be given once, at the top or in any section, and reaches every section that has it. Given in two
places, it must be the same. Flags win over files, whichever place each of them names.
"""

from contextlib import suppress
from functools import reduce
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from tandem.commands.colocated import CacheOptions
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import Config
from tandem.config.gpus import GpuConfig
from tandem.config.inference import InferenceConfig, port_of
from tandem.config.ray import RayConfig
from tandem.config.shared import LogOptions, ModelOptions, RunOptions, SeedOptions, StartOptions, SyncOptions, root_url
from tandem.config.slurm import SlurmOptions
from tandem.config.sources import Tree, merge

SECTIONS: dict[str, type[Config]] = {
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
}
Deployment = Literal["split", "shared", "colocated"]
SHARED_KEYS = tuple(
    name
    for options in (ModelOptions, RunOptions, SyncOptions, SeedOptions, LogOptions)
    for name in options.model_fields
)


class RLConfig(
    SlurmOptions, CacheOptions, LogOptions, StartOptions, SeedOptions, SyncOptions, RunOptions, ModelOptions
):
    """Reinforcement learning: inference server, orchestrator and trainer in one command."""

    trainer: TrainerConfig
    orchestrator: OrchestratorConfig
    inference: InferenceConfig | None = None
    """Left out: start no server and use the one at orchestrator.client.base-url."""

    deployment: Deployment | None = None
    """Where trainer and server run. split: two processes, each with its own GPUs. shared: two processes on one GPU, new
    weights through its memory. colocated: one process, or one for each rank of the trainer. None: shared on one GPU,
    split otherwise."""

    gpus: GpuConfig = GpuConfig()
    ray: RayConfig = RayConfig()

    max_restarts: int = Field(default=3, ge=0)
    """How often each process that fails is started again, once the run has made a step. Server: the run goes on.
    Orchestrator and trainer: both go on from the newest checkpoint. 0: a failure ends the run."""

    restart_delay_s: float = Field(default=1.0, ge=0)
    """Wait before the first restart of a process; it doubles from one to the next, up to a minute."""

    show: Literal["auto", "live", "lines"] = "auto"
    """live: a progress display. lines: the log lines of all processes, prefixed. auto: live on a terminal."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any) -> Any:
        return share_values(data) if isinstance(data, dict) else data

    @classmethod
    def combine(cls, files: Tree, flags: Tree) -> Tree:
        return share_layers([files, flags])

    @model_validator(mode="after")
    def _weights_outlive_their_use(self) -> "RLConfig":
        """The trainer may run so many versions ahead of the one the server is loading."""
        needed = self.orchestrator.max_staleness + 2
        if self.trainer.keep_weights < needed:
            raise ValueError(
                f"trainer.keep_weights = {self.trainer.keep_weights} is too few for orchestrator.max_staleness = "
                f"{self.orchestrator.max_staleness}: a version could be deleted while it is being loaded; "
                f"the smallest valid value is {needed}"
            )
        return self

    @model_validator(mode="after")
    def _advantages_fit_the_loss(self) -> "RLConfig":
        loss, advantage = self.trainer.loss, self.orchestrator.advantage.type
        if loss.type == "ppo" and advantage != "reward":
            raise ValueError(
                f'orchestrator.advantage.type = {advantage!r} with trainer.loss.type = "ppo": the critic turns '
                'rewards into advantages; set orchestrator.advantage.type = "reward"'
            )
        if advantage == "none" and loss.teacher.coef == 0:
            raise ValueError(
                'orchestrator.advantage.type = "none" without a teacher model leaves nothing to learn from; '
                "set trainer.loss.teacher.model and trainer.loss.teacher.coef"
            )
        return self

    @model_validator(mode="after")
    def _ratios_start_at_one(self) -> "RLConfig":
        """vLLM's log-probs are those after truncation, the trainer's those before it."""
        truncation = self.orchestrator.sampling.truncation
        if not truncation or self.inference is None or self.inference.engine != "vllm":
            return self
        loss = self.trainer.loss
        if loss.type != "reinforce" and loss.old_logprobs == "sampled":
            (name, value), *_ = truncation.items()
            raise ValueError(
                f"orchestrator.sampling.{name} = {value:g} with inference.engine = 'vllm': vLLM gives log-probs "
                "after truncation, so ratios would be below 1 before any update; set "
                'trainer.loss.old_logprobs = "recomputed"'
            )
        return self

    @model_validator(mode="after")
    def _deployment_has_our_engine(self) -> "RLConfig":
        """Only our own engine takes weights from memory."""
        engine = None if self.inference is None else self.inference.engine
        if self.deployment in ("shared", "colocated") and engine != "native":
            given = "no inference section" if engine is None else f"inference.engine = {engine!r}"
            raise ValueError(
                f"deployment = {self.deployment!r} with {given}: it needs the native engine, started by `rl`; set "
                "inference.engine = 'native', or leave deployment out"
            )
        if self.release_cache is not None and self.deployment != "colocated":
            raise ValueError(
                f"release_cache = {self.release_cache} with deployment = {self.deployment!r}: only a trainer in the "
                "engine's own process can have its memory; leave it out, or set deployment to 'colocated'"
            )
        return self

    @model_validator(mode="after")
    def _one_scheduler(self) -> "RLConfig":
        if self.slurm is not None and self.ray.address is not None:
            raise ValueError(
                f"slurm.nodes = {self.slurm.nodes} and ray.address = {self.ray.address!r} are both given: a SLURM "
                "job or a Ray cluster places the processes of a run; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _client_finds_server(self) -> "RLConfig":
        if self.inference is None:
            return self
        client = self.orchestrator.client
        if client.servers_file is not None or "," in client.base_url:
            raise ValueError(
                "orchestrator.client names several servers, and the inference section has `rl` start one; leave one of "
                "them out"
            )
        client_port = urlsplit(client.base_url).port
        if client_port != self.inference.server.port:
            raise ValueError(
                f"orchestrator.client.base_url = {self.orchestrator.client.base_url!r} does not lead to the server "
                f"that `rl` starts (inference.server.port = {self.inference.server.port}); leave it out, "
                "or leave out the inference section to use a running server"
            )
        server_key, client_key = self.inference.server.api_key, self.orchestrator.client.api_key
        if server_key is not None and client_key is not None and server_key != client_key:
            raise ValueError(
                "inference.server.api_key and orchestrator.client.api_key differ, so the server would refuse the "
                "orchestrator; give the key only at inference.server"
            )
        return self


def storable(config: RLConfig) -> Tree:
    """A file that gives this configuration again, and that other files and flags can be laid over: shared values
    once, at the top, and nothing that follows from another value."""
    tree = config.model_dump(mode="json")
    for name in SECTIONS:
        if tree[name] is not None:
            tree[name] = {key: value for key, value in tree[name].items() if key not in SHARED_KEYS}
    client = tree["orchestrator"]["client"]
    if config.inference is not None and client["base_url"] == config.inference.server.url:
        del client["base_url"]
    return tree


def share_values(data: Tree) -> Tree:
    """Spread each shared value over the top and the sections that take it; refuse contradictions."""
    return share_layers([data])


def share_layers(layers: list[Tree]) -> Tree:
    """The same for layers of which later ones win: values must agree within a layer, not between them."""
    # A section may be switched off from the command line, where None is text.
    layers = [layer | {name: None for name in SECTIONS if layer.get(name) == "None"} for layer in layers]
    merged = reduce(merge, layers)
    if not all(isinstance(layer.get(name, {}), dict | None) for layer in layers for name in SECTIONS):
        return merged  # a section of the wrong type: the field's own validation says so
    started = [name for name in SECTIONS if merged.get(name, {} if name != "inference" else None) is not None]
    result = reduce(merge, [_spread(layer, started) for layer in layers])
    _share_server(result)
    return result


def _spread(layer: Tree, sections: list[str]) -> Tree:
    result = layer | {name: dict(layer.get(name) or {}) for name in sections}
    for key in SHARED_KEYS:
        _share_key(result, (key,))
    return result


def _share_key(data: Tree, path: tuple[str, ...]) -> None:
    """Share the value at `path`; tables are shared key by key, so that each may be given anywhere."""
    places = {"": data} | {
        name: data[name]
        for name, cls in SECTIONS.items()
        if isinstance(data.get(name), dict) and path[0] in cls.model_fields
    }
    given = {name: value for name, tree in places.items() if (value := _get(tree, path)) is not None}
    if not given:
        return
    if all(isinstance(value, dict) for value in given.values()):
        for key in {key: None for value in given.values() for key in value}:
            _share_key(data, (*path, key))
        return
    (first, value), *others = given.items()
    for name, other in others:
        if str(other) != str(value):
            dotted = ".".join(path)
            raise ValueError(
                f"{_dotted(first, dotted)} = {value!r} and {_dotted(name, dotted)} = {other!r} contradict each other; "
                f"give {dotted} once"
            )
    for tree in places.values():
        _set(tree, path, value)


def _share_server(data: Tree) -> None:
    """The server `rl` starts is the one the orchestrator talks to, unless another address is given."""
    inference, orchestrator = data.get("inference"), data.get("orchestrator")
    if not isinstance(inference, dict) or not isinstance(orchestrator, dict):
        return
    server = inference.get("server", {})
    client = orchestrator.get("client", {})
    if not isinstance(server, dict) or not isinstance(client, dict):
        return
    keys = ("api_key", "api_key_var")
    shared = {} if any(client.get(key) for key in keys) else {key: server[key] for key in keys if server.get(key)}
    host = server.get("host", "127.0.0.1")
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    with suppress(ValueError):  # which the server's own option tells
        shared["base_url"] = root_url(f"http://{host}:{port_of(server.get('port', 8000))}")
    orchestrator["client"] = shared | client


def _dotted(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _get(tree: Tree, path: tuple[str, ...]) -> Any:
    value: Any = tree
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _set(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        tree[key] = dict(tree.get(key) or {})
        tree = tree[key]
    tree[last] = value
