"""Sums over rows of what each slice contributes: biases, scales, broadcasting arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.observation.environments import Partition
from consilience.observation.shares import Shares, SpanShares, SumShares, reduced


def sum_shares(contributions: Tensor, dim: int, shape: torch.Size, partition: Partition) -> Shares:
    """Return the shares of a tensor that was broadcast to contributions with rows in ``dim``."""
    found = reduced(contributions, dim, shape)
    if found is not None:
        return SumShares(partition.arrange(found), shape, partition)
    lead = contributions.dim() - len(shape)
    over = [
        d
        for d in range(contributions.dim())
        if (d < lead or shape[d - lead] == 1) and contributions.shape[d] != 1
    ]
    if over:
        contributions = contributions.sum(over, keepdim=True)
    return SpanShares(contributions.reshape(shape), dim - lead, partition)
