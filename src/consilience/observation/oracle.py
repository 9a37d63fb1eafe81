"""The slow, obviously right way: one backward pass per environment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized

import torch
from torch import Tensor

from consilience.observation.environments import single_environment_error
from consilience.observation.errors import ObservationError
from consilience.observation.ledger import Count, accumulator_dtype
from consilience.rules import Statistic


def tally_losses(
    environment_losses: Tensor | Iterable[Tensor],
    parameters: Sequence[Tensor],
    statistics: frozenset[Statistic],
    *,
    allow_single: bool,
) -> tuple[list[Tensor | None], list[Count]]:
    """Return the gradient of the mean loss, and what its environments vote, per parameter.

    One backward pass per environment, folded at once: O(parameters) memory however many
    environments there are.
    """
    if not isinstance(environment_losses, Iterable):
        raise TypeError(
            "Parameter `environment_losses` should be a vector with a loss per environment, or an "
            f"iterable of them. Found `{type(environment_losses).__name__}`."
        )
    if isinstance(environment_losses, Mapping):
        environment_losses = environment_losses.values()
    folded = _Fold(parameters, statistics)
    if isinstance(environment_losses, Tensor):
        losses = environment_losses
        if losses.dim() != 1 or len(losses) == 0:
            raise ValueError(
                "Parameter `environment_losses` should be a vector with a loss per environment, or "
                "an iterable of them. Found a tensor of shape "
                f"{list(losses.shape)}."
            )
        _check_loss(losses)
        folded.environments = len(losses)
        for index in range(len(losses)):
            folded.add(losses[index], retain_graph=index + 1 < len(losses))
    else:
        listed = list(environment_losses) if isinstance(environment_losses, Sized) else None
        if listed is not None:
            folded.environments = len(listed)
        for loss in environment_losses if listed is None else listed:
            if not isinstance(loss, Tensor):
                raise TypeError(
                    "Parameter `environment_losses` should yield tensors. Found "
                    f"`{type(loss).__name__}`."
                )
            if loss.numel() != 1:
                raise ValueError(
                    "Parameter `environment_losses` should yield one number per environment. Found "
                    f"a loss of shape {list(loss.shape)}: reduce it, as with `.mean()`."
                )
            _check_loss(loss)
            # Losses of a list may share a graph; those of a generator live one at a time.
            try:
                folded.add(loss.reshape(()), retain_graph=listed is not None)
            except RuntimeError as error:
                if listed is None and "second time" in str(error):
                    raise ObservationError(
                        "The losses of a generator share a graph, of which no more than one lives "
                        "at a time. Give them as a list or a vector, or run a forward pass for "
                        "each."
                    ) from error
                raise
    if folded.seen == 1 and not allow_single:
        raise single_environment_error("environment_losses")
    return folded.finish()


def _check_loss(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ValueError(
            "Parameter `environment_losses` should require grad. Found a loss that does not: was "
            "it computed under `torch.no_grad()`, or detached?"
        )


class _Fold:
    def __init__(self, parameters: Sequence[Tensor], statistics: frozenset[Statistic]):
        self.parameters = parameters
        self.statistics = statistics
        self.environments: int | None = None
        self.seen = 0
        self.sums: list[Tensor | None] = [None] * len(parameters)
        self.counts = [Count() for _ in parameters]
        self.nonzero = [Count() for _ in parameters]
        self.reached = [0] * len(parameters)

    def add(self, loss: Tensor, *, retain_graph: bool) -> None:
        active = [i for i, p in enumerate(self.parameters) if p.requires_grad]
        gradients = torch.autograd.grad(
            loss,
            [self.parameters[i] for i in active],
            retain_graph=retain_graph,
            allow_unused=True,
        )
        self.seen += 1
        for i, gradient in zip(active, gradients, strict=True):
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.to_dense()  # noqa: PLW2901
            self.reached[i] += 1
            exact = gradient.to(accumulator_dtype(gradient.dtype))
            total = self.sums[i]
            self.sums[i] = exact.clone() if total is None else total.add_(exact)
            share = exact if self.environments is None else exact / self.environments
            self.counts[i].add_shares(share[None], self.statistics)
            if self.environments is None and Statistic.LOGS in self.statistics:
                self.nonzero[i].add_shares(share[None], [Statistic.TURNOUT])

    def finish(self) -> tuple[list[Tensor | None], list[Count]]:
        if self.seen == 0:
            raise ValueError(
                "Parameter `environment_losses` should yield a loss per environment. Found none."
            )
        gradients: list[Tensor | None] = []
        for i, (parameter, total) in enumerate(zip(self.parameters, self.sums, strict=True)):
            if total is None:
                gradients.append(None)
                continue
            self.counts[i].voters = self.seen
            self._complete(i)
            gradients.append((total / self.seen).to(parameter.dtype))
        return gradients, self.counts

    def _complete(self, i: int) -> None:
        """Scale by the number of environments once it is known; count those that were silent."""
        statistics = self.counts[i].statistics
        logs = statistics.get(Statistic.LOGS)
        if self.environments is None:
            if Statistic.SQUARES in statistics:
                statistics[Statistic.SQUARES].div_(self.seen**2)
            if logs is not None:
                # The floor under a share that is zero does not depend on how many there are.
                nonzero = self.nonzero[i].statistics[Statistic.TURNOUT]
                logs.sub_(nonzero, alpha=math.log(self.seen))
        silent = self.seen - self.reached[i]
        if silent and logs is not None:
            logs.add_(Statistic.LOGS.of(torch.zeros_like(logs)[None]), alpha=silent)
