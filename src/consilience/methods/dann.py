"""Domain-adversarial training of neural networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consilience.methods._method import Method, Penalty, Step, losses


class DANN(Method):
    r"""Learn an embedding that tells labels but not environments (Ganin et al., 2016).

    A label network and a domain network read the embedding. All are trained on
    :math:`L_{label} + L_{domain}`, but the gradient of :math:`L_{domain}` with respect to the
    embedding is multiplied by :math:`-\lambda` on its way back.

    Args:
        embedding: Inputs to features.
        label: Features to label logits.
        domain: Features to a logit for each environment, numbered from 0.
        optimizer: What moves the parameters of all three.
        penalty: L1 and L2.
        domain_weight: The weight :math:`\lambda` of the reversed gradient.
    """

    def __init__(
        self,
        embedding: nn.Module,
        label: nn.Module,
        domain: nn.Module,
        optimizer: Optimizer,
        penalty: Penalty | None = None,
        *,
        domain_weight: float = 1.0,
    ):
        self.embedding = embedding
        self.label = label
        self.domain = domain
        self.model = nn.Sequential(embedding, label)
        self.optimizer = optimizer
        self.penalty = penalty or Penalty()
        self.domain_weight = domain_weight

    def step(self, x: Tensor, y: Tensor, env: Tensor) -> Step:
        """Learn from one batch."""
        self.optimizer.zero_grad()
        features = self.embedding(x)
        loss = losses(self.label(features), y).mean()
        reversed_features = Reverse.apply(features, self.domain_weight)  # type: ignore[no-untyped-call]
        domain_loss = nn.functional.cross_entropy(self.domain(reversed_features), env)
        (loss + domain_loss).backward()  # type: ignore[no-untyped-call]
        self.penalty.before_mask(p for m in self.modules().values() for p in m.parameters())
        self.penalty.after_mask(self.optimizer)
        self.optimizer.step()
        return Step(loss=loss.item())

    def modules(self) -> dict[str, nn.Module]:
        """Return the embedding with the label network, and the domain network."""
        return {"model": self.model, "domain": self.domain}


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a negative weight."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: float) -> Tensor:  # noqa: D102
        ctx.weight = weight
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return -ctx.weight * gradient, None
