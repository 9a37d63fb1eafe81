"""From what a user says of rows to which rows vote together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

UNKNOWN = -1
"""The environment of a row that keeps its share of the gradient and does not vote."""
_UNKNOWN = (UNKNOWN, None, "-1", b"-1")

EnvironmentLabels: TypeAlias = Tensor | np.ndarray[Any, Any] | Sequence[Any]


def factorize(env: EnvironmentLabels, name: str = "env") -> Tensor:
    """Turn labels into codes ``0, 1, ...`` in sorted order of the labels, ``-1`` for unknown.

    Integers of any values and order, strings, or any sequence of them; ``-1``, ``"-1"`` (as a file
    or an array of strings may have it) and ``None`` mean unknown.
    """
    if isinstance(env, Tensor):
        if env.is_floating_point() or env.is_complex() or env.dtype == torch.bool:
            raise TypeError(
                f"Parameter `{name}` should hold integers (or strings). Found `{name}.dtype = "
                f"{env.dtype}`. If these are labels, convert them: `{name}.long()`."
            )
        array = env.detach().cpu().numpy()
    else:
        array = _as_array(env, name)
    if array.ndim != 1:
        raise ValueError(
            f"Parameter `{name}` should have one dimension, a label for every row. Found "
            f"`{name}.shape = {list(array.shape)}`."
        )
    if array.dtype.kind in "iu":
        known = array != UNKNOWN
        array = array.astype(np.int64)  # differences of unsigned numbers would wrap
        # Labels that are sorted already, as a sampler of environments gives them, need no sort.
        if known.all() and array.size and (steps := np.diff(array)).size == 0:
            return torch.zeros(array.size, dtype=torch.long)
        if known.all() and array.size and (steps >= 0).all():
            codes = np.concatenate([[0], np.cumsum(steps > 0)])
            return torch.from_numpy(codes.astype(np.int64))
    else:
        known = np.array([label not in _UNKNOWN for label in array.tolist()], dtype=bool)
    codes = np.full(array.size, UNKNOWN, dtype=np.int64)
    if known.any():
        labels = array[known]
        if labels.dtype == object:
            labels = labels.astype(str)
        codes[known] = np.unique(labels, return_inverse=True)[1].reshape(-1)
    return torch.from_numpy(codes)


def _as_array(env: EnvironmentLabels, name: str) -> np.ndarray[Any, Any]:
    if isinstance(env, (str, set, frozenset, dict)):
        raise TypeError(
            f"Parameter `{name}` should hold a label for every row, in the order of the rows. "
            f"Found `{name} = {env!r}`."
        )
    if isinstance(env, np.ma.MaskedArray):
        env = env.tolist()  # None where it is masked
    try:
        values = env if isinstance(env, np.ndarray) else list(env)
    except TypeError:
        raise TypeError(
            f"Parameter `{name}` should be an integer tensor, an array, a sequence of labels, or "
            f"None. Found `{name} = {env!r}`."
        ) from None
    if not isinstance(values, np.ndarray) or values.dtype == object:
        values = _of_one_kind(list(values), name)
    if values.dtype.kind not in "iuUSO":
        raise TypeError(
            f"Parameter `{name}` should hold integers or strings. Found `{name}.dtype = "
            f"{values.dtype}`."
        )
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _of_one_kind(values: list[Any], name: str) -> np.ndarray[Any, Any]:
    """Return labels as an array, which would make 1 and "1" the same."""
    values = [
        value.item() if isinstance(value, np.generic) or _is_number(value) else value
        for value in values
    ]
    kinds = {type(value) for value in values if value is not None}
    if not kinds.isdisjoint((list, tuple, np.ndarray, Tensor)):
        raise ValueError(
            f"Parameter `{name}` should have one dimension, a label for every row. Found a "
            "sequence among its labels."
        )
    if len(kinds) > 1 and not all(issubclass(kind, int) for kind in kinds):
        raise TypeError(
            f"Parameter `{name}` should hold labels of one kind, and None where the environment "
            f"is unknown. Found {' and '.join(sorted(kind.__name__ for kind in kinds))}."
        )
    if float in kinds:
        raise TypeError(f"Parameter `{name}` should hold integers or strings. Found floats.")
    if not kinds.isdisjoint((int, bool)) and None not in values:
        with suppress(OverflowError):  # beyond 64 bits
            return np.asarray(values, dtype=bool if kinds == {bool} else np.int64)
    if not values:
        return np.empty(0, dtype=np.int64)
    if kinds <= {str, bytes} and None not in values:
        return np.asarray(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@dataclass(frozen=True)
class Partition:
    """Which slices of an activation belong to which environment.

    ``order`` brings the slices of an environment next to each other (None: they are already);
    environment ``e`` then has ``bounds[e]:bounds[e + 1]``, and what lies behind the last bound
    belongs to nobody.

    Attributes:
        size: How many slices there are.
        bounds: Where each environment starts; one more than there are environments.
        order: The permutation, or None.
        each: How many slices each environment has, where all have as many; else None.
    """

    size: int
    bounds: tuple[int, ...]
    order: Tensor | None = None
    _orders: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def count(self) -> int:
        """How many environments there are."""
        return len(self.bounds) - 1

    @property
    def known(self) -> int:
        """How many slices belong to an environment."""
        return self.bounds[-1]

    @cached_property
    def each(self) -> int | None:
        """How many slices each environment has, where all have as many; else None."""
        first = self.bounds[1] - self.bounds[0]
        even = first > 0 and self.bounds == tuple(range(0, self.known + 1, first))
        return first if even else None

    def arrange(self, x: Tensor, dim: int = 0) -> Tensor:
        """Move the row dimension to the front and bring each environment's slices together."""
        if dim:
            x = x.movedim(dim, 0)
        if self.order is None:
            return x
        return x.index_select(0, self.order_on(x.device))

    def order_on(self, device: torch.device) -> Tensor:
        """Return the permutation on a device."""
        assert self.order is not None  # noqa: S101 - only called where there is one
        if device not in self._orders:
            self._orders[device] = self.order.to(device, non_blocking=True)
        return self._orders[device]

    @classmethod
    def of(cls, codes: Tensor, count: int) -> Partition:
        """Partition slices by their environments' codes."""
        key = torch.where(codes < 0, count, codes)
        sizes = torch.bincount(key, minlength=count + 1)[:count]
        bounds = (0, *torch.cumsum(sizes, 0).tolist())
        ordered = bool((key[1:] >= key[:-1]).all())
        order = None if ordered else torch.sort(key, stable=True).indices
        return cls(size=len(codes), bounds=bounds, order=order)


