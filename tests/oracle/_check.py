"""Compare what an agreement counted with what the oracle found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from consilience import Agreement
from consilience.rules import Rule, Tally
from oracle._record import Record
from oracle._shares import (
    Build,
    Oracle,
    RowLosses,
    groups_of,
    row_weights,
    rows_in,
    shares_alone,
    shares_of_a_joint_graph,
    shares_of_uses,
    wavy,
)

BAND = 1e-12
"""Shares below this times the model's largest are too close to zero to have a sign."""

GRADIENT = 1e-10
"""How far gradients may lie apart, relative to the parameter's largest share (and `NOISE`)."""

NOISE = 2e-14
"""Rounding error of a share, relative to the model's largest."""

SINGLE = 1e6
"""How much coarser all three are where gradients pass through float32."""

ORACLES = {
    "alone": shares_alone,
    "joint": shares_of_a_joint_graph,
    "uses": shares_of_uses,
}


@dataclass(frozen=True)
class Found:
    """What one observed step of an agreement left behind."""

    tallies: dict[str, Tally]
    gradients: dict[str, Tensor]
    loss: Tensor
    inputs: list[Tensor | None]
    report: Any


def make_agreement(model: Any, rule: Rule, environments: int, **options: Any) -> Agreement:
    """Return an agreement that accepts a single environment when there is but one."""
    if environments == 1:
        options.setdefault("allow_single", True)
    return Agreement(model, rule, **options)


def _with_gradients(batch: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        x.detach().clone().requires_grad_()
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for x in batch
    )


def _default_losses(model: nn.Module, *batch: Any) -> Tensor:
    return wavy(model(*batch))


