"""Choosing between components by their bits, in place.

``torch.where`` would read better. On a mask without a pattern it takes fifteen times as long, as a
processor cannot guess the branch it takes for every component. Arithmetic with masks of 0 and 1
would be as fast as bits, and would spread what is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from consilience.optim._pieces import pieces, room_on

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def keep_(tensor: Tensor, keep: Tensor) -> Tensor:
    """Set the components of a tensor to 0 where a boolean mask is False."""
    _bits(tensor).bitwise_and_(_ones(keep, tensor))
    return tensor


def put_back_(tensor: Tensor, masked: Tensor, old: Tensor) -> Tensor:
    """Set the components of a tensor to those of an old one where a boolean mask is True.

    The old tensor is overwritten.
    """
    for new, mask, difference in pieces((tensor, masked, old), room_on(tensor.device)):
        bits = _bits(difference).bitwise_xor_(_bits(new)).bitwise_and_(_ones(mask, new))
        _bits(new).bitwise_xor_(bits)
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def _ones(mask: Tensor, like: Tensor) -> Tensor:
    """Return all bits set where a boolean mask is True, and none elsewhere."""
    return mask.to(_INTEGERS[like.dtype.itemsize]).neg_()
