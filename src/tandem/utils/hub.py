"""Models by their name on the Hugging Face hub: found in its cache on this machine, fetched into it where allowed.

The cache is read here, without huggingface_hub: models--org--name/refs/main names the snapshot that is current.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tandem.utils.errors import UserError
from tandem.utils.log import say

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FOLDER = "models--"
# What makes a model: no copies of the weights in other formats.
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
TRUE = ("1", "ON", "YES", "TRUE")


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache)
    if home := environment.get("HF_HOME"):
        return Path(home) / "hub"
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface" / "hub"


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get("HF_HUB_OFFLINE", "").upper() in TRUE


def is_hub_name(path: Path) -> bool:
    """Whether a path that is no directory may be the name of a model on the hub."""
    return HUB_NAME.fullmatch(str(path)) is not None and not path.exists()


def find_model(path: Path) -> Path:
    """The directory of a model: the path itself, or what the cache has under that name."""
    if not is_hub_name(path):
        return path
    folder = cache_folder() / (FOLDER + str(path).replace("/", "--"))
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return path
    return snapshot if (snapshot / "config.json").exists() else path


def is_to_be_fetched(path: Path) -> bool:
    """Whether it is the name of a model that is not here, and fetching is allowed. Below a directory that is here, it
    is rather a path with a mistake in it."""
    return is_hub_name(path) and not path.parent.exists() and not is_offline()


def hub_name_of(path: Path) -> str | None:
    """The name of a model whose directory is in a cache."""
    if path.parent.name != "snapshots" or not path.parents[1].name.startswith(FOLDER):
        return None
    return path.parents[1].name.removeprefix(FOLDER).replace("--", "/", 1)


def served_names(path: Path) -> list[str]:
    """What clients may call a model: its path and the last part of that, or its name on the hub and the last part."""
    name = hub_name_of(path)
    names = [str(path), path.name] if name is None else [name, name.rpartition("/")[2], str(path)]
    return list(dict.fromkeys(names))


def fetch_model(name: Path) -> None:
    """Into the cache. Raises UserError where that does not work."""
    from huggingface_hub import snapshot_download  # it takes a while to import
    from huggingface_hub.errors import HfHubHTTPError

    say(f"model {name} is fetched from the Hugging Face hub into {cache_folder()}")
    try:
        snapshot_download(str(name), allow_patterns=FILES)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"model.name = '{name}' is not a directory, is not in the cache {cache_folder()}, and cannot be fetched "
            f"from the Hugging Face hub: {reason}"
        ) from error
