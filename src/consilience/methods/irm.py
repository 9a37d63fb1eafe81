"""Invariant risk minimisation (IRMv1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from consilience.methods._method import Method, Penalty, Step, losses
from consilience.observation.environments import environment_mean


class IRM(Method):
    r"""Ask that one classifier be optimal in every environment (Arjovsky et al., 2019).

    The loss is the mean over environments of

    .. math:: L_e + \lambda \left( \partial_s L_e(s \cdot f)|_{s=1} \right)^2

    with :math:`f` the logits. For the first `annealing_steps` steps :math:`\lambda` is 1, then it
    is `penalty_weight`; and where it is above 1 the whole loss is divided by it, so that the
    gradient keeps its size. Weight, annealing and division are those of its authors' code.

    Args:
        model: What predicts.
        optimizer: What moves its parameters.
        penalty: L1 and L2. They are added after the division, and keep their coefficients.
        penalty_weight: The weight :math:`\lambda` after annealing.
        annealing_steps: For how many steps the weight is 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        penalty: Penalty | None = None,
        *,
        penalty_weight: float = 100.0,
        annealing_steps: int = 4,
    ):
        self.model = model
        self.optimizer = optimizer
        self.penalty = penalty or Penalty()
        self.penalty_weight = penalty_weight
        self.annealing_steps = annealing_steps
        self.steps = 0

    def step(self, x: Tensor, y: Tensor, env: Tensor) -> Step:
        """Learn from one batch."""
        weight = self.penalty_weight if self.steps >= self.annealing_steps else 1.0
        self.steps += 1
        self.optimizer.zero_grad()
        logits = self.model(x)
        risk = environment_mean(losses(logits, y), env)
        loss = risk + weight * irm_penalty(logits, y, env)
        (loss / max(weight, 1.0)).backward()  # type: ignore[no-untyped-call]
        self.penalty.before_mask(self.model.parameters())
        self.penalty.after_mask(self.optimizer)
        self.optimizer.step()
        return Step(loss=risk.item())

    def state_dict(self) -> dict[str, int]:
        """Return how many steps were taken, which annealing depends on."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take up what `state_dict` returned."""
        self.steps = state["steps"]


def irm_penalty(logits: Tensor, y: Tensor, env: Tensor) -> Tensor:
    r"""Return the mean over environments of the squared gradient with respect to a scale of logits.

    The gradient of the cross-entropy of row :math:`i` at scale 1 is
    :math:`\langle \mathrm{softmax}(f_i) - \mathrm{onehot}(y_i), f_i \rangle`, so no second
    backward pass is needed.
    """
    if logits.shape[1] == 1:
        rows = (logits[:, 0].sigmoid() - y.to(logits.dtype)) * logits[:, 0]
    else:
        target = nn.functional.one_hot(y, logits.shape[1]).to(logits.dtype)
        rows = ((logits.softmax(1) - target) * logits).sum(1)
    _, index, sizes = torch.unique(env, return_inverse=True, return_counts=True)
    means = rows.new_zeros(len(sizes)).index_add(0, index, rows) / sizes
    found: Tensor = means.square().mean()
    return found
