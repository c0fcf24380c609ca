"""Causal attention of sequences that are all of one length: cuDNN's is a third faster than FlexAttention.

For whole blocks only: cuDNN plans anew for every length it meets, and among lengths that vary few are whole blocks;
where data is cut at `seq_len`, all are.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandem.models.gpu.blocks import BLOCK

# In the order of choice: without cuDNN, or where it refuses (it does if asked to repeat bit for bit), the next.
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def one_length(lengths: NDArray[np.int64], parents: NDArray[np.int64], padding: int) -> int | None:
    """That of all sequences, if they share nothing and are whole blocks."""
    length = int(lengths[0]) if len(lengths) else 0
    is_one = length > 0 and length % BLOCK == 0 and not padding and bool((lengths == length).all())
    return length if is_one and bool((parents < 0).all()) else None


def attend(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """(tokens, heads, head_dim), like q. What learns and what does not go through the same kernel: the one with
    statistics for a backward pass."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    with torch.enable_grad(), sdpa_kernel(KERNELS, set_priority=True):
        q = q if q.requires_grad else q.detach().requires_grad_()
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads)
        out = out.transpose(1, 2).flatten(0, 1)
    return out if learns else out.detach()
