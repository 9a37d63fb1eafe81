"""A rule that lets a test read what an agreement counted, through the public API."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from consilience.rules import Rule, Statistic, Tally


class Record(Rule):
    """Keeps every tally that it is shown, and signs the gradient with the tally's number.

    After `apply()`, `p.grad` holds the number of p's tally (from 1 on), so that :meth:`of` can
    tell which tally belongs to which parameter without knowing how an agreement iterates.
    """

    statistics: ClassVar[frozenset[Statistic]] = frozenset(Statistic)

    def __init__(self) -> None:
        self.tallies: list[Tally] = []

    def __call__(self, tally: Tally) -> Tensor:
        copies = {
            name: getattr(tally, name).detach().clone()
            for name in ("gradient", "votes", "turnout", "logs", "squares")
        }
        self.tallies.append(replace(tally, **copies))
        return torch.full_like(tally.gradient, float(len(self.tallies)))

    def of(self, model: nn.Module) -> dict[str, Tally]:
        """Return the tally of each parameter that has a gradient; call it after `apply()`."""
        found = {}
        for name, parameter in model.named_parameters():
            if parameter.grad is None or not parameter.requires_grad or not parameter.numel():
                continue
            grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            numbers = grad.unique()
            assert len(numbers) == 1, f"{name}: the gradient is not what the rule returned"
            if int(numbers):  # a gradient of zero may have been left alone
                found[name] = self.tallies[int(numbers) - 1]
        return found