def observe_once(
    build: Build,
    row_losses: RowLosses,
    batch: Sequence[Any],
    env: Any = None,
    *,
    reduction: str = "mean",
    dims: Sequence[int | None] | None = None,
    observe: dict[str, Any] | None = None,
    **agreement_options: Any,
) -> Found:
    """Observe one batch, call backward, apply, and return all that can be seen from outside."""
    rows = rows_in(batch, dims)
    known, _ = groups_of(env, rows)
    weights = row_weights(reduction, env, rows)
    model, record = build(), Record()
    agreement = make_agreement(model, record, len(known), **agreement_options)
    batch = _with_gradients(batch)
    with agreement.observe(env, **(observe or {})):
        losses = row_losses(model, *batch)
        loss = (losses * weights.to(losses.dtype)).sum()
    loss.backward()
    gradients = {
        n: (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    report = agreement.apply()
    inputs = [x.grad if isinstance(x, Tensor) else None for x in batch]
    return Found(record.of(model), gradients, loss.detach(), inputs, report)


def _plain(
    build: Build, row_losses: RowLosses, batch: Sequence[Any], weights: Tensor
) -> tuple[dict[str, Tensor], Tensor, list[Tensor | None]]:
    model = build()
    batch = _with_gradients(batch)
    loss = (row_losses(model, *batch) * weights).sum()
    loss.backward()
    gradients = {
        n: p.grad.to_dense() if p.grad.is_sparse else p.grad
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return gradients, loss.detach(), [x.grad if isinstance(x, Tensor) else None for x in batch]


def _close(
    what: str, found: Tensor, expected: Tensor, tolerance: float, problems: list[str]
) -> None:
    if found.shape != expected.shape:
        problems.append(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        return
    error = (found.double() - expected.double()).abs()
    if not bool((error <= tolerance).all()):
        problems.append(f"{what}: off by {float(error.max()):.3g}, more than {tolerance:.3g}")


def compare(
    tallies: dict[str, Tally],
    oracle: Oracle,
    *,
    strict_zeros: bool = True,
    coarser: float = 1.0,
) -> list[str]:
    """Return in what the tallies differ from the oracle's; empty where they are equal.

    Votes and turnout are equal exactly, except that an environment whose share lies within
    `BAND` of zero (but, with `strict_zeros`, is not zero) may vote either way or not at all.
    """
    problems: list[str] = []
    names = {name for name, share in oracle.shares.items() if share[0].numel()}
    if tallies.keys() != names:
        problems.append(
            f"voted on {sorted(tallies.keys() - names)} which the loss does not reach; "
            f"did not vote on {sorted(names - tallies.keys())}"
        )
    band, noise = coarser * BAND * oracle.scale, coarser * NOISE * oracle.scale
    for name in sorted(names & tallies.keys()):
        tally, shares = tallies[name], oracle.shares[name]
        size = shares.abs()
        own = max(float(size.max()), float(oracle.gradient[name].abs().max()))
        tolerance = coarser * GRADIENT * own + noise
        _close(f"{name}: gradient", tally.gradient, oracle.gradient[name], tolerance, problems)
        if tally.voters != oracle.voters:
            problems.append(f"{name}: {tally.voters} voters, not {oracle.voters}")
        doubtful = size < band
        if strict_zeros:
            doubtful &= size > 0
        slack = doubtful.double().sum(0)
        clear = torch.where(doubtful, 0.0, shares)
        assert tally.votes is not None
        assert tally.turnout is not None
        assert tally.logs is not None
        assert tally.squares is not None
        for what, found, expected in (
            ("votes", tally.votes, clear.sign().sum(0)),
            ("turnout", tally.turnout, clear.ne(0).double().sum(0)),
        ):
            wrong = ~((found.double() - expected).abs() <= slack)
            if bool(wrong.any()):
                at = wrong.nonzero()[0].tolist()
                problems.append(
                    f"{name}: {what} wrong in {int(wrong.sum())} of {wrong.numel()}; at {at} "
                    f"{float(found[tuple(at)])}, not {float(expected[tuple(at)])}, of shares "
                    f"{shares[(slice(None), *at)].tolist()[:8]}"
                )
        logs_slack = (noise / (size + 1e-10)).sum(0) + 1e-10 * len(shares)
        error = (tally.logs.double() - oracle.logs(name)).abs()
        if not bool((error <= logs_slack).all()):
            problems.append(f"{name}: logs off by {float((error - logs_slack).max()):.3g}")
        squares = oracle.squares(name)
        tolerance = coarser * GRADIENT * float(squares.max()) + noise**2
        _close(f"{name}: squares", tally.squares, squares, tolerance, problems)
    return problems


def check(
    build_model: Build,
    make_batch: Callable[[int, torch.Generator], Sequence[Any]],
    env: Any = None,
    *,
    rows: int | None = None,
    loss: RowLosses = _default_losses,
    reduction: str = "mean",
    dims: Sequence[int | None] | None = None,
    oracle: str = "alone",
    same_forward: bool = True,
    strict_zeros: bool = True,
    coarser: float = 1.0,
    seed: int = 0,
    observe: dict[str, Any] | None = None,
    **agreement_options: Any,
) -> Found:
    """Hold one observed step of an agreement against the oracle; raise AssertionError.

    Args:
        build_model: Returns the model, in float64 when it is done. Called anew each time,
            under the same seed.
        make_batch: Given the number of rows and a generator, returns the model's inputs.
        env: As `Agreement.observe` takes it.
        rows: How many rows there are; by default, as many as `env` has labels.
        loss: Maps model and batch to one loss per row.
        reduction: How the user's loss weighs rows: mean, sum, uneven or environment_mean.
        dims: Where the rows of each input lie, when it is not dimension 0.
        oracle: alone, joint or uses (tests/oracle/_shares.py).
        same_forward: Whether observing should leave the loss and the inputs' gradients as
            they are (not so where batch norm normalises each environment by itself).
        strict_zeros: Whether a share that the oracle finds to be zero has to be found zero.
        coarser: By how much to widen the tolerances; `SINGLE` where float32 is involved.
        seed: For model and batch.
        observe: Keyword arguments of `Agreement.observe`.
        **agreement_options: Keyword arguments of `Agreement`.
    """
    rows = len(env) if rows is None else rows

    def build() -> nn.Module:
        torch.manual_seed(seed)
        return build_model().double()

    batch = tuple(make_batch(rows, torch.Generator().manual_seed(seed + 1)))
    truth = ORACLES[oracle](build, loss, batch, env, reduction=reduction, dims=dims)
    found = observe_once(
        build,
        loss,
        batch,
        env,
        reduction=reduction,
        dims=dims,
        observe=observe,
        **agreement_options,
    )
    problems = compare(found.tallies, truth, strict_zeros=strict_zeros, coarser=coarser)
    weights = row_weights(reduction, env, rows)
    if same_forward:
        gradients, value, inputs = _plain(build, loss, batch, weights)
    else:
        gradients, value, inputs = truth.gradient, truth.loss, [None] * len(batch)
    tolerance = coarser * GRADIENT * max(1.0, float(value.abs()))
    _close("the loss", found.loss, value, tolerance, problems)
    for name in sorted(gradients.keys() | found.gradients.keys()):
        if name not in gradients or name not in found.gradients:
            problems.append(f"{name}: a gradient with the agreement or without, not both")
            continue
        grad = gradients[name]
        size = float(truth.shares[name].abs().max()) if grad.numel() else 0.0
        tolerance = coarser * (GRADIENT * size + NOISE * truth.scale)
        # Conservation: the shares of all environments sum to the ordinary gradient.
        _close(f"{name}: the oracle's own sum", truth.gradient[name], grad, tolerance, problems)
        _close(f"{name}: p.grad", found.gradients[name], grad, tolerance, problems)
    for number, (mine, theirs) in enumerate(zip(found.inputs, inputs, strict=True)):
        if mine is not None and theirs is not None:
            # A gradient that is nothing but rounding error (attention to one key) has no digits.
            tolerance = GRADIENT * float(theirs.abs().max()) + NOISE * truth.scale
            _close(f"input {number}: gradient", mine, theirs, tolerance, problems)
    assert not problems, "\n".join(["The agreement differs from the oracle:", *problems])
    return found
