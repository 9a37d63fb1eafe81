"""Large tensors in pieces that are worked on one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ROOM = {"cpu": 2**18}
"""How many components are worked on together. On a processor few enough that what is read again is
still in its cache and that temporaries are small, and enough that the calls cost nothing beside the
work; benchmarks/optimizer_step.py has the times."""

ELSEWHERE = 2**24


def room_on(device: torch.device) -> int:
    """Return how many components to work on together."""
    return ROOM.get(device.type, ELSEWHERE)


def pieces(tensors: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors of one shape alike, into views of at most some size.

    They stay whole for a size of 0, and where one of them is not contiguous.
    """
    if 0 < size < tensors[0].numel() and all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)
    else:
        yield tuple(tensors)
