"""The agreement: parameters, a rule, and the tally in between."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from consilience.observation.ledger import Ledger
from consilience.observation.oracle import tally_losses
from consilience.rules import Rule, Tally


class Agreement:
    """Stub of the streaming way; :meth:`backward` is complete."""

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor],
        rule: Rule,
        *,
        allow_single: bool = False,
    ):
        if isinstance(parameters, nn.Module):
            named = list(parameters.named_parameters())
        else:
            named = [(f"parameters[{i}]", p) for i, p in enumerate(parameters)]
        self.rule = rule
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.allow_single = allow_single
        self._ledger = Ledger()

    def backward(self, environment_losses: Tensor | Iterable[Tensor]) -> None:
        """One backward pass per environment."""
        gradients, counts = tally_losses(environment_losses, self.parameters, self.rule.statistics)
        for i, (gradient, count) in enumerate(zip(gradients, counts, strict=True)):
            if gradient is None:
                continue
            parameter = self.parameters[i]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self._ledger[i].merge(count)

    def apply(self) -> None:
        """Replace each gradient by what the rule makes of its tally."""
        with torch.no_grad():
            for i in self._ledger:
                count, parameter = self._ledger[i], self.parameters[i]
                assert parameter.grad is not None  # noqa: S101
                found = {s.value: t for s, t in count.statistics.items()}
                parameter.grad = self.rule(Tally(parameter.grad, count.voters, **found))
        self._ledger.clear()
