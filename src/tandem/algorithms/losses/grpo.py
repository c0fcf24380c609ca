"""GRPO: −min(r A, clip(r, 1 − low, 1 + high) A), r the ratio of a token. https://arxiv.org/abs/2402.03300"""

from tandem.algorithms.losses.clipping import ClipOptions, clipped_tokens
from tandem.algorithms.losses.kind import PolicyLoss

GRPO = PolicyLoss("grpo", "clipped ratio of each token", clipped_tokens, ClipOptions)