@lru_cache(maxsize=64)
def _row_by_row(rows: int, fold: int) -> Partition:
    return Partition(rows * fold, tuple(range(0, rows * fold + 1, fold)))


class Environments:
    """The environments of the rows of one batch."""

    def __init__(self, codes: Tensor | None, rows: int | None):
        self._codes = codes
        self._rows = rows
        self._partitions: dict[int, Partition] = {}

    @classmethod
    def of(cls, env: EnvironmentLabels | None, *, allow_single: bool) -> Environments:
        """Read a user's labels; None leaves the number of rows to be learnt from the batch."""
        if env is None:
            return cls(None, None)
        codes = factorize(env)
        if len(codes) == 0:
            raise ValueError("Parameter `env` should name one row or more. Found an empty batch.")
        count = int(codes.max()) + 1
        if count == 0:
            raise ValueError(
                "Parameter `env` should name two environments or more. "
                "Found only unknown ones (-1)."
            )
        if count == 1 and not allow_single:
            raise single_environment_error("env")
        return cls(codes, len(codes))

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        assert self._rows is not None  # noqa: S101 - settled before anything asks
        return self._rows

    @property
    def settled(self) -> bool:
        """Whether the number of rows is known."""
        return self._rows is not None

    def settle(self, rows: int, *, allow_single: bool) -> None:
        """Learn the number of rows, where every row is its own environment."""
        if rows == 0:
            raise ValueError("The batch should have one row or more. Found an empty batch.")
        if rows == 1 and not allow_single:
            raise ValueError(
                "Parameter `env` should be given where the first tensor that the model consumes "
                "has a single row. Found `env = None` and one row: with a single environment there "
                "is nothing to agree about. If that tensor is no data but a constant, register it "
                "as a buffer; if one row is meant, allow it with "
                "`Agreement(..., allow_single=True)`."
            )
        self._rows = rows

    @property
    def given_codes(self) -> Tensor | None:
        """The environment of each row, where labels were given."""
        return self._codes

    @cached_property
    def codes(self) -> Tensor:
        """The environment of each row."""
        return torch.arange(self.rows) if self._codes is None else self._codes

    @cached_property
    def count(self) -> int:
        """How many environments there are, that is voters."""
        return self.rows if self._codes is None else int(self._codes.max()) + 1

    @cached_property
    def every_row(self) -> bool:
        """Whether every row is an environment of its own, in order."""
        return self._codes is None or (
            self.count == self.rows and bool((self._codes == torch.arange(self.rows)).all())
        )

    def partition(self, fold: int) -> Partition:
        """Partition an activation that holds ``fold`` slices, one behind the other, per row."""
        if fold not in self._partitions:
            if self._codes is None:
                self._partitions[fold] = _row_by_row(self.rows, fold)
            elif fold == 1:
                self._partitions[1] = Partition.of(self.codes, self.count)
            else:
                base = self.partition(1)
                order = base.order
                if order is not None:
                    order = (order[:, None] * fold + torch.arange(fold)).reshape(-1)
                bounds = tuple(bound * fold for bound in base.bounds)
                self._partitions[fold] = Partition(self.rows * fold, bounds, order)
        return self._partitions[fold]

    def partition_of(self, rows: Tensor) -> Partition:
        """Partition an activation whose slice ``i`` belongs to row ``rows[i]``."""
        return Partition.of(self.codes[rows], self.count)


