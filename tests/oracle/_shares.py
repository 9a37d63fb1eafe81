"""Each environment's share of the gradient, by one forward and backward per environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Build = Callable[[], nn.Module]
RowLosses = Callable[..., Tensor]
"""Maps a model and a batch to one loss per row."""


@dataclass(frozen=True)
class Oracle:
    """What the environments of one batch say, parameter by parameter.

    Attributes:
        shares: `[environments, *shape]` for each parameter that the loss reaches.
        gradient: Their sum, and the share of the rows of unknown environment.
        loss: The user's loss.
    """

    shares: dict[str, Tensor]
    gradient: dict[str, Tensor]
    loss: Tensor

    @property
    def voters(self) -> int:
        return len(next(iter(self.shares.values())))

    @property
    def scale(self) -> float:
        return max(
            float(share.abs().max()) if share.numel() else 0.0 for share in self.shares.values()
        )

    def votes(self, name: str) -> Tensor:
        return self.shares[name].sign().sum(0)

    def turnout(self, name: str) -> Tensor:
        return self.shares[name].ne(0).double().sum(0)

    def logs(self, name: str) -> Tensor:
        return torch.log(self.shares[name].abs() + 1e-10).sum(0)

    def squares(self, name: str) -> Tensor:
        return self.shares[name].square().sum(0)


def wavy(output: Tensor) -> Tensor:
    """One loss per row: curved, and different for each component of the output."""
    flat = output.flatten(1)
    weights = torch.cos(1.0 + torch.arange(flat.shape[1], dtype=flat.dtype, device=flat.device))
    return (flat * weights).sum(1) + 0.5 * flat.square().mean(1)


def groups_of(env: Any, rows: int) -> tuple[list[Tensor], Tensor]:
    """Return the rows of each environment, and the rows whose environment is unknown."""
    labels = list(range(rows)) if env is None else list(env)
    if len(labels) != rows:
        raise ValueError(f"{len(labels)} labels for {rows} rows.")
    found: dict[Any, list[int]] = {}
    for row, label in enumerate(labels):
        key = label if isinstance(label, str) else int(label)
        found.setdefault(key, []).append(row)
    unknown = found.pop(-1, [])
    return [torch.tensor(found[key]) for key in found], torch.tensor(unknown, dtype=torch.long)


def row_weights(reduction: str, env: Any, rows: int) -> Tensor:
    """Return w such that the user's loss is the sum over rows of w times the row's loss."""
    if reduction == "sum":
        return torch.ones(rows, dtype=torch.float64)
    if reduction == "mean":
        return torch.full((rows,), 1.0 / rows, dtype=torch.float64)
    if reduction == "uneven":
        return 0.5 + (2**0.5 * torch.arange(rows, dtype=torch.float64)) % 1
    if reduction == "environment_mean":
        groups, _ = groups_of(env, rows)
        weights = torch.zeros(rows, dtype=torch.float64)
        for group in groups:
            weights[group] = 1.0 / (len(groups) * len(group))
        return weights
    raise ValueError(reduction)


def rows_in(batch: Sequence[Any], dims: Sequence[int | None] | None) -> int:
    dims = dims or [0] * len(batch)
    return next(x.shape[d] for x, d in zip(batch, dims, strict=True) if d is not None)


def take(batch: Sequence[Any], rows: Tensor, dims: Sequence[int | None] | None) -> tuple[Any, ...]:
    """Select rows of every tensor of a batch; `dims` says where they lie (None: shared)."""
    dims = dims or [0] * len(batch)
    return tuple(
        x if d is None else x.index_select(d, rows) for x, d in zip(batch, dims, strict=True)
    )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _collect(per_group: list[dict[str, Tensor | None]], known: int, shapes: dict[str, Any]) -> Any:
    shares, gradient = {}, {}
    for name, shape in shapes.items():
        found = [grads[name] for grads in per_group]
        if all(g is None for g in found):
            continue
        dense = [torch.zeros(shape, dtype=torch.float64) if g is None else g for g in found]
        dense = [g.to_dense() if g.is_sparse else g for g in dense]
        shares[name] = torch.stack(dense[:known])
        gradient[name] = torch.stack(dense).sum(0)
    return shares, gradient


def _shapes(model: nn.Module) -> dict[str, Any]:
    return {name: p.shape for name, p in trainable(model).items()}


def shares_alone(
    build: Build,
    row_losses: RowLosses,
    batch: Sequence[Any],
    env: Any = None,
    *,
    reduction: str = "mean",
    dims: Sequence[int | None] | None = None,
) -> Oracle:
    """One forward and backward per environment, on the rows of that environment only."""
    rows = rows_in(batch, dims)
    weights = row_weights(reduction, env, rows)
    groups, unknown = groups_of(env, rows)
    every = [*groups, unknown] if len(unknown) else groups
    per_group: list[dict[str, Tensor | None]] = []
    total = torch.zeros((), dtype=torch.float64)
    for group in every:
        model = build()
        parameters = trainable(model)
        losses = row_losses(model, *take(batch, group, dims))
        assert losses.shape == group.shape, f"one loss a row, not {tuple(losses.shape)}"
        loss = (losses * weights[group]).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        per_group.append(dict(zip(parameters, grads, strict=True)))
        total += loss.detach()
    shares, gradient = _collect(per_group, len(groups), _shapes(build()))
    return Oracle(shares, gradient, total)


def shares_of_a_joint_graph(
    build: Build,
    row_losses: RowLosses,
    batch: Sequence[Any],
    env: Any = None,
    *,
    reduction: str = "mean",
    dims: Sequence[int | None] | None = None,
) -> Oracle:
    """One forward for all rows, then one backward per environment's loss."""
    rows = rows_in(batch, dims)
    weights = row_weights(reduction, env, rows)
    groups, unknown = groups_of(env, rows)
    model = build()
    parameters = trainable(model)
    losses = row_losses(model, *batch) * weights
    per_group: list[dict[str, Tensor | None]] = []
    for group in [*groups, unknown] if len(unknown) else groups:
        grads = torch.autograd.grad(
            losses[group].sum(), list(parameters.values()), allow_unused=True, retain_graph=True
        )
        per_group.append(dict(zip(parameters, grads, strict=True)))
    shares, gradient = _collect(per_group, len(groups), _shapes(model))
    return Oracle(shares, gradient, losses.sum().detach())


