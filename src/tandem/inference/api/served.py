"""What the API serves and within which limits, and the parts its routes share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.data.tokenizer import Tokenizer
from tandem.inference.api.defaults import SamplingDefaults
from tandem.inference.api.encoding import Encoders
from tandem.inference.api.errors import NotServed
from tandem.inference.api.metrics import Metrics
from tandem.inference.api.prompts import PromptReader
from tandem.inference.api.structures import Structures
from tandem.inference.api.submission import Admission
from tandem.inference.api.text import TokenTexts
from tandem.inference.engine import Engine
from tandem.inference.identity import Identity
from tandem.inference.roots import WeightRoots

if TYPE_CHECKING:
    from tandem.inference.grammars import Grammars


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


class Served:
    """One engine with its tokenizer; made once, before the first request."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, model_dir: Path, options: ApiOptions, grammars: "Grammars | str"
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = str(model_dir)
        self.names = {self.model, model_dir.name}
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
