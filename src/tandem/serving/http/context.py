"""What the API's routes share: what is served, and within which limits."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import Engine
from tandem.serving.http.errors import NotServed
from tandem.serving.http.metrics import Metrics
from tandem.serving.http.prompts import PromptReader, SamplingDefaults
from tandem.serving.http.structures import Structures
from tandem.serving.http.submission import Admission
from tandem.serving.http.text import Encoders, TokenTexts
from tandem.serving.identity import Identity
from tandem.serving.roots import WeightRoots
from tandem.utils.hub import served_names

if TYPE_CHECKING:
    from tandem.engine.grammars import Grammars


@dataclass(frozen=True)
class ApiOptions:
    vocab_size: int
    seq_len: int
    api_key: str | None = None
    max_waiting: int = 16384
    max_body_bytes: int = 64 << 20
    receive_timeout_s: float = 60.0
    host_names: frozenset[str] | None = None  # what a server without a key may be called; None: anything
    weight_roots: tuple[Path, ...] = ()
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)


class ApiContext:
    """One engine with its tokenizer; made once, before the first request."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, model_dir: Path, options: ApiOptions, grammars: "Grammars | str"
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = str(model_dir)
        self.names = {self.model, *served_names(model_dir)}
        self.identity = Identity(self.model, lambda: engine.version)
        self.options = options
        self.texts = TokenTexts(tokenizer)
        self.prompts = PromptReader(tokenizer, options.vocab_size, options.seq_len, options.sampling)
        self.encoders = Encoders()
        self.roots = WeightRoots(options.weight_roots)
        self.structures = Structures(grammars)
        self.admission = Admission(engine, options.max_waiting)
        self.metrics = Metrics(engine)

    def adapter(self, model: str | None) -> str | None:
        """The adapter a request names, or None for the model itself."""
        if model is None or model in self.names:
            return None
        adapters = self.engine.adapters
        if model in adapters:
            return model
        raise NotServed(f"model {model!r} is not served here; served: {', '.join(sorted({*self.names, *adapters}))}")
