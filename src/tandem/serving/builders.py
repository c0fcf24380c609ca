"""Engines by name. What each needs is imported when it is built: whoever only checks a name needs no torch."""

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tandem.config.inference import InferenceConfig
from tandem.utils.garbage import importing
from tandem.utils.registry import find_registered

if TYPE_CHECKING:
    from tandem.data.tokenizer import Tokenizer
    from tandem.engine.engine import NativeEngine
    from tandem.engine.protocol import Engine
    from tandem.serving.sglang.engine import SGLangEngine

OnFailure = Callable[[str], None]
EngineBuilder = Callable[[InferenceConfig, "Tokenizer", OnFailure], "Engine"]
"""Makes an engine that is not started yet; it calls `on_failure` with the reason when it can no longer work."""


def find_builder(name: str) -> EngineBuilder:
    return find_registered(BUILDERS, name, "engine")


def build_native(
    config: InferenceConfig, tokenizer: "Tokenizer", on_failure: OnFailure, *, releasable_cache: bool = False
) -> "NativeEngine":
    with importing():
        from tandem.data.text_stream import TextStream
        from tandem.engine.build import build_engine
        from tandem.models.runtime import setup_torch

    setup_torch(threads=config.threads, seed=config.seed, deterministic=config.deterministic)
    # Each tensor operation gives up the interpreter lock; the engine must get it back within less time than a
    # step takes, even while the event loop is busy with JSON.
    sys.setswitchinterval(0.0005)
    new_text = partial(TextStream, tokenizer)
    return build_engine(config, tokenizer.eos_token_ids, new_text, on_failure, releasable_cache=releasable_cache)


def build_sglang(config: InferenceConfig, tokenizer: "Tokenizer", on_failure: OnFailure) -> "SGLangEngine":
    from tandem.serving.sglang.engine import build_engine

    return build_engine(config, config.sglang.resolve_api_key(), tokenizer.eos_token_ids, on_failure)


BUILDERS: dict[str, EngineBuilder] = {"native": build_native, "sglang": build_sglang}
