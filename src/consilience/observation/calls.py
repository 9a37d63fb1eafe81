"""What an operator is given, and what it answers; and the registry of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consilience.observation.environments import Partition
from consilience.observation.layout import Layout, Scattered
from consilience.observation.uses import SharesOf

if TYPE_CHECKING:
    from consilience.observation.mode import ObservingMode
    from consilience.observation.sources import Source


class Call:
    """A function call that consumes tracked tensors together with rows of data."""

    def __init__(
        self,
        mode: ObservingMode,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: Sequence[tuple[Tensor, Source]],
    ):
        self.mode = mode
        self.func = func
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.arguments = [tensor for tensor, _ in weights]
        self.weights = list(weights)
        self.shapes = [tensor.shape for tensor, _ in weights]

    def weight(self, tensor: Any) -> int | None:
        """Return which tracked tensor this is; None where it is none."""
        for i, found in enumerate(self.arguments):
            if found is tensor:
                return i
        return None

    def drop_repeats(self) -> None:
        """Observe what was repeated along dimensions of size one, instead of the repetition.

        For operators that broadcast anyway: a class token that was expanded to all rows is then
        one token that every row uses.
        """
        for i, (tensor, source) in enumerate(self.weights):
            if source.base is not None:
                base = self.mode.base_of(tensor)
                self.weights[i] = (base, source.base)
                lead = tensor.dim() - base.dim()
                self.shapes[i] = torch.Size([1] * lead + list(base.shape))

    def forget(self) -> None:
        """Let go of the arguments: what a backward needs of them is saved where hooks see it."""
        self.args, self.kwargs, self.arguments = (), {}, []

    def is_data(self, tensor: Any) -> bool:
        """Whether this is a tensor with rows."""
        return isinstance(tensor, Tensor) and self.mode.layout(tensor) is not None

    def layout(self, tensor: Tensor) -> Layout:
        """Return where a tensor's rows are, or raise."""
        return self.mode.require_layout(tensor, self)

    def partition(self, tensor: Tensor, layout: Layout, dim: int | None = None) -> Partition:
        """Return which slices of a tensor belong to which environment."""
        size = tensor.shape[layout.dim if dim is None else dim]
        return self.mode.partition(size, layout)

    def unsupported(self, why: str) -> Exception:
        """Return the error for a call that cannot be observed exactly."""
        return self.mode.unsupported(self.name, self.args, self.kwargs, self.weights, why)


def recording(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what runs a function again in a backward pass as it runs now: with its autocast."""
    enabled = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if enabled else None

    @contextmanager
    def again() -> Iterator[None]:
        with torch.enable_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            yield

    return again


@dataclass(frozen=True)
class Place:
    """Stands in arguments for a tensor that is kept elsewhere."""

    index: int


def fill(value: Any, by: Callable[[Any], Any]) -> Any:
    """Replace the tensors, or the places, in arguments."""
    if isinstance(value, (Tensor, Place)):
        return by(value)
    if type(value) in (list, tuple):
        return type(value)(fill(item, by) for item in value)
    if type(value) is dict:
        return {key: fill(item, by) for key, item in value.items()}
    return value


@dataclass
class Plan:
    """How an operator observes a call.

    Attributes:
        saved: What its backward needs.
        shares_of: From saved tensors and gradients of outputs to the shares of each tracked tensor,
            in the order of ``call.weights``.
        layout: Where the rows of the output are (of each output, if a list).
        output: The outputs, where not those of the function itself.
    """

    saved: tuple[Tensor, ...]
    shares_of: SharesOf
    layout: Layout | Scattered | list[Layout]
    output: Any = None


Operator = Callable[..., Plan]
OPERATORS: dict[str, Operator] = {}
"""By the name of the function that it observes."""


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register an operator for functions of these names."""

    def register(function: Operator) -> Operator:
        for name in names:
            OPERATORS[name] = function
        return function

    return register
