"""Methods that let the environments vote: the AND-mask and the other rules."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from consilience.agreement import Agreement, BatchNorm
from consilience.methods._method import Method, Penalty, Step, losses
from consilience.observation.environments import environment_mean
from consilience.rules import Rule


class Agreeing(Method):
    """Minimise the mean over environments of their mean losses, along what a rule leaves of it.

    Args:
        model: What predicts.
        optimizer: What moves its parameters.
        rule: What makes a gradient of the environments' gradients.
        penalty: L1 and L2, before or after the rule.
        batchnorm: Whose gradient votes where train-mode batch norm couples the rows: each
            environment's share of the joint backward pass ("joint"), or that of a network that
            normalises each environment by itself ("per_environment").
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        rule: Rule,
        penalty: Penalty | None = None,
        *,
        batchnorm: BatchNorm = "joint",
    ):
        self.model = model
        self.optimizer = optimizer
        self.penalty = penalty or Penalty()
        self.agreement = Agreement(
            model,
            rule,
            batchnorm=batchnorm,
            allow_single=True,
            # A penalty that is added before the mask is a part of the gradient without votes.
            unvoted="allow" if self.penalty.decay == "before-mask" else "raise",
        )

    def step(self, x: Tensor, y: Tensor, env: Tensor) -> Step:
        """Learn from one batch."""
        self.optimizer.zero_grad()
        with self.agreement.observe(env):
            loss = environment_mean(losses(self.model(x), y), env)
        loss.backward()  # type: ignore[no-untyped-call]
        self.penalty.before_mask(self.model.parameters())
        report = self.agreement.apply()
        self.penalty.after_mask(self.optimizer)
        self.optimizer.step()
        return Step(loss.item(), report.kept, report.null_keep_rate)
