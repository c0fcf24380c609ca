"""Losses: a file a loss. Those of `rl` have one loss per token, those of `align` one per pair or completion."""

from tandem.algorithms.losses.kind import AlignLoss, PolicyLoss
from tandem.algorithms.registry import scan

POLICY_LOSSES = scan(__name__, __path__, PolicyLoss, ("grpo", "gspo", "rloo", "cispo", "reinforce", "ppo"))
ALIGN_LOSSES = scan(
    __name__,
    __path__,
    AlignLoss,
    ("dpo", "ipo", "hinge", "kto", "bco", "orpo", "cpo", "simpo", "reward"),
)
