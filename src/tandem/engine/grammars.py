"""Grammars that completions follow, by llguidance (the extra `structured`): compiling them, and saying which tokens
may come next. No torch.

A grammar is compiled once and kept; every sample follows a copy of its own. Automata grow with the text, and what they
may cost is bounded here and in every step, whatever a grammar says. Nothing is forced: to write out what `a{1000000}`
leaves no choice about would take seconds in every step.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from tandem.data.tokenizer import Tokenizer
from tandem.engine.structure import Structure, StructureRefused

MAX_CHARACTERS = 1 << 18  # of what is compiled
MAX_KEPT = 32  # compiled grammars
MAX_REASON = 500  # characters
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000, step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False
)
TOKENS_PER_WORD = 32
ASCII_CLASSES = "dw"  # \d and \w, as in the patterns of JSON schemas
POSITION = re.compile(r"^(at )?\d+\(\d+\): ")

Mask = NDArray[np.int32]
"""One bit a token, set where it may come next."""


class Grammars:
    """For one tokenizer; may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._source = TokenSource(tokenizer, vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._executor = LLExecutor()
        self._kept: OrderedDict[Structure, Grammar] = OrderedDict()
        self._lock = Lock()

    def known(self, structure: Structure) -> "Grammar | None":
        with self._lock:
            if structure in self._kept:
                self._kept.move_to_end(structure)
            return self._kept.get(structure)

    def compile(self, structure: Structure) -> "Grammar":
        """Raises StructureRefused."""
        if not self._source.eos_token_ids:
            raise StructureRefused("the model has no end-of-sequence token")
        try:
            text = grammar_text(structure)
            with self._lock:
                self._tokenizer = self._tokenizer or self._source.build()
            state = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
            mask = np.frombuffer(state.compute_bitmask(), np.int32)
        except (ValueError, RecursionError) as error:  # what is not text, or no grammar at all
            raise StructureRefused(str(error)[:MAX_REASON]) from error
        if state.is_error():
            raise StructureRefused(reason(state.get_error(), with_position=structure.kind == "grammar"))
        grammar = Grammar(state, mask, self._executor)
        with self._lock:
            self._kept[structure] = grammar
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return grammar


class Grammar:
    """What samples begin with."""

    def __init__(self, state: LLMatcher, mask: Mask, executor: LLExecutor) -> None:
        self._state = state
        self._mask = mask
        self._executor = executor

    def matcher(self) -> "Matcher":
        return Matcher(self._state.deep_copy(), self._mask, self._executor)


class Matcher:
    """Where a sample stands in its grammar. For one thread at a time."""

    def __init__(self, state: LLMatcher, mask: Mask, executor: LLExecutor) -> None:
        self.state = state
        self.mask: Mask | None = mask  # of the next token; None: not computed yet
        self.executor = executor

    @property
    def failure(self) -> str | None:
        """Why the sample cannot go on, if it cannot."""
        return reason(self.state.get_error()) if self.state.is_error() else None

    def accept(self, token: int) -> None:
        self.state.consume_token(token)
        self.mask = None


def fill_masks(matchers: Sequence[Matcher], vocab_size: int) -> None:
    """Side by side, and without Python's lock."""
    masks = np.zeros((len(matchers), -(-vocab_size // TOKENS_PER_WORD)), np.int32)
    jobs = [(matcher.state, row) for row, matcher in enumerate(matchers)]
    matchers[0].executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(jobs))
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.mask = mask


class TokenSource:
    """The tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_ids = [token for token in tokenizer.eos_token_ids if token < vocab_size]
        self.eos_token_id = next(iter(self.eos_token_ids), None)
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def build(self) -> LLTokenizer:
        self.tokens = [self._tokenizer.token_bytes.token(token) for token in range(self._vocab_size)]
        special = {*self._tokenizer.special_token_ids, *self.eos_token_ids}
        self.special_token_ids = sorted(token for token in special if token < self._vocab_size)
        return LLTokenizer(TokenizerWrapper(self), eos_token=self.eos_token_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(errors="replace"))


def grammar_text(structure: Structure) -> str:
    """All of it, in llguidance's own form: a list of grammars that refer to each other by name."""
    if len(structure.text) + len(structure.calls) > MAX_CHARACTERS:
        raise StructureRefused(f"it is longer than {MAX_CHARACTERS} characters")
    parts = []
    if structure.kind == "json":
        parts.append({"name": "answer", "json_schema": json.loads(structure.text)})
    elif structure.kind is not None:
        parts.append({"name": "answer", "lark_grammar": lark(structure)})
    if structure.calls:
        parts.append({"name": "calls", "lark_grammar": structure.calls})
    either = " | ".join(f"@{part['name']}" for part in parts)
    main = {"name": "main", "lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: {either}\n'}
    return json.dumps({"grammars": [main, *parts]})


def lark(structure: Structure) -> str:
    if structure.kind == "regex":
        if re.search(r"(?<!\\)(\\\\)*\\$", structure.text):  # it would escape what ends a regex in Lark
            raise StructureRefused("incomplete escape sequence at its end")
        # What digits and letters are beyond ASCII, no two regex libraries agree on.
        return f"start: /{regex_to_lark(structure.text, ASCII_CLASSES)}/\n"
    if structure.kind == "choice":
        return "start: " + " | ".join(quoted(choice) for choice in json.loads(structure.text)) + "\n"
    try:
        return any_to_lark(structure.text)
    except Exception as error:  # the only kind it raises
        raise StructureRefused(str(error)[:MAX_REASON]) from error


def quoted(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def reason(error: str, *, with_position: bool = False) -> str:
    """llguidance's own words, without what it shows of the grammar."""
    if error.startswith("NoExtension"):
        return "no token of this model can come next"
    lines = error.strip().splitlines() or ["unknown"]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return (told if with_position else POSITION.sub("", told))[:MAX_REASON]
