"""Which process of `rl` gets which GPU of this machine: a plan, made before anything starts, that `--dry-run` prints.

Places count the visible GPUs: place 0 is the first of CUDA_VISIBLE_DEVICES. Each process sees its own GPUs only.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.commands.rl import RLConfig
from tandem.config.gpus import Gpus
from tandem.utils.devices import VISIBLE, gpu_memory_bytes, named_gpus
from tandem.utils.errors import UserError

# Flags of vLLM that say how many GPUs one copy of the model takes, and how many copies there are here.
COPY_FLAGS = (("tensor-parallel-size", "-tp"), ("pipeline-parallel-size", "-pp"))
COPIES_FLAGS = (("data-parallel-size-local", "-dpl"), ("data-parallel-size", "-dp"))


@dataclass(frozen=True)
class GpuPlan:
    """`servers` has the places of each inference server, `trainer` those of its ranks."""

    world: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES names them
    servers: tuple[tuple[int, ...], ...]
    trainer: tuple[int, ...]
    memory_bytes: tuple[int, ...] = ()  # of each GPU; empty where there is none to ask

    @property
    def is_together(self) -> bool:
        """Whether trainer and inference have a GPU in common."""
        return any(place in self.trainer for places in self.servers for place in places)

    def environment(self, places: Sequence[int]) -> dict[str, str]:
        return {VISIBLE: ",".join(self.world[place] for place in places)}

    def users(self, place: int) -> list[str]:
        """Who computes on a GPU."""
        names = server_names(len(self.servers))
        servers = [name for name, places in zip(names, self.servers, strict=True) if place in places]
        ranks = [f"trainer rank {rank}" for rank, trained in enumerate(self.trainer) if trained == place]
        return servers + ranks


def server_names(count: int) -> list[str]:
    return ["inference"] if count == 1 else [f"inference_{number}" for number in range(count)]


def find_gpu_plan(config: RLConfig) -> GpuPlan | None:
    """The plan for this machine; None where everything runs on CPUs. A dry run believes CUDA_VISIBLE_DEVICES on a
    machine without GPUs: a plan can be looked at anywhere. Ray gives its actors their GPUs itself."""
    if config.ray.address is not None:
        return None
    memory = gpu_memory_bytes()
    named = named_gpus(os.environ)
    if named is None:
        named = [str(place) for place in range(len(memory))]
    elif memory or not config.dry_run:
        named = named[: len(memory)]
    return plan_gpus(config, named, memory)


def plan_gpus(config: RLConfig, world: Sequence[str], memory_bytes: Sequence[int] = ()) -> GpuPlan | None:
    """Raises UserError, with the plan in it, where it asks for more than there is or for one GPU twice."""
    wants = {role: want for role, want in _wants(config).items() if want is not None}
    if not wants or (not world and not _is_asked(config)):
        return None
    deployment = config.deployment
    if deployment is None:
        # One GPU is shared, as long as nobody asks for more.
        deployment = "shared" if len(world) == 1 and not _is_asked(config) and set(wants.values()) == {1} else "split"
    if deployment == "split":
        places = _allocate(wants, world)
    else:
        together = config.gpus.trainer or config.gpus.inference or wants["trainer"]
        if None not in (config.gpus.trainer, config.gpus.inference) and config.gpus.trainer != config.gpus.inference:
            raise UserError(
                f"deployment = {deployment!r} has trainer and inference on the same GPUs: give gpus.trainer alone"
            )
        if deployment == "shared" and _count(together) > 1:
            raise UserError(
                f"deployment = {deployment!r} is for one GPU, and {_count(together)} are asked for (gpus.trainer, "
                "trainer.parallel.ranks); set deployment to 'split' or 'colocated'"
            )
        places = dict.fromkeys(wants, _allocate({"trainer": together}, world)["trainer"])
    servers = places.get("inference", ())
    each = config.inference is not None and config.inference.engine == "native"
    return GpuPlan(
        world=tuple(world),
        servers=tuple((place,) for place in servers) if each else (servers,) if servers else (),
        trainer=places.get("trainer", ()),
        memory_bytes=tuple(memory_bytes[: len(world)]),
    )


def vllm_parallelism(flags: Mapping[str, Any]) -> tuple[int, int | None]:
    """GPUs of one copy of the model, and the number of copies on this machine if the flags say so."""
    copy = 1
    for names in COPY_FLAGS:
        copy *= _flag(flags, names) or 1
    given = [count for names in COPIES_FLAGS if (count := _flag(flags, names)) is not None]
    return copy, given[0] if given else None


def _flag(flags: Mapping[str, Any], names: tuple[str, str]) -> int | None:
    found = [flags[name] for name in names if name in flags]
    return int(found[0]) if found else None


def _is_asked(config: RLConfig) -> bool:
    return config.gpus.inference is not None or config.gpus.trainer is not None


def count_ranks(config: RLConfig) -> int:
    return _count(config.gpus.trainer or config.trainer.parallel.ranks)


def _wants(config: RLConfig) -> dict[str, Gpus]:
    """What each role asks for, by itself or by its other options; None where it needs no GPU."""
    wants: dict[str, Gpus] = {"inference": None, "trainer": None}
    inference, trainer = config.inference, config.trainer
    if inference is not None and inference.engine != "sglang":
        wants["inference"] = _check_engine(config)
    ranks = trainer.parallel.ranks
    wants["trainer"] = config.gpus.trainer or ranks
    if "ranks" in trainer.parallel.model_fields_set and ranks != _count(wants["trainer"]):
        raise UserError(
            f"gpus.trainer = {config.gpus.trainer!r} and trainer.parallel.ranks = {ranks}: there is one rank on each "
            "GPU; give one of them"
        )
    devices = {"inference": "auto" if inference is None else inference.device, "trainer": trainer.device}
    for role, device in devices.items():
        asked = getattr(config.gpus, role)
        if asked is not None and (device == "cpu" or wants[role] is None):
            reason = f"{role}.device = 'cpu'" if device == "cpu" else "`rl` starts no server that could use them"
            raise UserError(f"gpus.{role} = {asked!r}, but {reason}; leave gpus.{role} out")
        if device == "cpu":
            wants[role] = None
    return wants


def _check_engine(config: RLConfig) -> Gpus:
    """GPUs for inference; vLLM's flags must be able to use them."""
    assert config.inference is not None
    asked = config.gpus.inference
    if config.inference.engine == "native":
        return asked or 1
    flags = config.inference.vllm.flags
    copy, copies = vllm_parallelism(flags)
    if asked is None:
        return copy * (copies or 1)
    count = _count(asked)
    if count % copy or (copies is not None and copy * copies != count):
        shown = f"{copy} GPUs a copy" + ("" if copies is None else f" and {copies} copies")
        raise UserError(f"gpus.inference = {asked!r} does not fit vLLM's flags, which ask for {shown}")
    return asked


