"""An `AutoModelForCausalLM` of transformers in the place of our decoder (`model.impl = "hf"`).

The trainer hands over packed segments; transformers wants rows. Every sequence becomes a row, the beginning it shares
with others and its own rest, padded on the right, where causality alone keeps the padding out of sight. Hidden states
go back to where the tokens lie.
"""

import importlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.lora import LoRAConfig, refuse_unknown_targets
from tandem.models.attention import PackedAttention
from tandem.models.files import needs_its_code
from tandem.models.lora_training import PREFIX, adapter_config
from tandem.models.precision import rounding_autocast
from tandem.models.runtime import whole
from tandem.models.shards import read_tensor_headers
from tandem.utils.errors import UserError

ADAPTER = "default"  # PEFT's name of the only adapter there is
# What is random in a forward pass of training: rollouts come from a model without it.
RANDOM = ("dropout", "pdrop", "jitter_noise")
PROBE_TOKENS = 8
MAX_REASON = 250  # characters of what transformers says


@dataclass(frozen=True)
class Shape:
    """What the trainer asks of a model's shape, by the names of our own spec."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    q_size: int  # all query heads together


class HFDecoder(nn.Module):
    """A transformers model without its head, called as our decoder is."""

    exact = False  # its kernels are PyTorch's

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.spec = shape_of(model.config.get_text_config())
        self.logit_scale = 1.0
        self.compute_dtype: torch.dtype | None = None  # of hidden states, see `precision.py`; None: as the weights are
        self.adapter_targets: list[str] = []
        # GPT-2 keeps its matrices transposed.
        self.is_transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, wherever the architecture keeps them."""
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return next(blocks for blocks in lists if len(blocks) == self.spec.num_layers)

    @property
    def output_weight(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def forward(self, token_ids: Tensor, positions: Tensor, context: PackedAttention) -> Tensor:
        """token_ids (tokens,) -> hidden states after the last norm (tokens, hidden), scaled as the logits are.

        Positions count from 0 in each sequence, as transformers assumes by itself.
        """
        rows, cells = lay_out(context.lengths, context.parents)
        with rounding_autocast(token_ids.device, self.output_weight.dtype, self.compute_dtype):
            hidden = self.model.base_model(input_ids=token_ids[rows], use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, cells) * self.logit_scale
        return hidden if self.compute_dtype is None else hidden.to(self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.output_weight)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """What is trained, under PEFT's names. Under sharding, all ranks have to ask."""
        return {
            f"{PREFIX}{name}.lora_{side}.weight": whole(getattr(module, f"lora_{side}")[ADAPTER].weight)
            for name, module in self._adapted()
            for side in ("A", "B")
        }

    def whole_tensors(self) -> dict[str, Tensor]:
        """The weights under the names in the model's files. Under sharding, all ranks have to ask."""
        return self._as_in_files(self._own_tensors())

    def merged_tensors(self) -> dict[str, Tensor]:
        """The same with the adapter in them."""
        tensors = self._own_tensors()
        for name, module in self._adapted():
            down, up = whole(module.lora_A[ADAPTER].weight), whole(module.lora_B[ADAPTER].weight)
            change = module.scaling[ADAPTER] * (up @ down)
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + (change.T if module.fan_in_fan_out else change)
        return self._as_in_files(tensors)

    def _own_tensors(self) -> dict[str, Tensor]:
        """All but an adapter's, under transformers' names."""
        kept = self.model.state_dict().keys()
        own = dict(self.model.named_parameters()) | {name: b for name, b in self.model.named_buffers() if name in kept}
        return {name.replace(".base_layer.", "."): whole(t) for name, t in own.items() if ".lora_" not in name}

    def _as_in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self.model, tensors))

    def attach_lora(self, config: LoRAConfig, seed: int) -> None:
        """Freeze the model and have PEFT put adapters on the projections that `config` names."""
        linear_names = sorted(self._linear_names())
        refuse_unknown_targets(config, linear_names)
        peft = _require("peft")
        options = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            # PEFT's own all-linear means the stacked experts of some models, too.
            target_modules=linear_names if config.targets == "all-linear" else config.targets,
            fan_in_fan_out=self.is_transposed,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                adapted = peft.get_peft_model(self.model, options)
            except ValueError as error:
                raise UserError(f"lora.targets = {config.targets!r}: PEFT refuses it: {error}") from error
        self._refuse_adapted_experts(config)
        self.adapter_targets = sorted({name.rpartition(".")[2] for name in adapted.targeted_module_names})

    def adapter_config(self, config: LoRAConfig, base_model: Path) -> dict[str, Any]:
        description = adapter_config(config, base_model, self.adapter_targets)
        return description | {"fan_in_fan_out": self.is_transposed}

    def _refuse_adapted_experts(self, config: LoRAConfig) -> None:
        """PEFT takes the names of projections for the experts' where those are stacked in one parameter, and then
        leaves out the projections: neither our files nor the engines know such adapters."""
        adapted = list(self._adapted())
        others = {name.rpartition(".")[2] for name, module in adapted if not hasattr(module, "parameter_name")}
        if any(hasattr(module, "parameter_name") for _, module in adapted):
            raise UserError(
                f"lora.targets = {config.targets!r} means the stacked experts of {type(self.model).__name__}, which "
                f"cannot have an adapter here; give others, for example {sorted(others) or ['q_proj', 'v_proj']}"
            )

    def _linear_names(self) -> set[str]:
        """The last parts of the names of what PEFT can adapt; the output matrix is left out, as by all-linear."""
        head = self.model.get_output_embeddings()
        return {
            name.rpartition(".")[2]
            for name, module in self.model.named_modules()
            if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
        }

    def _adapted(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.model.named_modules():
            if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                yield name, module


def load_hf_model(
    model_dir: Path, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False
) -> HFDecoder:
    """The model of a directory by transformers. Raises UserError where log-probs or files would come out wrong."""
    transformers = _require("transformers")
    try:
        model = _load_without_dropout(transformers, model_dir, dtype, trust_remote_code)
    except Exception as error:  # transformers has many kinds for a config.json, or weights, that do not fit
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise needs_its_code("model.name", model_dir) from error
        reason = textwrap.shorten(str(error), MAX_REASON, placeholder=" …")  # a list of every architecture may follow
        raise UserError(f"model.name = {str(model_dir)!r}: transformers cannot load it: {reason}") from error
    try:
        decoder = HFDecoder(model.to(device))
        decoder.logit_scale = find_logit_scale(decoder, model_dir)
        refuse_other_names(decoder, model_dir)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what an architecture computes, or calls its parts, is its own
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", MAX_REASON, placeholder=" …")
        raise UserError(
            f"model.name = {str(model_dir)!r}: model.impl = 'hf' does not work with {type(model).__name__} ({reason}); "
            "docs/lora.md names architectures that it was tried with"
        ) from error
    return decoder


def _load_without_dropout(transformers: Any, model_dir: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    # Left out, transformers asks on the terminal.
    config = transformers.AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    for key, value in config.to_dict().items():
        if any(word in key for word in RANDOM) and isinstance(value, float):
            setattr(config, key, 0.0)
    # PyTorch's attention has no cap for its scores, and transformers would leave it out.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
    )


def find_logit_scale(decoder: HFDecoder, model_dir: Path) -> float:
    """By what the model multiplies hidden · output weight. Raises UserError where that is not all it does.

    Measured, because architectures have many names for it, some for its inverse.
    """
    model, weight = decoder.model, decoder.output_weight
    # A bias of zeros cannot be measured, nor can a cap far above the logits, as at the start of training.
    if (reason := _known_not_linear(decoder)) is not None:
        raise not_linear(reason, model_dir)
    token_ids = torch.arange(PROBE_TOKENS, device=weight.device) * 7 % weight.shape[0]
    is_training = model.training
    with torch.no_grad():
        model.eval()
        lengths = torch.tensor([PROBE_TOKENS], device=weight.device)
        hidden = decoder(token_ids, torch.arange(PROBE_TOKENS), PackedAttention(lengths))
        plain = decoder.logits(hidden).double()
        given = model(input_ids=token_ids[None], use_cache=False).logits[0].double()
    model.train(is_training)
    scale = float((plain * given).sum() / (plain * plain).sum())
    tolerance = 1e-4 if weight.dtype == torch.float32 else 3e-2
    if not torch.allclose(given, scale * plain, rtol=tolerance, atol=tolerance * float(given.abs().max())):
        raise not_linear(f"{type(model).__name__} computes its logits in a way we do not support", model_dir)
    return 1.0 if abs(scale - 1) < tolerance else scale


def _known_not_linear(decoder: HFDecoder) -> str | None:
    text = decoder.model.config.get_text_config()
    if getattr(text, "final_logit_softcapping", None):
        return f"final_logit_softcapping = {text.final_logit_softcapping} caps the logits"
    if getattr(decoder.model.get_output_embeddings(), "bias", None) is not None:
        return "the output matrix has a bias"
    return None


def not_linear(reason: str, model_dir: Path) -> UserError:
    return UserError(
        f"model.name = {str(model_dir)!r}: {reason}; impl = 'hf' trains models whose logits are a matrix times the "
        "last hidden state"
    )


def refuse_other_names(decoder: HFDecoder, model_dir: Path) -> None:
    """What is published has to have the names that the model's own files have: engines know no others."""
    unknown = sorted(decoder.whole_tensors().keys() - read_tensor_headers(model_dir).keys())
    if unknown:
        raise UserError(
            f"model.name = {str(model_dir)!r}: {len(unknown)} tensors have other names in transformers than on disk, "
            f"first {unknown[0]!r}; save the model again with save_pretrained"
        )


def shape_of(config: Any) -> Shape:
    """transformers maps the names that architectures have of their own to these."""
    num_heads = getattr(config, "num_attention_heads", 0)  # Mamba has none
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads)
    q_size = head_dim * num_heads
    return Shape(config.num_hidden_layers, config.hidden_size, config.vocab_size, q_size)


def lay_out(lengths: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences as rows: which token each cell holds (rows, columns), and in which cell each token lies (tokens,)."""
    numbers = torch.arange(len(lengths), device=lengths.device)
    starts = lengths.cumsum(0) - lengths
    last = numbers[~torch.isin(numbers, parents)]  # the segments that sequences end with
    before = parents[last]
    prefix_lengths = torch.where(before >= 0, lengths[before], 0)
    totals = prefix_lengths + lengths[last]
    columns = torch.arange(int(totals.max()), device=lengths.device)
    in_prefix = columns < prefix_lengths[:, None]
    own = (starts[last] - prefix_lengths)[:, None] + columns
    tokens = torch.where(in_prefix, starts[before][:, None] + columns, own)
    is_token = columns < totals[:, None]
    rows = torch.where(is_token, tokens, tokens[:, :1])
    cells = torch.empty(int(lengths.sum()), dtype=torch.int64, device=lengths.device)
    # A shared beginning is computed in several rows, alike; any of them will do.
    cells[rows[is_token]] = torch.arange(rows.numel(), device=lengths.device).view_as(rows)[is_token]
    return rows, cells


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(f"model.impl = 'hf' needs {package}: pip install 'tandem-rl[hf]'") from error
