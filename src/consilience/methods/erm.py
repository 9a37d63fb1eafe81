"""Empirical risk minimisation: the ordinary way, on all environments pooled."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from consilience.methods._method import Method, Penalty, Step, losses


class ERM(Method):
    """Minimise the mean loss over the rows of a batch. Environments are not looked at.

    Dropout and batch norm are the model's; L1 and L2 are the penalty's.

    Args:
        model: What predicts.
        optimizer: What moves its parameters.
        penalty: L1 and L2.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, penalty: Penalty | None = None):
        self.model = model
        self.optimizer = optimizer
        self.penalty = penalty or Penalty()

    def step(self, x: Tensor, y: Tensor, env: Tensor) -> Step:
        """Learn from one batch."""
        del env
        self.optimizer.zero_grad()
        loss = losses(self.model(x), y).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.penalty.before_mask(self.model.parameters())
        self.penalty.after_mask(self.optimizer)
        self.optimizer.step()
        return Step(loss=loss.item())
