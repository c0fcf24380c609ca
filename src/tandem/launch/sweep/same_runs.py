"""Two values of a key that differ as they are written, such as 1 and 1.0, and mean the same run."""

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


def _by_value(document: Document, variants: Sequence[Variant]) -> Iterator[tuple[Key, list[list[Variant]]]]:
    """For each key with several values, the variants of each value; the n-th of two such lists differ in it alone."""
    in_a_row = len(variants)  # so many have the same value
    for key, entry in document.entries.items():
        num_values = len(entry.alternatives)
        in_a_row //= num_values
        if num_values > 1:
            lists: list[list[Variant]] = [[] for _ in range(num_values)]
            for number, variant in enumerate(variants):
                lists[number // in_a_row % num_values].append(variant)
            yield key, lists