def single_environment_error(name: str) -> ValueError:
    """Return the error for a batch with nothing to agree about."""
    return ValueError(
        f"Parameter `{name}` should name two environments or more: with a single one there is "
        "nothing to agree about. Found one environment. Draw several environments per batch, or "
        "allow it with `Agreement(..., allow_single=True)`."
    )


def environment_mean(losses: Tensor, env: EnvironmentLabels | None) -> Tensor:
    r"""Return the mean over environments of the mean of the losses within each.

    .. math:: \frac{1}{d} \sum_{e=1}^{d} \frac{1}{n_e} \sum_{i : env_i = e} \ell_i

    This is the pooled loss of the paper. Rows of unknown environment (-1) are left out.

    Args:
        losses: One loss per row (further dimensions are averaged within the row).
        env: The environment of each row, as for :meth:`Agreement.observe`; None: every row is its
            own, which makes this the plain mean.

    Example:
        >>> import torch
        >>> environment_mean(torch.tensor([1.0, 1.0, 4.0]), [0, 0, 1])
        tensor(2.5000)
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        found = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(
            "Parameter `losses` should be a tensor of floating-point numbers, one loss per row. "
            f"Found {found}."
        )
    if losses.dim() == 0:
        raise ValueError(
            "Parameter `losses` should hold one loss per row. Found a single number: compute the "
            'losses with `reduction="none"`.'
        )
    if losses.numel() == 0:
        raise ValueError(
            "Parameter `losses` should hold one row or more. Found an empty batch: "
            f"`losses.shape = {list(losses.shape)}`."
        )
    if losses.dim() > 1:
        losses = losses.flatten(1).mean(1)
    if env is None:
        return losses.mean()
    codes = factorize(env).to(losses.device)
    if len(codes) != len(losses):
        raise ValueError(
            "Parameter `env` should have a label for every row. Found "
            f"`len(env) = {len(codes)}` and `len(losses) = {len(losses)}`."
        )
    known = codes >= 0
    if not bool(known.any()):
        raise ValueError(
            "Parameter `env` should name one environment or more. Found only unknown ones (-1)."
        )
    sizes = torch.bincount(codes[known])
    # A row weighs 1 / (environments x rows of its environment); a product keeps the rows
    # recognisable to an observation, which an index would not.
    shares = (sizes[codes.clamp(min=0)] * len(sizes)).double().reciprocal()
    weights = torch.where(known, shares, 0.0)
    return (losses * weights.to(losses.dtype)).sum()
