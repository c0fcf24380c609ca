"""The decoder's forward pass with everything between two matrix products as one kernel.

Products go through the decoder's own modules, so that LoRA adapters hook into them as elsewhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.inference.native.attention import KVCache
from tandem.inference.native.cuda import layers as kernels
from tandem.models.decoder import Decoder, DecoderLayer

Attend = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""Queries, keys and values of a layer's cache, window -> like the queries."""


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

    def __call__(self, x: Tensor, positions: Tensor, cells: Tensor, attend: Attend) -> Tensor:
        """x (tokens, hidden), which is overwritten -> hidden states after the last norm."""
        layers: list[DecoderLayer] = list(self.decoder.layers)  # type: ignore[arg-type]
        num_heads = self.decoder.spec.num_heads
        norms = [layer.input_layernorm for layer in layers[1:]] + [self.decoder.norm]
        num_heads = self.decoder.spec.num_heads
        h = kernels.add_norm(x, None, layers[0].input_layernorm.weight, layers[0].input_layernorm.eps)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            attention, norm = layer.self_attn, layer.post_attention_layernorm
            keys, values = self.cache.keys[index], self.cache.values[index]
            head_norms = None
            if attention.q_norm is not None and attention.k_norm is not None:
                head_norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
            q = kernels.norm_rotate_write(
                attention.qkv_proj(h), head_norms, self.rotary, positions, cells, keys, values, num_heads
            )
            h = kernels.add_norm(
                x, attention.o_proj(attend(q, keys, values, attention.window).flatten(1)), norm.weight, norm.eps
            )
            delta = layer.mlp.down_proj(kernels.silu_mul(layer.mlp.gate_up_proj(h)))
            h = kernels.add_norm(x, delta, next_norm.weight, next_norm.eps)
        return h
