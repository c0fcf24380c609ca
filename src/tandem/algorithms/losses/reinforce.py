"""REINFORCE: −A l of each token. https://doi.org/10.1007/BF00992696"""

from tandem.algorithms.losses.clipping import clip_metrics
from tandem.algorithms.losses.kind import Losses, PolicyLoss, PolicyStreams


def reinforce(streams: PolicyStreams) -> Losses:
    """−A l, with A the advantage of a token and l its log-prob."""
    never = streams.logprobs.bool() & False
    return Losses(-streams.advantages * streams.logprobs, clip_metrics(never, never))


REINFORCE = PolicyLoss("reinforce", "log-prob, no ratio", reinforce, has_ratio=False)
