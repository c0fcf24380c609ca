"""The decoder that both the trainer and the native engine run: Llama, Qwen2, Qwen3, Mistral families.

Tokens of all sequences lie in one flat dimension. How they attend to each other is the caller's
business: the trainer passes packed attention, the engine passes attention over its KV cache.
Query, key and value projections are one matrix, and so are gate and up; `hf.py` maps them to the
names and shapes of Hugging Face files.
"""

import math
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from tandem.models import exact, ops
from tandem.models.recompute import recomputed
from tandem.models.spec import ModelSpec


class AttentionContext(Protocol):
    """Who may attend to whom. `window` bounds how far back a token sees (None: to the start)."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim) -> like q."""
        ...


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def recomputed(self, x: Tensor, normed: Tensor) -> AbstractContextManager[object]:
        """Within this, what needs `normed` for the backward pass keeps `x` in place of it."""
        return recomputed([normed], lambda: [self(x)])


class Projection(nn.Linear):
    """A linear layer that can keep a copy of its weight in a layout that is faster to compute with."""

    packed: Tensor | None = None
    exact = False

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, self.packed, batch_invariant=self.exact)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.window, self.norm_eps = spec.sliding_windows[layer], spec.norm_eps
        self.qkv_proj = Projection(spec.hidden_size, spec.q_size + 2 * spec.kv_size, bias=spec.qkv_bias)
        self.o_proj = Projection(spec.q_size, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        q_weight, k_weight = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        qkv = self.qkv_proj(x)
        q, k, v = ops.heads(qkv, self.shape, q_weight, k_weight, self.norm_eps, cos, sin)
        with recomputed([q, k], lambda: ops.heads(qkv, self.shape, q_weight, k_weight, self.norm_eps, cos, sin)[:2]):
            out = context.attend(self.layer, q, k, v, self.window)  # (tokens, heads, head_dim)
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up_proj = Projection(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = Projection(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        product = ops.silu_mul(gate_up)
        with recomputed([product], lambda: [ops.silu_mul(gate_up)]):
            return self.down_proj(product)


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, layer)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        first, second = self.input_layernorm, self.post_attention_layernorm
        # A norm hands out what it normalizes as well: so that adding, in either pass, is part of its kernel.
        x, normed = ops.add_norm(x, None, first.weight, first.eps)
        with first.recomputed(x, normed):
            attended = self.self_attn(normed, cos, sin, context)
        x, normed = ops.add_norm(x, attended, second.weight, second.eps)
        with second.recomputed(x, normed):
            return x + self.mlp(normed)


class Decoder(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        # An empty weight: drawing one on the meta device imports PyTorch's compiler, which takes two seconds.
        shape = spec.vocab_size, spec.hidden_size
        self.embed_tokens = nn.Embedding(*shape, _weight=torch.empty(shape))
        self.layers = nn.ModuleList(DecoderLayer(spec, layer) for layer in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.lm_head = None if spec.tied_embeddings else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        self.packed_output: Tensor | None = None
        self.inv_freq = rotary_frequencies(spec)
        self.exact = False  # see `exact.py`
        self.compute_dtype: torch.dtype | None = None  # of hidden states, see `precision.py`; None: as the weights are

    def forward(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """token_ids and positions (tokens,) -> hidden states after the last norm (tokens, hidden)."""
        x = self.embed_tokens(token_ids)
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        cos, sin = self.rotary(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, context)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (tokens, hidden) -> (tokens, vocab)."""
        return ops.linear(hidden, self.output_weight, None, self.packed_output, batch_invariant=self.exact)

    def make_batch_invariant(self, device: torch.device) -> bool:
        """Switch exact mode on, if there are kernels for it on this device; returns whether there are."""
        self.exact = exact.serves(self.spec, device)
        for module in self.modules():
            if isinstance(module, Projection):
                module.exact = self.exact
        return self.exact

    @property
    def is_packed(self) -> bool:
        return self.packed_output is not None

    def pack(self) -> None:
        """Lay the weights out for fast products without gradients, where that helps; takes their memory again."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.packed = ops.pack(module.weight, batch_invariant=self.exact)
        self.packed_output = ops.pack(self.output_weight, batch_invariant=self.exact)

    def repack(self) -> None:
        """After the weights have changed."""
        if self.is_packed:
            self.pack()

    @property
    def output_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines (tokens, 1, head_dim), computed in float32 whatever the model runs in."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[:, None, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotary_frequencies(spec: ModelSpec) -> Tensor:
    """(head_dim / 2,) in float32."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device="cpu").float() / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    # Wavelengths beyond the original context are stretched, short ones stay, those between are blended.
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
