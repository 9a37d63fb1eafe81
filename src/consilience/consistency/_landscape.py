"""The losses of all environments as functions of one flat vector of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["EnvironmentLoss", "Landscape", "Parameters", "environment_losses"]

Parameters = Tensor | nn.Module | Mapping[str, Tensor]
"""What losses can be functions of: a tensor, a module, or named tensors."""


class EnvironmentLoss:
    """The mean loss of a module over the rows of one environment; see `environment_losses`.

    Call it with a module to get the loss as a differentiable scalar.
    """

    def __init__(self, criterion: Callable[[Any, Any], Tensor], batches: Any) -> None:
        self.criterion = criterion
        self._batches = batches
        rows = [len(targets) for _, targets in self._pairs()]
        if sum(rows) == 0:
            raise ValueError("Parameter `environments` should hold rows. Found an empty one.")
        self.rows = sum(rows)

    def __call__(self, model: nn.Module) -> Tensor:
        """Return the mean loss over all rows."""
        total: Tensor | None = None
        for share, output, targets in self.outputs(model):
            term = share * self.criterion(output, targets)
            total = term if total is None else total + term
        assert total is not None  # noqa: S101 - there are rows
        return total

    def outputs(self, model: nn.Module) -> Iterator[tuple[float, Any, Any]]:
        """Yield, batch by batch, its share of the rows, the model's output and the targets."""
        if not isinstance(model, nn.Module):
            raise TypeError(
                "Losses made by `environment_losses` are functions of a module; give the module as "
                f"`parameters`. Found `{type(model).__name__}`."
            )
        device = next(model.parameters()).device
        for batch in self._pairs():
            inputs, targets = _to(batch, device)
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            elif isinstance(inputs, tuple):
                output = model(*inputs)
            else:
                output = model(inputs)
            yield len(targets) / self.rows, output, targets

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        if isinstance(self._batches, tuple):
            yield self._batches
        else:
            yield from self._batches

    def __repr__(self) -> str:
        return f"EnvironmentLoss({getattr(self.criterion, '__name__', self.criterion)!s}, {self.rows} rows)"  # noqa: E501


def environment_losses(
    criterion: Callable[[Any, Any], Tensor], environments: Iterable[Any]
) -> list[EnvironmentLoss]:
    """Make one loss per environment out of data or loaders.

    Args:
        criterion: A function of the model's output and the targets, that is a *mean* over rows,
            such as `torch.nn.functional.cross_entropy`.
        environments: One entry per environment, in a list or by name: a tuple ``(inputs,
            targets)``, or anything that yields such pairs anew each time it is iterated, such as a
            `DataLoader`. Inputs that are themselves a tuple or a mapping become the model's
            arguments.

    Returns:
        One function of the model per environment, for :func:`inconsistency`. Beyond what a
        function of one's own can do, they work through their loader batch by batch, with one
        batch's graph in memory, and know the model's output, which Gauss-Newton needs.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> data = [(torch.ones(3, 2), torch.ones(3, 1)), (torch.zeros(5, 2), torch.zeros(5, 1))]
        >>> losses = environment_losses(torch.nn.functional.mse_loss, data)
        >>> losses[1].rows, torch.equal(losses[1](model), model.bias.square().squeeze())
        (5, True)
    """
    if (reduction := getattr(criterion, "reduction", "mean")) != "mean":
        raise ValueError(
            "Parameter `criterion` should be a mean over rows. "
            f"Found `criterion.reduction = {reduction!r}`."
        )
    if isinstance(environments, Mapping):  # loaders by name
        environments = environments.values()
    environments = list(environments)
    if not environments:
        raise ValueError("Parameter `environments` should have an entry or more. Found none.")
    for e, batches in enumerate(environments):
        if isinstance(batches, tuple):
            if len(batches) != 2:
                raise ValueError(
                    "Parameter `environments` should have pairs (inputs, targets) as its tuples. "
                    f"Found a tuple of {len(batches)} as environment {e}. Batches in sequence go "
                    "into a list."
                )
        elif not hasattr(batches, "__iter__") or iter(batches) is batches:
            raise TypeError(
                "Parameter `environments` should have pairs (inputs, targets), or loaders that can "
                f"be iterated again and again. Found {type(batches).__name__} as environment {e}."
            )
    return [EnvironmentLoss(criterion, batches) for batches in environments]


