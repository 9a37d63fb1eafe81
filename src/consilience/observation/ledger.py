"""Where votes and the other statistics are kept until they are applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from consilience.rules import Statistic

BLOCK_BYTES = 8 * 2**20
"""How much memory the gradients of a block of environments may take at a time."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision cannot count past 2048 (or 256), so statistics are kept in float32."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


@dataclass
class Count:
    """The statistics of one parameter, while they are being counted."""

    voters: int = 0
    statistics: dict[Statistic, Tensor] = field(default_factory=dict)

    def add(self, statistic: Statistic, amount: Tensor) -> None:
        """Add an amount that the caller will not use again."""
        found = self.statistics.get(statistic)
        if found is None:
            self.statistics[statistic] = amount
        else:
            found.add_(amount)

    def add_shares(self, shares: Tensor, statistics: Iterable[Statistic]) -> None:
        """Add the shares ``[environments, ...]`` of some environments."""
        shares = shares.to(accumulator_dtype(shares.dtype))
        for statistic in statistics:
            self.add(statistic, statistic.of(shares))

    def merge(self, other: Count) -> None:
        """Add what another count holds. The other is not to be used again."""
        self.voters += other.voters
        for statistic, amount in other.statistics.items():
            self.add(statistic, amount)


class Ledger:
    """The counts of some parameters, by their index."""

    def __init__(self) -> None:
        self._counts: dict[int, Count] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __contains__(self, index: int) -> bool:
        return index in self._counts

    def __getitem__(self, index: int) -> Count:
        """Return the count of a parameter, a fresh one where there is none."""
        return self._counts.setdefault(index, Count())

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def merge(self, other: Ledger) -> None:
        """Take over what another ledger holds, and leave that one empty."""
        for index, count in other._counts.items():
            if index in self._counts:
                self._counts[index].merge(count)
            else:
                self._counts[index] = count
        other._counts = {}

    def clear(self) -> None:
        """Forget everything."""
        self._counts = {}
