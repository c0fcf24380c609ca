"""Options of a run on the nodes of a Ray cluster."""

from pydantic import Field

from tandem.config.base import Config


class RayConfig(Config):
    """Inference servers and trainer ranks as actors of a Ray cluster that exists; the orchestrator stays here. Model
    and output_dir must be on a file system that all nodes share."""

    address: str | None = None
    """The cluster: HOST:PORT of its head, or auto for the one that this machine belongs to. None: no Ray."""

    inference_nodes: list[str] = []
    """Host names or addresses: one inference server on each; a node that is named twice runs two. Empty: one server, on
    another node than this machine where there is one."""

    trainer_nodes: list[str] = []
    """Host names or addresses: the trainer's ranks (trainer.parallel.ranks) are spread over them, as many on each.
    Empty: over the nodes without an inference server, or all."""

    gpus_per_server: float | None = Field(default=None, ge=0)
    """GPUs of each inference server. None: 1 where its node has any. Each rank of the trainer has one where all its
    nodes have any."""
