"""What all methods have in common: a step on one batch, and penalties on the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Decay = Literal["after-mask", "before-mask", "decoupled"]


@dataclass(frozen=True)
class Step:
    """What one step of training has to say.

    Attributes:
        loss: The loss on the batch, before the step, penalties on weights left out.
        kept: The share of gradient components that the rule kept; 1 where there is no rule.
        null_keep_rate: The share that random signs would keep; None where there is no rule.
    """

    loss: float
    kept: float = 1.0
    null_keep_rate: float | None = None


@dataclass(frozen=True)
class Penalty:
    r"""L1 and L2 on all parameters, and the point of a step at which they act.

    With :math:`v = \lambda_1 \mathrm{sign}(w) + \lambda_2 w`:

    ============= =============================================================================
    `after-mask`  :math:`v` is added to the gradient after the rule and before the optimizer:
                  masked weights are regularised too, and Adam divides :math:`v` by its own
                  running magnitude ("L2 inside Adam"; what the authors' code does).
    `before-mask` :math:`v` is added before the rule, as if it stood in the loss: a weight whose
                  gradient is masked is not regularised.
    `decoupled`   :math:`w \leftarrow w - \eta v`, beside the optimizer's own step (AdamW's way).
    ============= =============================================================================

    Without a rule the first two are the same.
    """

    l1: float = 0.0
    l2: float = 0.0
    decay: Decay = "after-mask"

    def before_mask(self, parameters: Iterable[Tensor]) -> None:
        """Act between `backward` and the rule."""
        if self.decay == "before-mask":
            self._add(parameters)

    def after_mask(self, optimizer: Optimizer) -> None:
        """Act between the rule and the optimizer's step."""
        if self.decay == "after-mask":
            self._add(p for group in optimizer.param_groups for p in group["params"])
        elif self.decay == "decoupled":
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.sub_(group["lr"] * self._of(p))

    @torch.no_grad()
    def _add(self, parameters: Iterable[Tensor]) -> None:
        if self.l1 == 0 and self.l2 == 0:
            return
        for p in parameters:
            if p.grad is not None:
                p.grad.add_(self._of(p))

    def _of(self, p: Tensor) -> Tensor:
        found = self.l2 * p
        return found.add_(p.sign(), alpha=self.l1) if self.l1 else found


class Method(ABC):
    """A way of learning from batches of rows with environments.

    Attributes:
        model: What predicts: inputs to logits. Evaluation uses it and nothing else.
        optimizer: What moves the parameters.
    """

    model: nn.Module
    optimizer: Optimizer

    @abstractmethod
    def step(self, x: Tensor, y: Tensor, env: Tensor) -> Step:
        """Learn from one batch; `env[i]` is the environment of row `i`."""

    def modules(self) -> dict[str, nn.Module]:
        """Return all modules that training changes, by the name under which they are stored."""
        return {"model": self.model}

    def state_dict(self) -> dict[str, int]:
        """Return what the method remembers beside modules and optimizer, as whole numbers."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take up what `state_dict` returned."""
        del state


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of every row; logits of one column are those of label 1.

    Example:
        >>> losses(torch.zeros(1, 2), torch.tensor([1]))
        tensor([0.6931])
        >>> losses(torch.zeros(1, 1), torch.tensor([1]))
        tensor([0.6931])
    """
    if logits.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(
            logits[:, 0], y.to(logits.dtype), reduction="none"
        )
    return F.cross_entropy(logits, y, reduction="none")


def predictions(logits: Tensor) -> Tensor:
    """Return the label that each row of logits stands for."""
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)
