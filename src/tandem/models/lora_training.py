"""Training LoRA adapters on our decoder, with PEFT's parametrization and in PEFT's files.

The decoder computes q, k and v by one matrix, and gate and up by another; Hugging Face's projections, which adapters
are named after, are rows of those. `lora.py` serves what is trained here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.config.lora import TARGETS, LoRAConfig, refuse_unknown_targets
from tandem.models import ops
from tandem.models.decoder import Decoder, Projection
from tandem.models.hf import read_file, stream_tensors
from tandem.models.lora import CONFIG, FUSED, WEIGHTS, AdapterMismatch, rows_of, scaled
from tandem.models.runtime import whole
from tandem.utils.files import read_json

PREFIX = "base_model.model."


class LoRALinear(Projection):
    """A frozen projection of which some rows, a part each, get a low-rank change:

    y[part] = W[part] x + b[part] + scale · B A dropout(x)
    """

    def __init__(
        self, linear: nn.Linear, parts: Mapping[str, slice], config: LoRAConfig, generator: torch.Generator
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.parts = dict(parts)
        self.scale = config.scale
        self.dropout = config.dropout
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        for part, rows in self.parts.items():
            down = torch.empty(config.rank, linear.in_features)
            nn.init.kaiming_uniform_(down, a=5**0.5, generator=generator)
            self.lora_A[part] = nn.Parameter(down.to(linear.weight.device))
            self.lora_B[part] = nn.Parameter(
                torch.zeros(rows.stop - rows.start, config.rank, device=linear.weight.device)
            )

    def forward(self, input: Tensor) -> Tensor:
        out = ops.linear(input, self.weight, self.bias, None, batch_invariant=self.exact)
        for part, rows in self.parts.items():
            x = F.dropout(input, self.dropout, self.training)
            down = ops.linear(x, self.lora_A[part], None, None, batch_invariant=self.exact)
            up = ops.linear(down, self.lora_B[part], None, None, batch_invariant=self.exact)
            if self.exact:
                out[..., rows].add_(scaled(up, self.scale))
            else:
                out[..., rows].add_(up, alpha=self.scale)
        return out


def attach_lora(decoder: Decoder, config: LoRAConfig, seed: int = 0) -> None:
    """Freeze the decoder and give the projections that `config` names something to train. It computes what it did."""
    targets = targets_of(config)
    decoder.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    modules = dict(decoder.named_modules())
    for path, linear in list(modules.items()):
        parent, _, name = path.rpartition(".")
        parts = [target for target in targets if FUSED.get(target, target) == name]
        if parts and isinstance(linear, nn.Linear):
            rows = {part: rows_of(decoder, part, linear.out_features) for part in parts}
            setattr(modules[parent], name, LoRALinear(linear, rows, config, generator))


def targets_of(config: LoRAConfig) -> list[str]:
    """The projections of our decoder that are to be changed."""
    refuse_unknown_targets(config, TARGETS)
    return [target for target in TARGETS if config.targets == "all-linear" or target in config.targets]


def adapter_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """What is trained, under PEFT's names. Under sharding, all ranks have to ask."""
    tensors: dict[str, Tensor] = {}
    for name, part, linear in _adapted(decoder):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = whole(linear.lora_A[part])
        tensors[f"{PREFIX}{name}.lora_B.weight"] = whole(linear.lora_B[part])
    return tensors


def merged_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The weights under their Hugging Face names, with the adapter in them: W + scale · B A.

    Under sharding, all ranks have to ask.
    """
    return dict(stream_merged(decoder))


def stream_merged(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The same one tensor after the other."""
    adapted = {f"{name}.weight": (part, linear) for name, part, linear in _adapted(decoder)}
    for name, tensor in stream_tensors(decoder):
        if name in adapted:
            part, linear = adapted[name]
            tensor = tensor + linear.scale * (whole(linear.lora_B[part]) @ whole(linear.lora_A[part]))
        yield name, tensor


def adapter_config(config: LoRAConfig, base_model: Path, targets: list[str]) -> dict[str, Any]:
    """adapter_config.json, as PEFT reads it; `targets` are the projections that have an adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def load_adapter(decoder: Decoder, folder: Path) -> None:
    """Go on from an adapter of the same shape, published by us or saved by PEFT."""
    saved, config = read_file(folder / WEIGHTS), read_json(folder / CONFIG)
    expected = adapter_tensors(decoder)
    if saved.keys() != expected.keys():
        first = sorted(saved.keys() ^ expected.keys())[0]
        raise AdapterMismatch(f"{folder} is an adapter of other projections: {first!r} is in one of the two only")
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    for name, part, linear in _adapted(decoder):
        if scale != linear.scale:
            raise AdapterMismatch(f"{folder} was trained with scale {scale}, not {linear.scale}; give its alpha")
        with torch.no_grad():
            linear.lora_A[part].copy_(saved[f"{PREFIX}{name}.lora_A.weight"])
            linear.lora_B[part].copy_(saved[f"{PREFIX}{name}.lora_B.weight"])


def _adapted(decoder: Decoder) -> Iterator[tuple[str, str, LoRALinear]]:
    """Hugging Face's name and our module, for every projection that has an adapter."""
    for path, module in decoder.named_modules():
        if isinstance(module, LoRALinear):
            for part in module.parts:
                yield f"model.{path.rpartition('.')[0]}.{part}", part, module
