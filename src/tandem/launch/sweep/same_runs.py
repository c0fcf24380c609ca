"""Runs that would be the same: two values of a key that mean the same in all of them, such as 1 and 1.0, are refused;
values that mean nothing together with another one, such as those of LoRA with `use_peft: false`, make one run."""

from collections.abc import Callable, Iterator, Sequence

from tandem.launch.sweep.document import Document
from tandem.launch.sweep.expand import Key, Variant
from tandem.utils.errors import shown


def refuse_same_runs(document: Document, variants: Sequence[Variant], meaning: Callable[[Variant], str]) -> None:
    """UserError where two values of a key mean the same in every run. `meaning` is equal for equal runs."""
    for (section, key), of_values in _by_value(document, variants):
        met: dict[str, list[list[Variant]]] = {}  # by what the first of them means
        for mine in of_values:
            similar = met.setdefault(meaning(mine[0]), [])
            for others in similar:
                if all(meaning(one) == meaning(other) for one, other in zip(mine, others, strict=True)):
                    first, second = (shown(group[0].values[section, key]) for group in (others, mine))
                    told = f"{key} has {first} and {second}, which would be the same run; give one of them"
                    raise document.refuse(section, key, told)
            similar.append(mine)


def idle_keys(same: Sequence[Variant]) -> list[Key]:
    """Those in which variants of the same run differ."""
    first, *others = same
    return [key for key in first.labels if any(other.values[key] != first.values[key] for other in others)]


def _by_value(document: Document, variants: Sequence[Variant]) -> Iterator[tuple[Key, list[list[Variant]]]]:
    """For each key with several values, the variants of each value; the n-th of two such lists differ in it alone."""
    in_a_row = len(variants)  # so many have the same value
    for key in variants[0].labels:
        num_values = len(document.entries[key].alternatives)
        in_a_row //= num_values
        lists: list[list[Variant]] = [[] for _ in range(num_values)]
        for number, variant in enumerate(variants):
            lists[number // in_a_row % num_values].append(variant)
        yield key, lists
