"""What a workload is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from consilience import AndMask


@dataclass(frozen=True)
class Workload:
    """A model and a batch of a step of training.

    Attributes:
        name: How tables call it.
        build: Makes the model, with weights from the seed that is set.
        draw: Draws inputs and targets of some rows.
        losses: From outputs and targets to a loss, with `F.cross_entropy`'s `reduction`.
        environments: How many environments there are.
        each: How many rows each of them has; the first environment's rows come first.
        target: What a step of Agreement may cost at most, in ordinary steps; None: not stated.
        joint: Whether batch normalization in training mode couples the rows, so that what is
            counted are rows' shares of the joint gradient. No way but hooks gives those.
        sequential: Whether every parameter belongs to a module that BackPACK knows.
        small: What verifies it in float64, where the workload itself would take long.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    losses: Callable[..., Tensor]
    environments: int
    each: int
    target: float | None = None
    joint: bool = False
    sequential: bool = False
    small: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return self.environments * self.each

    @property
    def single(self) -> bool:
        """Whether every row is an environment of its own."""
        return self.each == 1

    @property
    def rule(self) -> AndMask:
        """The rule, at a threshold near which votes of noise lie: some pass and some do not."""
        return AndMask(threshold=1 / math.sqrt(self.environments))

    @property
    def labels(self) -> Tensor | None:
        """The environment of each row; None where every row is its own."""
        if self.single:
            return None
        return torch.arange(self.environments).repeat_interleave(self.each)

    def smaller(self) -> Workload:
        """Return the same model on as many rows as are verified."""
        if self.small is None:
            return self
        environments, each = self.small
        return replace(self, environments=environments, each=each)


def cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction=reduction)
