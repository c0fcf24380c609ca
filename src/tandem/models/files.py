"""Which files make a directory a model. No torch: the launcher checks a model before anything starts."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from tandem.config.shared import Impl, ModelConfig
from tandem.models.shards import weight_files
from tandem.models.spec import ELSEWHERE, SERVED_ELSEWHERE, ModelSpec
from tandem.utils.errors import UserError
from tandem.utils.files import read_table
from tandem.utils.hub import cache_folder, is_hub_name, is_offline

C = TypeVar("C", bound=BaseModel)


def check_model(model: ModelConfig) -> None:
    """As `check_model_dir` does."""
    check_model_dir(model.name, model.impl, trust_remote_code=model.trust_remote_code)


def check_model_dir(model_dir: Path, impl: Impl = "native", *, trust_remote_code: bool = False) -> None:
    """Raise UserError unless the directory holds an architecture that `impl` supports, weights and a tokenizer."""
    if not model_dir.is_dir():
        hub = f", and not in the hub's cache {cache_folder()}" if is_hub_name(model_dir) else ""
        offline = " (HF_HUB_OFFLINE is set)" if hub and is_offline() else ""
        raise UserError(
            f"model.name = {str(model_dir)!r} is not a directory{hub}{offline}; give a model directory in Hugging Face "
            "format, or a name on the hub"
        )
    if (model_dir / "adapter_config.json").exists() and not (model_dir / "config.json").exists():
        raise UserError(
            f"model.name = {str(model_dir)!r} is a LoRA adapter; give the model it belongs to, or merge the two"
        )
    if not (model_dir / "config.json").exists():
        raise UserError(f"model.name = {str(model_dir)!r} holds no model: there is no config.json in it")
    if impl == "native":
        ModelSpec.load(model_dir)
    elif not trust_remote_code and _needs_its_code(model_dir):
        raise needs_its_code("model.name", model_dir)
    try:
        weight_files(model_dir)
    except UserError as error:
        raise UserError(f"model.name = {error}") from error
    if not (model_dir / "tokenizer.json").exists():
        raise UserError(f"model.name = {str(model_dir)!r} holds no tokenizer: there is no tokenizer.json in it")


def needs_its_code(option: str, model_dir: Path) -> UserError:
    return UserError(
        f"{option} = {str(model_dir)!r} needs the Python code that it brings, which is not run unasked; if you would "
        "run it yourself, give --model.trust-remote-code"
    )


def _needs_its_code(model_dir: Path) -> bool:
    """Whether transformers, whose own models are listed in its source, knows none of this kind. Without an import."""
    config = read_table(model_dir / "config.json")
    found = find_spec("transformers")
    if "auto_map" not in config or found is None or found.origin is None:
        return False
    lists = (Path(found.origin).parent / "models" / "auto").glob("*.py")
    return not any(f'"{config.get("model_type")}"' in path.read_text(encoding="utf-8") for path in lists)


def check_served_model(model: ModelConfig) -> None:
    """Raise UserError unless our own engine can serve it, whatever trains it."""
    try:
        check_model_dir(model.name)
    except UserError as error:
        if model.impl == "native":
            raise
        raise UserError(str(error).replace(ELSEWHERE, SERVED_ELSEWHERE)) from error


def check_frozen_model(model_dir: Path, option: str, model: ModelConfig, num_tokens: int) -> None:
    """Raise UserError unless the directory holds a model that says how likely any of the policy's `num_tokens` tokens
    is. It needs no tokenizer: it reads what the policy wrote. It is loaded as the policy, `model`, is."""
    if not (model_dir / "config.json").exists():
        raise UserError(f"{option} = {str(model_dir)!r} holds no model: there is no config.json in it")
    if model.impl == "hf" and not model.trust_remote_code and _needs_its_code(model_dir):
        raise needs_its_code(option, model_dir)
    try:
        if model.impl == "native":
            ModelSpec.load(model_dir)
        weight_files(model_dir)
    except UserError as error:
        raise UserError(f"{option} = {str(model_dir)!r}: {error}") from error
    size = embedding_size(model_dir)
    if size is not None and size < num_tokens:
        raise UserError(
            f"{option} = {str(model_dir)!r} has vocab_size = {size}, less than the {num_tokens} tokens of the model "
            "that is trained; give a model with the same vocabulary"
        )


def position_limit(config: dict[str, Any]) -> int | None:
    """How many positions a model has by its config.json; None where that does not tell."""
    limit = config.get(_limit_key(config))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default" if isinstance(rope, dict) else "default"
    # Llama 3's is the stretched number; others have to be multiplied first, by rules of their own.
    return limit if type(limit) is int and kind in ("default", "llama3") else None


def _limit_key(config: dict[str, Any]) -> str:
    """GPT-2 and its relatives have a name of their own."""
    return "max_position_embeddings" if "max_position_embeddings" in config else "n_positions"


def embedding_size(model_dir: Path) -> int | None:
    """How many tokens a model has embeddings for by its config.json; None where that does not tell."""
    size = read_table(model_dir / "config.json").get("vocab_size")
    return size if type(size) is int else None


def check_positions(model_dir: Path, seq_len: int) -> None:
    config = read_table(model_dir / "config.json")
    limit = position_limit(config)
    if limit is not None and seq_len > limit:
        raise UserError(
            f"seq_len = {seq_len} is above {_limit_key(config)} = {limit} in the model's "
            f"config.json; give at most {limit}"
        )


def within_positions(config: C, model_dir: Path) -> C:
    """The config with a seq_len the model has positions for: one that was given is refused; if unset, it is clamped to
    max_position_embeddings."""
    seq_len: int = getattr(config, "seq_len")  # noqa: B009
    if "seq_len" in config.model_fields_set:
        check_positions(model_dir, seq_len)
        return config
    limit = position_limit(read_table(model_dir / "config.json"))
    return config.model_copy(update={"seq_len": min(seq_len, limit or seq_len)})
