"""How a tensor that an operation consumes came from parameters.

A source is a small expression: a parameter, or a function of sources. It can be evaluated on
other tensors in the parameters' place, which serves two ends:

- a *view* of a parameter (``w.t()``, ``w[:n]``), evaluated on the parameter's accumulators, is
  the part of them that the votes on the view belong to;
- anything else (``exp(w)``, weight norm), evaluated on detached copies of its parameters, is what
  an environment's gradient is pulled back through, before its sign is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from consilience.observation.errors import ObservationError


@dataclass(frozen=True, eq=False)
class Call:
    """A function call whose arguments hold sources in the place of tracked tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Source:
    """Where a tracked tensor came from.

    Attributes:
        roots: The indices of the parameters that it was computed from.
        call: What computed it; None where it is a parameter itself.
        output: Which output of the call it is; None where the call has a single one.
        view: Whether each of its components is a component of one parameter, and no two are the
            same one.
        same: The source of the same components in the same order, where the call changes nothing
            but memory or precision (a cast, a copy).
        base: The source that was repeated along dimensions of size one, where the call does that.
    """

    roots: tuple[int, ...]
    call: Call | None = None
    output: int | None = None
    view: bool = True
    same: Source | None = None
    base: Source | None = None

    @property
    def root(self) -> bool:
        """Whether it is a parameter itself."""
        return self.call is None

    def settled(self) -> Source:
        """Return the source of the same components, without casts and copies."""
        source = self
        while source.same is not None:
            source = source.same
        return source

    def evaluate(
        self,
        leaves: Mapping[int, Tensor],
        *,
        casts: bool = True,
        memo: dict[int, Any] | None = None,
    ) -> Tensor:
        """Compute it from other tensors in the parameters' place."""
        if self.call is None:
            return leaves[self.roots[0]]
        if self.same is not None and not casts:
            return self.same.evaluate(leaves, casts=casts, memo=memo)
        memo = {} if memo is None else memo
        if id(self.call) not in memo:

            def fill(value: Any) -> Any:
                if isinstance(value, Source):
                    return value.evaluate(leaves, casts=casts, memo=memo)
                if type(value) in (list, tuple):
                    return type(value)(fill(item) for item in value)
                return value

            kwargs = {name: fill(value) for name, value in self.call.kwargs.items()}
            memo[id(self.call)] = self.call.func(*fill(self.call.args), **kwargs)
        made = memo[id(self.call)]
        found: Tensor = made if self.output is None else made[self.output]
        return found


class Pullback:
    """The way back from a derived tensor's gradient to its parameters' gradients."""

    def __init__(self, source: Source, value: Tensor, parameters: list[Tensor], name: str):
        with torch.enable_grad():
            self._leaves = {
                root: parameters[root].detach().requires_grad_() for root in source.roots
            }
            self._value = source.evaluate(self._leaves)
        if not torch.equal(self._value.detach(), value.detach()):
            raise ObservationError(
                f"The tensor that `{name}` consumes was computed from a parameter in a way that "
                "does not repeat: with random numbers (dropout on a weight), or from a buffer that "
                "has changed since. Keep randomness and updates away from weights, or use "
                "`agreement.backward(environment_losses)`."
            )

    def __call__(self, gradient: Tensor) -> dict[int, Tensor]:
        """Return each parameter's gradient."""
        roots = list(self._leaves)
        found = torch.autograd.grad(
            self._value,
            [self._leaves[root] for root in roots],
            gradient.to(self._value.dtype),
            retain_graph=True,
            allow_unused=True,
        )
        return {r: g for r, g in zip(roots, found, strict=True) if g is not None}
