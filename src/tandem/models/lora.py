"""LoRA adapters in PEFT's format: several at once over one decoder, chosen token by token.

The decoder does not know of them: a bank hooks itself to the projections that its adapters change, and adds
up·down·x for the tokens that are routed to an adapter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tandem.models import exact
from tandem.models.decoder import Decoder
from tandem.models.hf import WeightMismatch, read_file
from tandem.utils.files import read_table

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
LARGEST_ALPHA = 1e6
# What PEFT can add to two matrices per projection, with the value that means it does not.
UNSUPPORTED = {
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "alpha_pattern": {},
}


class AdapterMismatch(ValueError):
    """Files that are no LoRA adapter of this model."""


@dataclass(frozen=True)
class LowRank:
    """What is added to one projection: up (out, rank) times down (rank, in), times the scale of each output. Without
    exact mode the scale is part of `up`."""

    down: Tensor
    up: Tensor
    scale: Tensor | None = None  # (out,), in float32


@dataclass(frozen=True)
class Piece:
    """What a file holds of one projection."""

    down: Tensor
    up: Tensor
    scale: float


AdapterWeights = Mapping[str, LowRank]
"""By the decoder's name of the projection."""


def read_adapter(folder: Path, decoder: Decoder) -> AdapterWeights:
    """The adapter of a directory, for this decoder, in its precision and on its device."""
    if not (folder / CONFIG).exists():
        raise AdapterMismatch(f"{folder} is no LoRA adapter: there is no {CONFIG} in it")
    config = read_table(folder / CONFIG)
    try:
        tensors = read_file(folder / WEIGHTS)
    except WeightMismatch as error:
        raise AdapterMismatch(str(error)) from error
    return make_adapter(tensors, config, folder, decoder)


def make_adapter(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path, decoder: Decoder
) -> AdapterWeights:
    """The same from tensors under PEFT's names; `folder` is where their files are or will be."""
    check_config(config, folder / CONFIG)
    modules = dict(decoder.named_modules())
    factors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, side = _parse_key(key)
        factors.setdefault(module, {})[side] = tensor
    parts: dict[str, dict[str, Piece]] = {}
    for name, sides in factors.items():
        if sides.keys() != {"A", "B"}:
            raise AdapterMismatch(f"{name} has lora_{next(iter(sides))} only")
        if any(side.ndim != 2 or not side.is_floating_point() or 0 in side.shape for side in sides.values()):
            raise AdapterMismatch(f"{name}: lora_A and lora_B must be matrices of floating-point numbers")
        rank = sides["A"].shape[0]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        path, _, projection = name.rpartition(".")
        module = f"{path}.{FUSED.get(projection, projection)}"
        parts.setdefault(module, {})[projection] = Piece(sides["A"], sides["B"], scale)
    if not parts:
        raise AdapterMismatch(f"{folder / WEIGHTS} holds no tensors")
    weights = {name: _check_shapes(decoder, modules.get(name), name, pieces) for name, pieces in parts.items()}
    return _join(decoder, weights, parts)


