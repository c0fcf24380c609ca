"""Shuffled order without end: a fresh permutation each epoch, the same for the same seed."""

import random


class ShuffledOrder:
    """Row number `position` of an endless pass over `size` rows, for any position at any time."""

    def __init__(self, size: int, seed: int, *, shuffle: bool = True) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._permutation = list(range(size))

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if self.shuffle and epoch != self._epoch:
            self._permutation = list(range(self.size))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[offset]
