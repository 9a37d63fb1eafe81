"""What masks may do about the magnitude that they take away from a layer."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

Rescale = Literal["none", "count", "norm"]
"""``"count"``: times size over kept (the paper). ``"norm"``: back to the norm before the mask."""


def rescale_kept(
    kept: Tensor, gradient: Tensor, keep: Tensor, rescale: Rescale, largest: float | None
) -> Tensor:
    r"""Return what a mask kept of one layer, times a factor.

    .. math:: \text{count:} \quad \frac{\mathrm{size}}{\mathrm{size\ kept}} \qquad
        \text{norm:} \quad \frac{\lVert \mathrm{gradient} \rVert}{\lVert \mathrm{kept} \rVert}

    and at most ``largest``. Where a layer keeps nothing it stays 0. Nothing here waits for the
    device.

    Args:
        kept: What the mask kept of the gradient. May be overwritten.
        gradient: The gradient before the mask.
        keep: 1 where the mask kept a component and 0 elsewhere.
        rescale: How to choose the factor, ``"count"`` or ``"norm"``.
        largest: The largest factor; None for no limit.
    """
    precise = torch.promote_types(kept.dtype, torch.float32)
    if rescale == "count":
        factor = keep.numel() / keep.sum(dtype=precise)
    else:
        factor = _norm(gradient, precise) / _norm(kept, precise)
    if largest is not None:
        factor = factor.clamp(max=largest)
    # No finite factor: nothing was kept, so all is 0, or the layer holds an infinity, which
    # must not spread. Both stay what they are.
    factor = torch.where(factor.isfinite(), factor, 1)
    if kept.dtype == precise:
        return kept.mul_(factor)
    # Half precision ends at 65504. The factor may not fit where its product does.
    return kept.to(precise).mul_(factor).to(kept.dtype)


def check_rescale(
    rescale: Rescale | bool, max_rescale: float | None
) -> tuple[Rescale, float | None]:
    """Return the settings of a rescaling in their plain form, or raise."""
    if isinstance(rescale, bool):
        rescale = "count" if rescale else "none"
    if rescale not in get_args(Rescale):
        raise ValueError(
            "Parameter `rescale` should be 'none' (or False), 'count' (or True) or 'norm'. "
            f"Found `rescale = {rescale!r}`."
        )
    if max_rescale is None:
        return rescale, None
    if rescale == "none":
        raise ValueError(
            "Parameter `max_rescale` limits a rescaling, and there is none to limit. Found "
            f"`max_rescale = {max_rescale!r}` with `rescale = 'none'`. Set `rescale` to 'count' "
            "or 'norm', or leave `max_rescale` out."
        )
    if not isinstance(max_rescale, Real) or not 1 <= max_rescale < math.inf:  # also refuses NaN
        raise ValueError(
            "Parameter `max_rescale` should be a finite number, 1 or more, or None for no limit. "
            f"Found `max_rescale = {max_rescale!r}`."
        )
    return rescale, float(max_rescale)


def _norm(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm
