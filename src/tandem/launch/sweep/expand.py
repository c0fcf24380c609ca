"""Lists become runs: the product of all alternatives, each with a name that stays the same."""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tandem.launch.sweep.document import Document
from tandem.utils.secrets import holds_secret, names_secret

Key = tuple[str, str]  # section, name
MAX_NAME = 100
# Short where the value does not speak for itself.
SHORT = {"learning_rate": "lr", "num_train_epochs": "epochs", "per_device_train_batch_size": "bs", "max_steps": "steps"}
SPEAKING = ("algorithm", "model_name_or_path", "distributed_config", "dataset_name", "env")


@dataclass(frozen=True)
class Variant:
    """One run of the experiment: a value for every key."""

    name: str
    values: Mapping[Key, Any]
    labels: Mapping[Key, str]  # of the values that tell it from the others: the parts of its name

    @property
    def varied(self) -> dict[str, Any]:
        """What tells it from the others, by name."""
        return {key[1]: self.values[key] for key in self.labels}

    def without(self, keys: Collection[Key]) -> "Variant":
        """Named as if these told it from no other."""
        labels = {key: label for key, label in self.labels.items() if key not in keys}
        return replace(self, name=_name(labels, self.values), labels=labels)

    def section(self, name: str) -> dict[str, Any]:
        """Without the keys that were left to be computed."""
        return {key: value for (section, key), value in self.values.items() if section == name and value is not None}


def expand(document: Document) -> list[Variant]:
    """In the order of the file: what stands first changes slowest."""
    entries = document.entries
    varied = [key for key, entry in entries.items() if len(entry.alternatives) > 1]
    for section, key in varied:
        if names_secret(key) or holds_secret(entries[section, key].alternatives):
            told = f"{key} has several values, which would be in the names of runs and in runs.csv; give one"
            raise document.refuse(section, key, told)
        counts = Counter(str(value) for value in entries[section, key].alternatives)
        if twice := [text for text, count in counts.items() if count > 1]:
            raise document.refuse(
                section, key, f"{key} has {twice[0]} twice, which would be the same run; give it once"
            )
    labels = {key: _labels(key[1], entries[key].alternatives) for key in varied}
    variants = []
    for choice in product(*(range(len(entry.alternatives)) for entry in entries.values())):
        chosen = dict(zip(entries, choice, strict=True))
        values = {key: entries[key].alternatives[index] for key, index in chosen.items()}
        mine = {key: labels[key][chosen[key]] for key in varied}
        variants.append(Variant(_name(mine, values), values, mine))
    return variants


def _name(labels: Mapping[Key, str], values: Mapping[Key, Any]) -> str:
    return _shorten("-".join(labels.values()) or str(values["execution", "algorithm"]))


def _labels(key: str, alternatives: tuple[Any, ...]) -> list[str]:
    """One a value: the end of a path, the value itself, or name and value; told apart by a hash if need be."""
    prefix = "" if key in SPEAKING else SHORT.get(key, key)
    texts = [str(value) for value in alternatives]
    plain = [_plain(prefix + (text.rstrip("/").rpartition("/")[2] or text)) for text in texts]
    counts = Counter(plain)
    return [label if counts[label] == 1 else f"{label}.{_hash(text)}" for label, text in zip(plain, texts, strict=True)]


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", text).strip("_") or "value"


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 9]}-{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
