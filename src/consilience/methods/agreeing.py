"""Methods that let the environments vote: the AND-mask and the other rules."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consilience.agreement import Agreement
from consilience.methods._method import Method, Penalty, Step, losses
from consilience.rules import Rule


class Agreeing(Method):
    """Minimise the mean over environments of their mean losses, along what a rule leaves of it.

    Args:
        model: What predicts.
        optimizer: What moves its parameters.
        rule: What makes a gradient of the environments' gradients.
        penalty: L1 and L2, before or after the rule.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, rule: Rule, penalty: Penalty | None = None
    ):
        self.model = model
        self.optimizer = optimizer
        self.penalty = penalty or Penalty()
        self.agreement = Agreement(model, rule)

    def step(self, x: Tensor, y: Tensor, env: Tensor) -> Step:
        """Learn from one batch."""
        self.optimizer.zero_grad()
        found: list[Tensor] = []

        def each() -> Iterator[Tensor]:
            for e in torch.unique(env):
                rows = env == e
                loss = losses(self.model(x[rows]), y[rows]).mean()
                found.append(loss.detach())
                yield loss

        self.agreement.backward(each())
        self.penalty.before_mask(self.model.parameters())
        self.agreement.apply()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        kept = sum(int(torch.count_nonzero(g)) for g in gradients) / sum(
            g.numel() for g in gradients
        )
        self.penalty.after_mask(self.optimizer)
        self.optimizer.step()
        rate = self.agreement.rule.null_keep_rate(len(found))
        return Step(float(torch.stack(found).mean()), kept, rate)
