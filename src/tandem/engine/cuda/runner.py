"""Steps on a GPU: launched without waiting for them, as one CUDA graph each.

    decoding rows   inputs ─► CUDA graph: embedding, layers, LM head, draw ─┐
    prompts         inputs ─► CUDA graph without the draw ─► draw ──────────┴─► pinned memory, read a step later

The token a row drew stays on the GPU, by slot, where its next step finds it. Rows, or tokens of prompts, are
rounded up to the size of a graph (`graphs.py`); padding writes to the scratch block. Prompts of more tokens than any
graph has keep the GPU busy while their kernels are launched one by one. Weights change in place, so graphs stay true
when they do. Where rows share prompts, another graph reads these once for several rows. Where all go through one
adapter, yet another does so; rows of different adapters are computed without a graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.cuda.attention import num_pieces
from tandem.engine.cuda.draw import DrawnOnDevice, DrawRows, draw
from tandem.engine.cuda.forward import ExactDecoder, FusedDecoder
from tandem.engine.cuda.graphs import (
    PREFILL_TOKENS_PER_ROW,
    GraphKey,
    StepGraph,
    StepGraphs,
    buckets,
    find_prefill_bucket,
    graph_keys,
)
from tandem.engine.cuda.inputs import (
    DecodeInputs,
    PrefillInputs,
    PrefillSizes,
    decode_arrays,
    decode_inputs,
    draw_arrays,
    offsets,
    prefill_arrays,
    prefill_inputs,
    upload,
)
from tandem.engine.cuda.kept import KeptRows, keep
from tandem.engine.cuda.prefill import QUERY_TILE
from tandem.engine.kv_cache import KVCache, to_device
from tandem.engine.prompt_logprobs import record_prompt_logprobs
from tandem.engine.protocol import KeptTokens
from tandem.engine.sampler import NO_TOP, Drawn, sampling_rows
from tandem.engine.shared_prompts import SharedPrompts, find_shared
from tandem.engine.state import Rows, SlotState
from tandem.models.decoder import Decoder
from tandem.models.gpu import exact
from tandem.models.gpu.tiles import tokens_per_tile
from tandem.models.lora import AdapterBank

# Of a layer's keys and values. The kernel that reads shared prompts costs as much as reading a quarter of that.
WORTH_SHARING_BYTES = 2**25
FEWEST_SHARING_ROWS = 16  # of a graph: fewer read too little
NOTHING_SHARED = SharedPrompts(*(np.zeros(0, np.int64) for _ in range(3)))


@dataclass(frozen=True)
class Launched:
    """A forward pass under way."""

    logits: Tensor  # (rows whose last token was computed, vocab); true until the next launch
    drawn: DrawnOnDevice | None  # a token for each of them, where the graph drew it


class CudaRunner:
    def __init__(
        self,
        decoder: Decoder,
        adapters: AdapterBank,
        cache: KVCache,
        state: SlotState,
        device: torch.device,
        *,
        use_graphs: bool,
        graph_tokens: int = 0,
        share_prompts: bool = True,
    ) -> None:
        """The last block of `cache` must be one that no sequence is ever given. `graph_tokens`: up to so many tokens of
        prompts are computed by a graph. `share_prompts`: what a row computes may depend, in its rounding, on the
        other rows of the batch."""
        self.decoder, self.adapters, self.cache, self.state, self.device = decoder, adapters, cache, state, device
        self.fused = (ExactDecoder if decoder.exact else FusedDecoder)(decoder, cache, state.tokens.shape[1])
        spec = decoder.spec
        self.query_tile = tokens_per_tile(spec.num_heads, spec.num_kv_heads) if decoder.exact else QUERY_TILE
        self.spare_block = cache.shape[1] - 1
        # By slot, and one more for padding rows.
        self.last = torch.zeros(state.num_slots + 1, dtype=torch.int32, device=device)
        self.sources = torch.arange(buckets(state.num_slots)[-1], dtype=torch.int32, device=device)
        self.arrived = torch.zeros(len(self.sources) * spec.num_kv_heads, dtype=torch.int32, device=device)
        self.use_graphs, self.graph_tokens, self.share_prompts = use_graphs, graph_tokens, share_prompts
        self.block_bytes = 2 * cache.keys[0, 0].numel() * cache.keys.element_size()  # in a layer
        num_logits = len(self.sources) if use_graphs else 0
        self.logits = cache.keys.new_empty(num_logits, decoder.spec.vocab_size)  # of a graph's rows
        self.graphs = StepGraphs(device)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Compile the kernels and capture the graphs."""
        slot = np.zeros(1, np.int64)  # still free; what is computed for it goes to the scratch block
        self.state.block_table[slot] = self.spare_block
        self.launch(slot, np.full(1, 2), slot)
        self._launch_decode(slot, adapter=None)
        if self.use_graphs:
            for key in graph_keys(self.graph_tokens, self.state.num_slots, self._may_share):
                self._graph(key)
        self.state.block_table[slot] = 0
        torch.cuda.synchronize(self.device)

    def launch(self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64]) -> Launched:
        """Compute the next `chunk` tokens of each row into the cache, and logits where the rows at the indices
        `wanted` have their last one."""
        adapter = self.adapters.route(self.state.adapter[np.repeat(rows, chunk)], self.device)
        if len(wanted) == len(rows) == chunk.sum():
            return self._launch_decode(rows, adapter)
        wants_all = self.state.wants_prompt[rows].any()
        size = None if wants_all else self._prefill_size(len(rows), int(chunk.sum()), adapter)
        if size is not None:
            graph = self._graph(GraphKey("prefill", size, self._place(adapter)))
            upload(self._prefill_arrays(rows, chunk, wanted, size), self.device, graph.words)
            graph.graph.replay()
            return Launched(self.logits[: len(wanted)], None)
        inputs = prefill_inputs(upload(self._prefill_arrays(rows, chunk, wanted), self.device))
        hidden = self._prefill(inputs)
        if wants_all:
            start = self.state.computed[rows]
            positions = np.concatenate([np.arange(s, s + c) for s, c in zip(start, chunk, strict=True)])
            record_prompt_logprobs(self.decoder, self.state, hidden, np.repeat(rows, chunk), positions)
        return Launched(self.decoder.logits(hidden[inputs.last]), None)

    def forward(self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64]) -> Tensor:
        return self.launch(rows, chunk, wanted).logits

    def draw(
        self, rows: Rows, launched: Launched, index: NDArray[np.int64] | None, adjusted: Tensor | None = None
    ) -> Callable[[], Drawn]:
        """Have a token drawn for each row, from its own logits or from those at its index, and copied to the host; the
        function that is returned waits for it. `adjusted`: what was drawn from, where that are other logits."""
        drawn, logits = launched.drawn, launched.logits
        if drawn is None or index is not None:
            drawn = self._draw(rows, logits, index)
        read_kept = self._keep(rows, logits, adjusted, index, drawn)
        num_top = min(int(self.state.num_top[rows].max()), logits.shape[-1])
        on_host = DrawnOnDevice(self._to_host(drawn.words if num_top else drawn.words[:2]), drawn.num_rows)
        done = torch.cuda.Event() if self.device.type == "cuda" else None  # a CPU is one where Triton is interpreted
        if done is not None:
            done.record()

        def read() -> Drawn:
            if done is not None:
                done.synchronize()
            top = NO_TOP
            if num_top:
                top = on_host.top_tokens[:num_top].T.long().numpy(), on_host.top_logprobs[:num_top].T.numpy()
            return Drawn(on_host.tokens.long().numpy(), on_host.logprobs.numpy(), *top, read_kept())

        return read

    def _keep(
        self,
        rows: Rows,
        logits: Tensor,
        adjusted: Tensor | None,
        index: NDArray[np.int64] | None,
        drawn: DrawnOnDevice,
    ) -> Callable[[], Sequence[KeptTokens | None]]:
        asking = np.flatnonzero(self.state.wants_kept[rows])
        if len(asking) == 0:
            return list
        at = asking if index is None else index[asking]
        state, of_rows = self.state, rows[asking]
        arrays = [at.astype(np.int32), asking.astype(np.int32), state.temperature[of_rows], state.min_p[of_rows]]
        asked = KeptRows(*upload(arrays, self.device))
        drawn_from = logits if adjusted is None else adjusted
        read_asking = keep(logits, drawn_from, asked, drawn, self._to_host, batch_invariant=self.decoder.exact)

        def read() -> list[KeptTokens | None]:
            found: list[KeptTokens | None] = [None] * len(rows)
            for row, kept in zip(asking.tolist(), read_asking(), strict=True):
                found[row] = kept
            return found

        return read

    def sample(self, rows: Rows, logits: Tensor, adjusted: Tensor | None) -> Drawn:
        """By the kernels that draw plain rows, so that a row draws the same whatever the other rows are."""
        if adjusted is None:
            return self.draw(rows, Launched(logits, None), None)()
        drawn = self._draw(rows, adjusted, None)
        sampling = sampling_rows(self.state, rows)
        temperature = np.where(sampling.raw_logprobs, np.float32(1), sampling.temperature)
        # Log-probs are those of the model's own logits.
        exact.token_logprobs(logits, drawn.tokens, to_device(temperature, self.device), self.sources, drawn.logprobs)
        if sampling.num_top.any():
            own = self._draw(rows, logits, None, torch.empty_like(self.last))
            drawn.top_tokens.copy_(own.top_tokens)
            drawn.top_logprobs.copy_(own.top_logprobs)
        return self.draw(rows, Launched(logits, drawn), None, adjusted)()

    def _draw(
        self, rows: Rows, logits: Tensor, index: NDArray[np.int64] | None, last: Tensor | None = None
    ) -> DrawnOnDevice:
        arrays = [
            values.astype(np.float32 if values.dtype == np.float32 else np.int32)
            for values, _ in draw_arrays(self.state, rows, sampling_rows(self.state, rows))
        ]
        sources = self.sources if index is None else to_device(index.astype(np.int32), self.device)
        last = self.last if last is None else last
        return self._draw_on_device(logits, sources, DrawRows(*upload(arrays, self.device)), last)

    def _draw_on_device(self, logits: Tensor, sources: Tensor, rows: DrawRows, last: Tensor) -> DrawnOnDevice:
        drawn = draw(logits, sources, rows, last)
        if self.decoder.exact:
            temperature = torch.where(rows.raw != 0, 1.0, rows.temperature)
            exact.token_logprobs(logits, drawn.tokens, temperature, sources, drawn.logprobs)
        return drawn

    def _launch_decode(self, rows: Rows, adapter: int | None) -> Launched:
        """As a graph, where all rows go through the same adapter or all through none."""
        use_graph = self.use_graphs and adapter is not None
        size = next(size for size in buckets(self.state.num_slots) if size >= len(rows)) if use_graph else len(rows)
        shared = self._shared(rows) if not use_graph or self._may_share(size) else None
        arrays = self._decode_arrays(rows, size, shared)
        if not use_graph:
            logits, drawn = self._decode(decode_inputs(upload(arrays, self.device), self.arrived), None)
            return Launched(logits, drawn)
        graph = self._graph(GraphKey("decode" if shared is None else "shared", size, self._place(adapter)))
        assert graph.drawn is not None
        upload(arrays, self.device, graph.words)
        graph.graph.replay()
        return Launched(self.logits[: len(rows)], DrawnOnDevice(graph.drawn.words, len(rows)))

    def _place(self, adapter: int | None) -> int:
        return self.adapters.places[adapter] if adapter else 0

    def _prefill_size(self, num_rows: int, num_tokens: int, adapter: int | None) -> int | None:
        """Of the graph that computes so much of prompts; None: no graph does."""
        if not self.use_graphs or adapter is None:
            return None
        return find_prefill_bucket(self.graph_tokens, num_rows, num_tokens)

    def _graph(self, key: GraphKey) -> StepGraph:
        """Those of an adapter are captured when they are first wanted, in a forward pass that is routed to it."""
        if key not in self.graphs:
            self.graphs.keep({0, *self.adapters.places.values()})
            self._capture(key)
        return self.graphs[key]

    def _may_share(self, num_rows: int) -> bool:
        return self.share_prompts and num_rows >= FEWEST_SHARING_ROWS

    def _shared(self, rows: Rows) -> SharedPrompts | None:
        """The prompts that these rows share, where that is worth a kernel."""
        if not self.share_prompts:
            return None
        columns = int(self.state.computed[rows].max()) // self.state.block_size + 1
        found = find_shared(self.state.block_table[rows, :columns])
        is_worth_it = found is not None and found.num_saved * self.block_bytes >= WORTH_SHARING_BYTES
        return found if is_worth_it else None

    def _prefill(self, inputs: PrefillInputs) -> Tensor:
        """Hidden states of all tokens, after the last norm."""
        x = self.fused.embed(inputs.token_ids, inputs.slots, self.last)
        return self.fused(x, inputs.positions, inputs.cells, inputs.attention)

    def _decode(self, inputs: DecodeInputs, logits: Tensor | None) -> tuple[Tensor, DrawnOnDevice]:
        """A whole decoding step; logits are written to `logits` where that is given."""
        x = self.fused.embed(inputs.token_ids, inputs.draw.slots, self.last)
        hidden = self.fused(x, inputs.attention.positions, inputs.cells, inputs.attention)
        logits = self.decoder.logits(hidden) if logits is None else self._write_logits(hidden, logits)
        return logits, self._draw_on_device(logits, self.sources, inputs.draw, self.last)

    def _write_logits(self, hidden: Tensor, logits: Tensor) -> Tensor:
        if self.decoder.exact:
            exact.linear(hidden, self.decoder.output_weight, None, logits)
        else:
            torch.mm(hidden, self.decoder.output_weight.T, out=logits)
        return logits

    def _decode_arrays(self, rows: Rows, num_rows: int, shared: SharedPrompts | None) -> list[NDArray[Any]]:
        most = num_pieces(num_rows, self.decoder.spec.num_kv_heads, self.device)
        sampling = sampling_rows(self.state, rows)
        return decode_arrays(self.state, rows, sampling, num_rows, most, self.spare_block, shared)

    def _prefill_arrays(
        self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64], size: int | None = None
    ) -> list[NDArray[Any]]:
        """`size`: of the graph they are for."""
        sizes = None
        if size is not None:
            most_rows = self._prefill_rows(size)
            sizes = PrefillSizes(size, most_rows, size // self.query_tile + most_rows)
        return prefill_arrays(self.state, rows, chunk, wanted, self.query_tile, self.spare_block, sizes)

    def _prefill_rows(self, size: int) -> int:
        return min(size // PREFILL_TOKENS_PER_ROW, self.state.num_slots)

    def _capture(self, key: GraphKey) -> None:
        """Of padding alone, so that nothing that rows have is touched."""
        nothing = np.zeros(0, np.int64)
        if key.kind == "prefill":
            num_rows = self._prefill_rows(key.size)
            arrays = self._prefill_arrays(nothing, nothing, nothing, key.size)
        else:
            num_rows = key.size
            arrays = self._decode_arrays(nothing, num_rows, NOTHING_SHARED if key.kind == "shared" else None)
        num_words = offsets([array.size for array in arrays])[-1] + num_rows * self.state.block_table.shape[1]
        words = torch.zeros(num_words, dtype=torch.int32, device=self.device)
        parts, logits = upload(arrays, self.device, words), self.logits[:num_rows]

        def compute() -> DrawnOnDevice | None:
            if key.kind == "prefill":
                inputs = prefill_inputs(parts)
                self._write_logits(self._prefill(inputs)[inputs.last], logits)
                return None
            return self._decode(decode_inputs(parts, self.arrived), logits)[1]

        self.graphs.capture(key, words, compute)

    def _to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")
        return host.copy_(tensor, non_blocking=True)