class _Holder(nn.Module):
    """A module whose call runs a function of another module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], Any]) -> Any:
        return compute(self.model)


class Landscape:
    """Every environment's loss, gradient and curvature as functions of one flat vector.

    Args:
        losses: One callable per environment.
        parameters: What they are functions of. Of a module, the parameters that require a
            gradient vary; all else, and its buffers, stay what they are.

    Attributes:
        origin: The parameters as they are, flattened: theta*.
        environments: How many losses there are.
    """

    def __init__(self, losses: Sequence[Callable[[Any], Tensor]], parameters: Parameters) -> None:
        self._losses = list(losses) if isinstance(losses, Iterable) else []
        if len(self._losses) == 0 or not all(callable(loss) for loss in self._losses):
            raise TypeError(
                "Parameter `losses` should be callables of the parameters, one per environment. "
                f"Found `losses = {losses!r}`."
            )
        self.environments = len(self._losses)
        self._holder: _Holder | None = None
        self._buffers: dict[str, Tensor] = {}
        self._whole: torch.Size | None = None
        if isinstance(parameters, Tensor):
            self._whole = parameters.shape
            named = {"": parameters}
        elif isinstance(parameters, nn.Module):
            self._holder = _Holder(parameters)
            named = {n: p for n, p in self._holder.named_parameters() if p.requires_grad}
            self._buffers = dict(self._holder.named_buffers())
        elif isinstance(parameters, Mapping):
            named = dict(parameters)
        else:
            raise TypeError(
                "Parameter `parameters` should be a tensor, a module or a mapping from names to "
                f"tensors. Found `{type(parameters).__name__}`."
            )
        self._layout = {name: (p.shape, p.dtype) for name, p in named.items()}
        self.origin = _flatten(named)

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return self.origin.numel()

    def unflatten(self, point: Tensor) -> Any:
        """Return a flat vector as what the losses are functions of (of a module, a mapping)."""
        named = self._named(point)
        if self._whole is not None:
            return named[""]
        if self._holder is not None:
            return {name.removeprefix("model."): piece for name, piece in named.items()}
        return named

    def loss(self, e: int, point: Tensor) -> Tensor:
        """Return the loss of environment ``e``, with its graph."""
        total: Tensor | None = None
        for part in self._parts(e, point):
            total = part if total is None else total + part
        assert total is not None  # noqa: S101
        return total

    def value(self, e: int, point: Tensor) -> float:
        """Return the loss of environment ``e``."""
        with torch.no_grad():
            return float(self.loss(e, point))

    def values(self, e: int, points: Tensor) -> Tensor:
        """Return the loss of environment ``e`` at points stacked as ``[points, n]``.

        All at once where the loss can be vectorized, one after the other where it cannot.
        """
        with torch.no_grad():
            try:
                return torch.vmap(lambda point: self.loss(e, point), chunk_size=4096)(points)
            except RuntimeError:
                return torch.stack([self.loss(e, point) for point in points])

    def value_and_gradient(self, e: int, point: Tensor) -> tuple[float, Tensor]:
        """Return the loss of environment ``e`` and its gradient."""
        point = point.detach().requires_grad_()
        value, gradient = 0.0, torch.zeros_like(point)
        for part in self._parts(e, point):
            value += float(part.detach())
            if part.requires_grad:
                (found,) = torch.autograd.grad(part, point, allow_unused=True)
                if found is not None:
                    gradient += found
        return value, gradient

    def hessian_product(self, e: int, point: Tensor, vector: Tensor) -> Tensor:
        """Return the product of environment ``e``'s Hessian with a vector."""
        point = point.detach().requires_grad_()
        product = torch.zeros_like(point)
        for part in self._parts(e, point):
            (gradient,) = torch.autograd.grad(part, point, create_graph=True, allow_unused=True)
            if gradient is not None and gradient.requires_grad:
                (found,) = torch.autograd.grad(gradient, point, vector, allow_unused=True)
                if found is not None:
                    product += found
        return product

    def gauss_newton_product(self, e: int, point: Tensor, vector: Tensor) -> Tensor:
        r"""Return :math:`J^\top \nabla^2 \ell J v`, with J the Jacobian of the model's output."""
        product = torch.zeros_like(vector)
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            for value, top, output in self._tops(e, leaf):
                # J v by differentiating J' u, which is linear in u, once more.
                dual = torch.zeros_like(output, requires_grad=True)
                (pulled,) = torch.autograd.grad(output, leaf, dual, create_graph=True)
                (pushed,) = torch.autograd.grad(pulled, dual, vector, retain_graph=True)
                (slope,) = torch.autograd.grad(value, top, create_graph=True)
                curved = _pull(slope, top, pushed)
                (found,) = torch.autograd.grad(output, leaf, curved)
                product += found
        return product

    def gauss_newton_rows(self, e: int, point: Tensor) -> Tensor:
        r"""Return a matrix F with :math:`J^\top \nabla^2 \ell J = F^\top F`.

        One backward pass for each row of F; few rows of data make few of them.
        """
        rows = []
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            for value, top, output in self._tops(e, leaf):
                (slope,) = torch.autograd.grad(value, top, create_graph=True)
                eye = torch.eye(top.numel()).to(top)
                curvature = torch.stack(
                    [_pull(slope, top, row.view_as(top)).flatten() for row in eye]
                ).double()
                values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
                # Where a softmax is saturated its curvature is a difference of numbers near 1.
                noise = 1e3 * float(values.abs().amax()) + 10 / len(values)
                rounding = torch.finfo(output.dtype).eps * noise
                if float(values[0]) < -rounding:
                    raise ValueError(
                        "Gauss-Newton needs a criterion that is convex in the model's output. "
                        f"Found the curvature {float(values[0]):.3g} in environment {e}; take "
                        "`curvature='hessian'`."
                    )
                curved = values > torch.finfo(output.dtype).eps * values[-1]
                roots = (vectors[:, curved] * values[curved].sqrt()).T.to(output)
                rows += [
                    torch.autograd.grad(output, leaf, root.view_as(output), retain_graph=True)[0]
                    for root in roots
                ]
        return torch.stack(rows) if rows else point.new_zeros(0, self.size)

    def output_sizes(self) -> list[list[int]] | None:
        """Return how many numbers the model puts out, batch by batch, for each environment.

        None where losses are not of that kind.
        """
        try:
            with torch.no_grad():
                return [
                    [output.numel() for _, _, output in self._tops(e, self.origin)]
                    for e in range(self.environments)
                ]
        except TypeError:
            return None

    def _tops(self, e: int, point: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield, batch by batch, the loss as a function of a leaf, that leaf, and the output."""
        loss = self._losses[e]
        if not (isinstance(loss, EnvironmentLoss) and self._holder is not None):
            raise TypeError(
                "Gauss-Newton products need to know the model's output: make the losses with "
                "`environment_losses` and give the module as `parameters`, or take "
                "`curvature='hessian'`."
            )
        for share, output, targets in self._call(loss.outputs, point):
            if not isinstance(output, Tensor):
                raise TypeError(
                    "Gauss-Newton products need a model whose output is one tensor. Found "
                    f"`{type(output).__name__}`; take `curvature='hessian'`."
                )
            top = output.detach().requires_grad_()
            yield share * loss.criterion(top, targets), top, output

    def hessian(self, e: int, point: Tensor) -> Tensor:
        """Return the whole Hessian of environment ``e``."""
        columns = [self.hessian_product(e, point, row) for row in torch.eye(self.size).to(point)]
        hessian = torch.stack(columns)
        return (hessian + hessian.mT) / 2

    def _parts(self, e: int, point: Tensor) -> Iterator[Tensor]:
        """Yield scalars that sum to the loss of environment ``e``."""
        loss = self._losses[e]
        if isinstance(loss, EnvironmentLoss) and self._holder is not None:
            for share, output, targets in self._call(loss.outputs, point):
                yield share * loss.criterion(output, targets)
        elif self._holder is not None:
            yield from self._call(lambda model: iter([loss(model)]), point)
        else:
            yield loss(self.unflatten(point))

    def _call(self, compute: Callable[[nn.Module], Iterator[Any]], point: Tensor) -> Iterator[Any]:
        """Run a generator function of the module as if its parameters were ``point``.

        The module has its own parameters back between any two items.
        """
        assert self._holder is not None  # noqa: S101
        state = self._named(point)
        # Buffers are handed in as copies: a batch norm in train mode writes to them.
        state |= {name: buffer.clone() for name, buffer in self._buffers.items()}
        items: Iterator[Any] | None = None

        def following(model: nn.Module) -> Any:
            nonlocal items
            if items is None:
                items = compute(model)
            return next(items, _END)

        while (item := functional_call(self._holder, state, (following,))) is not _END:
            yield item

    def _named(self, point: Tensor) -> dict[str, Tensor]:
        """Cut a flat vector into the tensors that it is made of."""
        pieces = torch.split(point, [math.prod(shape) for shape, _ in self._layout.values()])
        return {
            name: piece.view(shape).to(dtype)
            for (name, (shape, dtype)), piece in zip(self._layout.items(), pieces, strict=True)
        }


_END = object()


def _flatten(named: Mapping[str, Tensor]) -> Tensor:
    if not named or sum(p.numel() for p in named.values()) == 0:
        raise ValueError(
            "Parameter `parameters` should have at least one number that can vary. Found none; in "
            "a module, only parameters that require a gradient vary."
        )
    for name, p in named.items():
        label = f"`{name}`" if name else "`parameters`"
        if not p.is_floating_point():
            raise TypeError(f"Parameters should be floating point. Found {label} of {p.dtype}.")
        if not p.isfinite().all():
            raise ValueError(f"Parameters should be finite. Found NaN or infinity in {label}.")
    if len({p.device for p in named.values()}) > 1:
        devices = sorted({str(p.device) for p in named.values()})
        raise ValueError(f"Parameters should live on one device. Found them on {devices}.")
    dtype = max((p.dtype for p in named.values()), key=lambda dtype: dtype.itemsize)
    return torch.cat([p.detach().reshape(-1).to(dtype) for p in named.values()])


def _pull(slope: Tensor, top: Tensor, vector: Tensor) -> Tensor:
    """Return the second derivative that `slope` is the first of, times a vector."""
    if not slope.requires_grad:  # the criterion is linear in the output
        return torch.zeros_like(top)
    (found,) = torch.autograd.grad(slope, top, vector, retain_graph=True, allow_unused=True)
    return torch.zeros_like(top) if found is None else found


def _to(item: Any, device: torch.device) -> Any:
    """Move tensors in tuples and mappings to a device."""
    if isinstance(item, Tensor):
        return item.to(device)
    if isinstance(item, tuple):
        return tuple(_to(entry, device) for entry in item)
    if isinstance(item, Mapping):
        return {key: _to(entry, device) for key, entry in item.items()}
    return item