def shares_of_uses(
    build: Build,
    row_losses: RowLosses,
    batch: Sequence[Any],
    env: Any = None,
    *,
    reduction: str = "mean",
    dims: Sequence[int | None] | None = None,
) -> Oracle:
    """One joint forward and backward in which each environment has parameters of its own.

    Every module that owns parameters runs once per environment on *all* rows, with that
    environment's copy of its parameters, and row i of the result comes from the copy of row
    i's environment. The copies are equal, so no value changes and rows stay coupled as they
    are; the gradient of a copy is what flows through the rows of its environment.
    """
    rows = rows_in(batch, dims)
    weights = row_weights(reduction, env, rows)
    groups, unknown = groups_of(env, rows)
    every = [*groups, unknown] if len(unknown) else groups
    owner = torch.empty(rows, dtype=torch.long)
    for number, group in enumerate(every):
        owner[group] = number
    model = build()
    copies = [
        {name: p.detach().clone().requires_grad_() for name, p in trainable(model).items()}
        for _ in every
    ]

    def split_by_owner(prefix: str, module: nn.Module) -> None:
        own = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        if not own:
            return
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            module.forward = original  # functional_call goes through forward again
            try:
                results = [
                    functional_call(module, {n: copy[prefix + n] for n in own}, args, kwargs)
                    for copy in copies
                ]
            finally:
                module.forward = forward
            repeats, rest = divmod(len(results[0]), rows)
            assert rest == 0, "the result's first dimension has to be the batch"
            of = owner.repeat_interleave(repeats)
            return torch.stack(results)[of, torch.arange(len(of))]

        module.forward = forward

    for name, module in list(model.named_modules()):
        split_by_owner(name + "." if name else "", module)
    loss = (row_losses(model, *batch) * weights).sum()
    per_group: list[dict[str, Tensor | None]] = []
    for copy in copies:
        grads = torch.autograd.grad(loss, list(copy.values()), allow_unused=True, retain_graph=True)
        per_group.append(dict(zip(copy, grads, strict=True)))
    shares, gradient = _collect(per_group, len(groups), _shapes(model))
    return Oracle(shares, gradient, loss.detach())
