"""The streaming way and the oracle, side by side on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

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
    if isinstance(batch, np.ndarray):
        return np.take(batch, index.numpy(), dim if batch.ndim > dim else 0)
    if isinstance(batch, Mapping):
        # Made anew as what it was, as some give their entries as attributes.
        return type(batch)({key: rows_of(value, index, dim) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        values = [rows_of(value, index, dim) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def count_rows(batch: Any, dim: int) -> int:
    """Return how many rows a batch has."""
    if isinstance(batch, Tensor):
        return batch.shape[dim if batch.dim() > dim else 0]
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, (Mapping, list, tuple)):
        raise TypeError(
            "Parameter `batch` should be a tensor, or tensors in tuples, lists and dictionaries. "
            f"Found `{type(batch).__name__}`."
        )
    for value in values:
        if isinstance(value, (Tensor, Mapping, list, tuple)):
            return count_rows(value, dim)
    raise ValueError("Parameter `batch` should hold a tensor with rows. Found none.")


@contextmanager
def _undisturbed(parameters: list[Tensor], modules: list[nn.Module]) -> Iterator[None]:
    """Put gradients and buffers back afterwards."""
    before = [parameter.grad for parameter in parameters]
    buffers = [
        (module, name, buffer, buffer.clone())
        for model in modules
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        for module, name, buffer, value in buffers:
            with torch.no_grad():
                module._buffers[name] = buffer.copy_(value)


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
    with _undisturbed(parameters, agreement._modules), torch.random.fork_rng():
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
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                "Parameter `compute_loss` should return a loss, one number that requires grad. "
                f"Found {found}."
            )
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
        expected = _oracle_votes(compute_loss, batch, codes, agreement, parameters, seed, tolerance)
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(seed)
        compute_loss(batch).backward()  # type: ignore[no-untyped-call]
        lines = []
        for i, (name, parameter) in enumerate(named):
            if parameter.grad is None and tallies[i] is None:
                continue
            # Normalized environment by environment, the gradient is not that of the plain model.
            gradient = None if agreement.batchnorm == "per_environment" else parameter.grad
            line = _difference(tallies[i], gradient, expected[i])
            if line:
                used = ", ".join(sorted(consumers[i])) or "nothing that was seen"
                lines.append(f"`{name}`, consumed by {used}: {line}")
        return lines


@dataclass
class _Expected:
    """What the oracle finds for one parameter.

    Attributes:
        votes: The sum of signs.
        slack: How far other votes may be from these: an environment's component that is as good as
            zero may have either sign.
        scale: The largest component of an environment's gradient.
    """

    votes: Tensor
    slack: Tensor
    scale: float = 0.0


def _is_exact(parameter: Tensor) -> bool:
    return parameter.dtype == torch.float64


def _oracle_votes(
    compute_loss: Callable[[Any], Tensor],
    batch: Any,
    codes: Tensor,
    agreement: Agreement,
    parameters: list[Tensor],
    seed: int,
    tolerance: float | None,
) -> list[_Expected]:
    """Return what a backward pass per environment finds."""
    expected = [_Expected(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    wanted = [(p, found) for p, found in zip(parameters, expected, strict=True) if p.requires_grad]
    for e in range(int(codes.max()) + 1):
        index = (codes == e).nonzero().squeeze(1)
        torch.manual_seed(seed)
        loss = compute_loss(rows_of(batch, index, agreement.batch_dim))
        gradients = torch.autograd.grad(loss, [p for p, _ in wanted], allow_unused=True)
        for (parameter, found), gradient in zip(wanted, gradients, strict=True):
            if gradient is None or not gradient.numel():
                continue
            band = tolerance
            if band is None:
                band = 1e-9 if _is_exact(parameter) else 1e-4
            largest = float(gradient.abs().max())
            found.scale = max(found.scale, largest)
            found.votes += gradient.sign()
            small = gradient.abs() <= band * largest
            found.slack += small.to(gradient.dtype) * (1 + gradient.sign().abs())
    return expected


def _difference(tally: Tally | None, gradient: Tensor | None, expected: _Expected) -> str | None:
    if tally is None:
        return "it has a gradient, and no environment voted"
    if gradient is not None and gradient.numel():
        # An environment's components, as those of the sum may cancel out.
        scale = max(expected.scale, float(gradient.abs().max()), 1e-300)
        error = float((tally.gradient - gradient).abs().max()) / scale
        if not error <= (1e-9 if _is_exact(gradient) else 1e-3):
            return f"its gradient is off by {error:.1e} of the largest component"
    wrong = (tally.get(Statistic.VOTES) - expected.votes).abs() > expected.slack
    if bool(wrong.any()):
        share = float(wrong.double().mean())
        return f"votes differ on {share:.1%} of its weights"
    return None