def _count(want: Gpus) -> int:
    return len(want) if isinstance(want, list) else want or 0


def _allocate(wants: Mapping[str, Gpus], world: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Those that are named first; counts take the lowest places that are left, inference before the trainer."""
    named = [place for want in wants.values() if isinstance(want, list) for place in want]
    free = [place for place in range(len(world)) if place not in named]
    places: dict[str, tuple[int, ...]] = {}
    for role, want in wants.items():
        if isinstance(want, list):
            places[role] = tuple(want)
        else:
            count = want or 0
            places[role], free = tuple(free[:count]), free[count:]
    twice = sorted({place for place in named if named.count(place) > 1})
    missing = sorted(place for place in set(named) if place >= len(world))
    needed = sum(_count(want) for want in wants.values())
    problem = ""
    if twice:
        problem = f"GPU {twice[0]} is given twice"
    elif missing:
        problem = f"there is no GPU {missing[0]}"
    elif needed > len(world):
        problem = f"{needed} are asked for"
    if problem:
        raise UserError(f"gpus: {problem}; {_seen(world)}. The plan: {_describe(wants, places)}")
    return places


def _seen(world: Sequence[str]) -> str:
    named = os.environ.get(VISIBLE)
    source = f" ({VISIBLE} = {named!r})" if named is not None else ""
    return f"{len(world)} visible{source}" + (f", 0 to {len(world) - 1}" if len(world) > 1 else "")


def _describe(wants: Mapping[str, Gpus], places: Mapping[str, tuple[int, ...]]) -> str:
    parts = []
    for role, given in places.items():
        lacking = _count(wants[role]) - len(given)
        shown = ", ".join(map(str, given)) + (f" and {lacking} more" if lacking and given else "")
        parts.append(f"{role} {shown or f'{lacking} that are not there'}")
    return "; ".join(parts)
