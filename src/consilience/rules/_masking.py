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
