"""What runs in every worker of vLLM, on every node: look at a checkpoint, then load it.

vLLM mixes this class into its worker; method names are prefixed so that they cannot meet vLLM's own.
"""

from pathlib import Path
from typing import Any

from tandem.models.shards import TensorHeaders, compare_tensors, read_tensor_headers


class WeightReloader:
    """Worker extension. Errors are raised: of several ranks, vLLM passes on only the first one's result."""

    def tandem_check_weights(self, path: str, expected: TensorHeaders, tied: bool) -> None:
        """Whether this worker sees the files that the server has verified: it may be on another node."""
        compare_tensors(expected, read_tensor_headers(Path(path)), tied=tied)

    def tandem_reload_weights(self, path: str) -> None:
        worker: Any = self
        worker.reload_weights(weights_path=path)
        refresh_packed_heads(worker.model_runner.get_model())


def refresh_packed_heads(model: Any) -> None:
    """On a CPU vLLM computes logits with a packed copy of the output matrix. In a tied model a reload brings the
    embedding and nothing for the head, whose copy would stay that of the old weights."""
    embeddings = {
        module.weight.data_ptr() for module in model.modules() if type(module).__name__ == "VocabParallelEmbedding"
    }
    for module in model.modules():
        is_tied_head = type(module).__name__ == "ParallelLMHead" and module.weight.data_ptr() in embeddings
        if is_tied_head and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
