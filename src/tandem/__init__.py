"""Tandem: reinforcement-learning post-training for language models.

What a notebook or a script imports from here is docs/python.md. Each name is imported when it is first used, so that
`import tandem`, and `--help` of every command, need neither torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.launch.ray.cluster import Cluster, NodeConfig, WorkerDied
    from tandem.orchestrator.client import InferenceError
    from tandem.python.backend import PyTorchTrainingBackend, TrainingFailed
    from tandem.python.cluster_backend import ClusterTrainingBackend
    from tandem.python.config import RLTrainingConfig
    from tandem.python.data_buffer import DataBuffer, Prompt
    from tandem.python.engines import NativeEngine, VLLMEngine
    from tandem.python.pool import NoSamplersLeft
    from tandem.python.rewards import MathReward, Reward
    from tandem.python.rollouts import RemoteRolloutManager, RolloutManager
    from tandem.python.run import RunFailed, align, evaluate, export, rl, sft
    from tandem.python.sglang import SGLangEngine
    from tandem.python.training import run_rl_training
    from tandem.utils.errors import UserError

__version__ = "0.1.0"

_PLACES = {
    "tandem.python.backend": ("PyTorchTrainingBackend", "TrainingFailed"),
    "tandem.python.cluster_backend": ("ClusterTrainingBackend",),
    "tandem.python.data_buffer": ("DataBuffer", "Prompt"),
    "tandem.python.engines": ("NativeEngine", "VLLMEngine"),
    "tandem.python.pool": ("NoSamplersLeft",),
    "tandem.python.rewards": ("MathReward", "Reward"),
    "tandem.python.rollouts": ("RemoteRolloutManager", "RolloutManager"),
    "tandem.python.run": ("RunFailed", "align", "evaluate", "export", "rl", "sft"),
    "tandem.python.sglang": ("SGLangEngine",),
    "tandem.python.config": ("RLTrainingConfig",),
    "tandem.python.training": ("run_rl_training",),
    "tandem.launch.ray.cluster": ("Cluster", "NodeConfig", "WorkerDied"),
    "tandem.orchestrator.client": ("InferenceError",),
    "tandem.utils.errors": ("UserError",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Cluster",
    "ClusterTrainingBackend",
    "DataBuffer",
    "InferenceError",
    "MathReward",
    "NativeEngine",
    "NoSamplersLeft",
    "NodeConfig",
    "Prompt",
    "PyTorchTrainingBackend",
    "RLTrainingConfig",
    "RemoteRolloutManager",
    "Reward",
    "RolloutManager",
    "RunFailed",
    "SGLangEngine",
    "TrainingFailed",
    "UserError",
    "VLLMEngine",
    "WorkerDied",
    "__version__",
    "align",
    "evaluate",
    "export",
    "rl",
    "run_rl_training",
    "sft",
]

_HINTS = {
    "create_nccl_configs": ": Cluster.start sets what torch.distributed.init_process_group() needs in every worker",
    "MultiNodeFSDPBackend": ": that is ClusterTrainingBackend(workers, model_name, strategy='fsdp', output_dir=…)",
    "MathRewardModel": ": that is MathReward",
    "RolloutConfig": ": sampling is part of RLTrainingConfig",
    "MiniRay": ": Ray places workers here, through Cluster and NodeConfig",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}{_HINTS.get(name, '')}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
