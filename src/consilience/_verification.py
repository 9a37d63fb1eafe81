"""The streaming way and the oracle, side by side on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consilience.observation.environments import EnvironmentLabels, factorize
from consilience.rules import Rule, Statistic, Tally

if TYPE_CHECKING:
    from consilience.agreement import Agreement


class _Votes(Rule):
    """Leaves gradients alone, and remembers tallies."""

    def __init__(self) -> None:
        self.tallies: list[Tally] = []

    def __call__(self, tally: Tally) -> Tensor:
        self.tallies.append(tally)
        return tally.gradient


def rows_of(batch: Any, index: Tensor, dim: int) -> Any:
    """Pick rows from every tensor of a batch."""
    if isinstance(batch, Tensor):
        return batch.index_select(dim if batch.dim() > dim else 0, index.to(batch.device))
    if isinstance(batch, dict):
        return {key: rows_of(value, index, dim) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(rows_of(value, index, dim) for value in batch)
    return batch


def count_rows(batch: Any, dim: int) -> int:
    """Return how many rows a batch has."""
    if isinstance(batch, Tensor):
        return batch.shape[dim if batch.dim() > dim else 0]
    values = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, (dict, list, tuple)):
        raise TypeError(
            "Parameter `batch` should be a tensor, or tensors in tuples, lists and dictionaries. "
            f"Found `{type(batch).__name__}`."
        )
    for value in values:
        if isinstance(value, (Tensor, dict, list, tuple)):
            return count_rows(value, dim)
    raise ValueError("Parameter `batch` should hold a tensor with rows. Found none.")


@contextmanager
def _undisturbed(parameters: list[Tensor]) -> Iterator[None]:
    """Put gradients back afterwards."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def differences(
    agreement: Agreement,
    compute_loss: Callable[[Any], Tensor],
    batch: Any,
    env: EnvironmentLabels | None,
    tolerance: float | None,
) -> list[str]:
    """Return a line for each parameter whose votes or gradient differ from the oracle's."""
    from consilience.agreement import Agreement  # noqa: PLC0415 - it imports this module

    named = agreement.named_parameters()
    parameters = [parameter for _, parameter in named]
    rows = count_rows(batch, agreement.batch_dim)
    codes = torch.arange(rows) if env is None else factorize(env)
    if len(codes) != rows:
        raise ValueError(
            "Parameter `env` should have a label for every row of the batch. Found "
            f"`len(env) = {len(codes)}` and {rows} rows."
        )
    with _undisturbed(parameters), torch.random.fork_rng():
        seed = torch.initial_seed()
        rule = _Votes()
        observed = Agreement(
            named,
            rule,
            batchnorm=agreement.batchnorm,
            batch_dim=agreement.batch_dim,
            allow_single=agreement.allow_single,
            unvoted="allow",
        )
        observed._modules = agreement._modules
        torch.manual_seed(seed)
        with observed.observe(codes):
            loss = compute_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        (observation,) = observed._observations
        consumers = {
            i: {use.name for use in observation.uses.get(i, ())} for i in range(len(parameters))
        }
        observed.apply()
        tallies: list[Tally | None] = [None] * len(parameters)
        for i, parameter in enumerate(parameters):
            for tally in rule.tallies:
                if tally.gradient is parameter.grad:
                    tallies[i] = tally
        votes, floors = _oracle_votes(compute_loss, batch, codes, agreement, parameters, seed)
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(seed)
        compute_loss(batch).backward()  # type: ignore[no-untyped-call]
        lines = []
        for i, (name, parameter) in enumerate(named):
            if parameter.grad is None and tallies[i] is None:
                continue
            line = _difference(
                tallies[i], parameter.grad, votes[i], floors[i], parameter, tolerance
            )
            if line:
                used = ", ".join(sorted(consumers[i])) or "nothing that was seen"
                lines.append(f"`{name}`, consumed by {used}: {line}")
        return lines


def _oracle_votes(
    compute_loss: Callable[[Any], Tensor],
    batch: Any,
    codes: Tensor,
    agreement: Agreement,
    parameters: list[Tensor],
    seed: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return votes, and how small environments' gradients get, relative to the largest."""
    votes = [torch.zeros_like(parameter) for parameter in parameters]
    floors = [torch.full_like(parameter, torch.inf) for parameter in parameters]
    for e in range(int(codes.max()) + 1):
        index = (codes == e).nonzero().squeeze(1)
        torch.manual_seed(seed)
        loss = compute_loss(rows_of(batch, index, agreement.batch_dim))
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        for i, gradient in enumerate(found):
            if gradient is not None:
                votes[i] += gradient.sign()
                scale = gradient.abs().max().clamp(min=1e-300)
                floors[i] = torch.minimum(floors[i], gradient.abs() / scale)
    return votes, floors


def _difference(
    tally: Tally | None,
    gradient: Tensor | None,
    votes: Tensor,
    floor: Tensor,
    parameter: Tensor,
    tolerance: float | None,
) -> str | None:
    if tally is None:
        return "it has a gradient, and no environment voted"
    exact = parameter.dtype == torch.float64
    band = tolerance if tolerance is not None else (1e-9 if exact else 1e-4)
    if gradient is not None:
        scale = float(gradient.abs().max().clamp(min=1e-300))
        error = float((tally.gradient - gradient).abs().max()) / scale
        if not error <= (1e-9 if exact else 1e-3):
            return f"its gradient is off by {error:.1e} of the largest component"
    wrong = (tally.get(Statistic.VOTES) != votes) & (floor > band)
    if bool(wrong.any()):
        share = float(wrong.double().mean())
        return f"votes differ on {share:.1%} of its weights"
    return None