def check_config(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterMismatch(f"{path}: peft_type is {config.get('peft_type')!r}, not 'LORA'")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= LARGEST_ALPHA:
        raise AdapterMismatch(f"{path}: lora_alpha is {alpha!r}, not a number up to {LARGEST_ALPHA:g}")
    if config.get("use_rslora") not in (None, False, True):
        raise AdapterMismatch(f"{path}: use_rslora is {config['use_rslora']!r}, neither true nor false")
    for key, off in UNSUPPORTED.items():
        if config.get(key) and config[key] != off:
            raise AdapterMismatch(f"{path}: {key} = {config[key]!r} is not supported, only {off!r}")


def _parse_key(key: str) -> tuple[str, str]:
    """base_model.model.model.layers.0.mlp.up_proj.lora_A.weight -> ("layers.0.mlp.up_proj", "A")."""
    name = key.removeprefix("base_model.model.").removeprefix("model.").replace(".default", "")
    module, _, rest = name.rpartition(".lora_")
    if not module or rest not in ("A.weight", "B.weight"):
        raise AdapterMismatch(f"{key!r} is not a weight of a LoRA adapter that can be served")
    return module, rest[0]


def _check_shapes(decoder: Decoder, linear: nn.Module | None, module: str, pieces: dict[str, Piece]) -> Tensor:
    """The weight that the pieces change."""
    if not isinstance(linear, nn.Linear):
        raise AdapterMismatch(f"the model has no projection {module!r} that an adapter could change")
    num_rows, num_columns = linear.weight.shape
    for projection, piece in pieces.items():
        rows = rows_of(decoder, projection, num_rows)
        size = (rows.stop - rows.start, piece.down.shape[0])
        if tuple(piece.up.shape) != size or piece.down.shape[1] != num_columns:
            raise AdapterMismatch(
                f"{module}: the adapter of {projection} has shapes {tuple(piece.down.shape)} and "
                f"{tuple(piece.up.shape)}, the model needs (rank, {num_columns}) and ({size[0]}, rank)"
            )
    return linear.weight


def _join(decoder: Decoder, weights: Mapping[str, Tensor], parts: Mapping[str, dict[str, Piece]]) -> AdapterWeights:
    """The adapters of projections that the decoder computes as one, as one. An adapter has hundreds of small matrices:
    all are scaled and copied by a few calls."""
    joined: dict[str, LowRank] = {}
    every_piece = [piece for pieces in parts.values() for piece in pieces.values()]
    downs: list[Tensor] = []  # where each piece goes
    ups: list[Tensor] = []
    for module, pieces in parts.items():
        weight = weights[module]
        num_rows, num_columns = weight.shape
        total_rank = sum(len(piece.down) for piece in pieces.values())
        down = weight.new_empty(total_rank, num_columns)
        up = weight.new_zeros(num_rows, total_rank)
        scale = torch.ones(num_rows, device=weight.device) if decoder.exact else None
        rank = 0
        for projection, piece in pieces.items():
            rows, end = rows_of(decoder, projection, num_rows), rank + len(piece.down)
            downs.append(down[rank:end])
            ups.append(up[rows, rank:end])
            if scale is not None:
                scale[rows] = piece.scale
            rank = end
        joined[module] = LowRank(down, up, scale)
    torch._foreach_copy_(downs, [piece.down for piece in every_piece])
    changes = [piece.up for piece in every_piece]
    if not decoder.exact:
        changes = torch._foreach_mul(changes, [piece.scale for piece in every_piece])
    torch._foreach_copy_(ups, changes)
    return joined


def scaled(change: Tensor, scale: Tensor | float) -> Tensor:
    """Rounded once, so that exact mode has it alike in engine and trainer."""
    return (change.float() * scale).to(change.dtype)


def rows_of(decoder: Decoder, projection: str, num_rows: int) -> slice:
    """Where the rows of a projection lie in the matrix that holds it."""
    spec = decoder.spec
    starts = {"q_proj": 0, "k_proj": spec.q_size, "v_proj": spec.q_size + spec.kv_size}
    starts |= {"gate_proj": 0, "up_proj": spec.intermediate_size}
    sizes = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    sizes |= {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
    start = starts.get(projection, 0)
    return slice(start, start + sizes.get(projection, num_rows))


class AdapterBank:
    """The adapters a decoder can use, by a number above zero each."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._adapters: dict[int, AdapterWeights] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        self._routes: list[tuple[int, Tensor | None]] = []
        self._places: dict[int, int] = {}
        self._num_places = 0

    def __len__(self) -> int:
        return len(self._adapters)

    def put(self, number: int, weights: AdapterWeights) -> None:
        """Load an adapter, or replace the one of this number: in place, where both have the same shapes."""
        held = self._adapters.get(number)
        if held is not None and _shapes(held) == _shapes(weights):
            torch._foreach_copy_(
                [tensor for name in weights for tensor in _tensors(held[name])],
                [tensor for part in weights.values() for tensor in _tensors(part)],
            )
            return
        self._adapters[number] = weights
        self._num_places += 1
        self._places[number] = self._num_places
        self._hook()

    def remove(self, number: int) -> None:
        del self._adapters[number], self._places[number]
        self._hook()

    @property
    def places(self) -> dict[int, int]:
        """Where the weights of each adapter lie, as a number above zero that changes when they lie elsewhere. What
        was captured with them, as a CUDA graph, is true for as long as it does not."""
        return self._places

    def route(self, numbers: NDArray[np.int64], device: torch.device) -> int | None:
        """Say which adapter each token of the next forward pass goes through (0: none). Returns it where it is one
        and the same for all."""
        self._routes = []
        used = np.unique(numbers).tolist() if self._adapters else [0]
        for number in used:
            if number:
                tokens = np.flatnonzero(numbers == number)
                self._routes.append((number, None if len(used) == 1 else torch.from_numpy(tokens).to(device)))
        return used[0] if len(used) == 1 else None

    def _hook(self) -> None:
        """One hook on every projection that some adapter changes, and none elsewhere."""
        wanted = {name for weights in self._adapters.values() for name in weights}
        for name in set(self._hooks) - wanted:
            self._hooks.pop(name).remove()
        modules = dict(self._decoder.named_modules())
        for name in wanted - set(self._hooks):
            self._hooks[name] = modules[name].register_forward_hook(self._adder(name))

    def _adder(self, name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            for number, tokens in self._routes:
                part = self._adapters[number].get(name)
                if part is None:
                    continue
                x = inputs[0] if tokens is None else inputs[0][tokens]
                if part.scale is not None:
                    change = scaled(exact.linear(exact.linear(x, part.down, None), part.up, None), part.scale)
                elif tokens is None:
                    output.addmm_(x @ part.down.T, part.up.T)
                    continue
                else:
                    change = (x @ part.down.T) @ part.up.T
                output = output + change if tokens is None else output.index_add(0, tokens, change)
            return output

        return add


def _tensors(part: LowRank) -> list[Tensor]:
    return [tensor for tensor in (part.down, part.up, part.scale) if tensor is not None]


def _shapes(weights: AdapterWeights) -> dict[str, list[torch.Size]]:
    return {name: [tensor.shape for tensor in _tensors(part)] for name, part in weights.items()}
