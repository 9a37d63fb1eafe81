"""How a rule sets components to zero without hiding what is not finite."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_where(gradient: Tensor, score: Tensor, least: int) -> Tensor:
    """Return the gradient where ``score >= least`` or where it is not finite, and 0 elsewhere.

    A component that is infinite or NaN comes out as it came in, masked or not, so that
    ``GradScaler`` and anomaly tools still see it.

    The score holds whole numbers, and is overwritten. ``torch.where(score >= least, ...)``
    would read better. On a mask without a pattern it is many times slower, as a processor
    cannot guess the branch it takes for every component: docs/decisions/masking.md.
    """
    # 0 times what is not finite is NaN, which no threshold stops. The comparison is `score <=
    # threshold -> 0`, in one pass; half a vote below the quorum it is exact on whole numbers.
    score.add_(gradient, alpha=0)
    kept: Tensor = torch.ops.aten.threshold_backward(gradient, score, least - 0.5)
    return kept.to(gradient.dtype)


TILE = 2**16
"""How many components are compared at a time, so that their scores stay in cache."""


def keep_agreed(gradient: Tensor, votes: Tensor, least: int) -> Tensor:
    """Return the gradient where ``abs(votes) >= least``, as :func:`keep_where` does.

    A large one on the CPU a tile at a time: each of gradient, votes and result goes through memory
    once.
    """
    plain = type(gradient) is Tensor and type(votes) is Tensor
    if (
        not plain
        or gradient.numel() <= TILE
        or gradient.device.type != "cpu"
        or gradient.dtype != votes.dtype
        or gradient.shape != votes.shape
        or not (gradient.is_contiguous() and votes.is_contiguous())
        or (torch.is_grad_enabled() and (gradient.requires_grad or votes.requires_grad))
        or torch.compiler.is_compiling()
        or torch._C._functorch.maybe_current_level() is not None
    ):
        return keep_where(gradient, votes.abs(), least)
    kept = torch.empty_like(gradient)
    scores = votes.new_empty(TILE)
    tiles = (torch.split(tensor.view(-1), TILE) for tensor in (gradient, votes, kept))
    for part, count, out in zip(*tiles, strict=True):
        score = torch.abs(count, out=scores[: len(count)]).add_(part, alpha=0)
        torch.ops.aten.threshold_backward.grad_input(part, score, least - 0.5, grad_input=out)
    return kept
