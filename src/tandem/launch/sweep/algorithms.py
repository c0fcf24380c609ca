"""Algorithms and ways to shard by the names people know, and what each is here."""

from dataclasses import dataclass, field

from tandem.commands.align import AlignConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.config.base import Config
from tandem.config.hints import algorithm_name
from tandem.config.sources import Tree

CONFIGS: dict[str, type[Config]] = {"rl": RLConfig, "sft": SFTConfig, "align": AlignConfig}


@dataclass(frozen=True)
class Algorithm:
    command: str  # rl, sft or align
    options: Tree = field(default_factory=dict)  # what makes a run this algorithm
    needs: dict[str, str] = field(default_factory=dict)  # options that the experiment file has to give, and why

    @property
    def is_online(self) -> bool:
        return self.command == "rl"


def _offline(loss: str) -> Algorithm:
    return Algorithm("align", {"loss": {"type": loss}})


def _online(loss: Tree, *, advantage: str = "grpo", **orchestrator: object) -> Algorithm:
    sections: Tree = {"trainer": {"loss": loss}}
    return Algorithm("rl", sections | {"orchestrator": {"advantage": {"type": advantage}, **orchestrator}})


# The online ones are those of examples/reverse_text/algorithms.
ALGORITHMS: dict[str, Algorithm] = {
    "sft": Algorithm("sft"),
    **{loss: _offline(loss) for loss in ("dpo", "ipo", "hinge", "kto", "bco", "orpo", "cpo", "simpo", "reward")},
    "grpo": _online({"type": "grpo"}),
    "dr_grpo": _online({"type": "grpo", "normalize": "constant"}, advantage="dr_grpo"),
    "dapo": _online({"type": "grpo", "clip_low": 0.2, "clip_high": 0.28, "normalize": "tokens"}),
    "gspo": _online({"type": "gspo", "normalize": "sequences", "old_logprobs": "recomputed"}),
    "rloo": _online({"type": "rloo", "normalize": "sequences"}, advantage="rloo"),
    "cispo": _online({"type": "cispo"}),
    "reinforce": _online({"type": "reinforce"}, advantage="reinforce_pp_baseline"),
    "reinforce_pp": _online(
        {"type": "grpo", "kl": {"coef": 0.001, "estimator": "k1", "place": "reward"}}, advantage="reinforce_pp"
    ),
    "maxrl": _online({"type": "grpo"}, advantage="maxrl"),
    "ppo": _online({"type": "ppo"}, advantage="reward", group_size=1),
    "distillation": Algorithm(
        "rl",
        {
            "orchestrator": {"advantage": {"type": "none"}, "group_size": 1},
            "trainer": {"loss": {"type": "grpo", "teacher": {"coef": 1.0}}},
        },
        needs={"trainer.loss.teacher.model": "the directory of the teacher model"},
    ),
}

# What TRL's loss_type says of them where it is not their name.
LOSS_TYPES = {"sigmoid": ("dpo", "cpo"), "nll": ("sft",)}


@dataclass(frozen=True)
class Sharding:
    options: Tree  # of `parallel`
    meaning: str


DISTRIBUTED: dict[str, Sharding] = {
    "DDP": Sharding({"strategy": "ddp"}, "every rank holds the whole model; only the data is divided"),
    "DSZero2": Sharding({"strategy": "zero2"}, "gradients and optimizer state are sharded over the ranks (FSDP2)"),
    "DSZero2Offload": Sharding(
        {"strategy": "zero2", "optimizer_offload": True},
        "gradients and optimizer state are sharded; the optimizer state is in CPU memory and updated there",
    ),
    "DSZero3": Sharding({"strategy": "zero3"}, "parameters, gradients and optimizer state are sharded (FSDP2)"),
    "DSZero3Offload": Sharding(
        {"strategy": "zero3_offload"}, "like DSZero3, with parameters and optimizer state in CPU memory"
    ),
    "FSDP": Sharding({"strategy": "zero3"}, "the same as DSZero3: FSDP2 shards parameters, gradients, optimizer state"),
}


def is_loss_of(loss_type: object, name: str) -> bool:
    """Whether TRL's `loss_type`, one or a list of one, is what the algorithm does."""
    given = loss_type[0] if isinstance(loss_type, list) and len(loss_type) == 1 else loss_type
    return name in LOSS_TYPES.get(str(given), ()) or algorithm_name(given) == name
