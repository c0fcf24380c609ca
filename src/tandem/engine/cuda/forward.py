"""The decoder's forward pass with everything between two matrix products as one kernel.

Products go through the decoder's own modules, so that LoRA adapters hook into them as elsewhere, but for few rows
without adapters (`gemm.py`). In exact mode the pass is that of the trainer, but for the KV cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.cuda import gemm
from tandem.engine.cuda import layers as kernels
from tandem.engine.cuda.attention import DecodeRows
from tandem.engine.cuda.prefill import PrefillTiles
from tandem.engine.kv_cache import KVCache
from tandem.models import exact
from tandem.models.decoder import Decoder, DecoderLayer, Projection
from tandem.models.gpu.tiles import Tiles

Attention = DecodeRows | PrefillTiles


class FusedDecoder:
    def __init__(self, decoder: Decoder, cache: KVCache, num_positions: int) -> None:
        self.decoder = decoder
        self.cache = cache
        weight = decoder.embed_tokens.weight
        half = decoder.spec.head_dim // 2
        cos, sin = decoder.rotary(torch.arange(num_positions, device=weight.device), weight.dtype)
        self.rotary = (cos[:, 0, half:].contiguous(), sin[:, 0, half:].contiguous())

    def embed(self, token_ids: Tensor, slots: Tensor, last: Tensor) -> Tensor:
        return kernels.embed(token_ids, slots, last, self.decoder.embed_tokens.weight)

    def __call__(self, x: Tensor, positions: Tensor, cells: Tensor, attention: Attention) -> Tensor:
        """x (tokens, hidden), which is overwritten -> hidden states after the last norm."""
        attend = attention.attend
        layers: list[DecoderLayer] = list(self.decoder.layers)  # type: ignore[arg-type]
        next_norms = [layer.input_layernorm for layer in layers[1:]] + [self.decoder.norm]
        num_heads = self.decoder.spec.num_heads
        h = kernels.add_norm(x, None, layers[0].input_layernorm.weight, layers[0].input_layernorm.eps)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            block, norm = layer.self_attn, layer.post_attention_layernorm
            keys, values = self.cache.keys[index], self.cache.values[index]
            norms = None
            if block.q_norm is not None and block.k_norm is not None:
                norms = (block.q_norm.weight, block.k_norm.weight, block.q_norm.eps)
            heads = kernels.Heads(num_heads, norms, self.rotary, positions, cells, keys, values)
            q = qkv(block.qkv_proj, h, heads)
            delta = product(block.o_proj, attend(q, keys, values, block.window).flatten(1))
            h = kernels.add_norm(x, delta, norm.weight, norm.eps)
            delta = product(layer.mlp.down_proj, gate_up(layer.mlp.gate_up_proj, h))
            h = kernels.add_norm(x, delta, next_norm.weight, next_norm.eps)
        return h


def qkv(module: Projection, x: Tensor, heads: kernels.Heads) -> Tensor:
    """Queries; keys and values go to the cache."""
    if is_plain(module) and gemm.serves_qkv(x, module.weight, heads.keys.shape[-1]):
        return gemm.qkv(x, module.weight, heads)
    return kernels.norm_rotate_write(module(x), heads)


def product(module: Projection, x: Tensor) -> Tensor:
    """(rows, outputs), or parts of it (parts, rows, outputs)."""
    num_parts = gemm.num_parts(x, module.weight) if is_plain(module) else 1
    return gemm.split(x, module.weight, num_parts) if num_parts > 1 else module(x)


def gate_up(module: Projection, x: Tensor) -> Tensor:
    """silu(gate) * up."""
    if is_plain(module) and gemm.serves_gate_up(x, module.weight):
        return gemm.gate_up(x, module.weight)
    return kernels.silu_mul(module(x))


def is_plain(module: Projection) -> bool:
    """A product and nothing else: no bias, no adapter in it or hooked to it."""
    return type(module) is Projection and module.bias is None and not module._forward_hooks


@dataclass(frozen=True)
class TiledExactAttention:
    """The attention context of one step in exact mode (`models/exact.py`)."""

    cache: KVCache
    cells: Tensor  # (tokens,): where in the cache each token goes
    tiles: Tiles

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        kernels.write(k, v, self.cells, keys, values)
        return exact.attend_tiles(q, keys, values, self.tiles, window)


class ExactDecoder(FusedDecoder):
    def __call__(self, x: Tensor, positions: Tensor, cells: Tensor, attention: Attention) -> Tensor:
        decoder, context = self.decoder, TiledExactAttention(self.cache, cells, attention.tiles)
        cos, sin = decoder.rotary(positions, x.dtype)
        for layer in decoder.layers:
            x = layer(x, cos, sin, context)
        return decoder.norm(x)
