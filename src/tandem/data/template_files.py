"""What a model directory says about chat: its templates by name and its special tokens, as transformers reads them.
No torch."""

from pathlib import Path
from typing import Any

from tandem.utils.errors import UserError
from tandem.utils.files import read_json, require_regular

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, WITH_TOOLS = "default", "tool_use"


def read_templates(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. Files come before what tokenizer_config.json holds, which is one template or a list of named ones."""
    found = {path.stem: path for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    if (model_dir / "chat_template.jinja").exists():
        found[DEFAULT] = model_dir / "chat_template.jinja"
    if found:
        for path in found.values():
            require_regular(path)
        return {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    given = config.get("chat_template")
    entries = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}] if given else []
    try:
        templates = {entry["name"]: entry["template"] for entry in entries}
        if all(isinstance(text, str) for text in (*templates, *templates.values())):
            return templates
    except (TypeError, KeyError):
        pass
    raise UserError(
        f"{model_dir / 'tokenizer_config.json'}: chat_template must be a text, or a list of tables with name and "
        "template"
    )


def read_special_tokens(model_dir: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What templates know as bos_token and so on, those that only this model has included."""
    path = model_dir / "special_tokens_map.json"
    # Where the tokenizer's configuration lists all added tokens, the older file has nothing to add.
    given = config if "added_tokens_decoder" in config or not path.exists() else config | read_json(path)
    own = given.get("extra_special_tokens")
    named = {name: value for name, value in given.items() if name.endswith("_token")}
    named |= own if isinstance(own, dict) else {}
    tokens: dict[str, Any] = {name: text for name, value in named.items() if (text := token_text(value)) is not None}
    others = given.get("additional_special_tokens", own)
    if isinstance(others, list):
        tokens["additional_special_tokens"] = [text for value in others if (text := token_text(value)) is not None]
    return tokens


def token_text(token: Any) -> str | None:
    """A special token is written as plain text or as a table with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
