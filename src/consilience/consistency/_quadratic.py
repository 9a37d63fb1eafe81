r"""The score of quadratic losses, from their Hessians.

For :math:`L_e(\theta) = L_e^* + \frac12 \delta^\top H_e \delta`, :math:`\delta = \theta -
\theta^*`, the region around :math:`\theta^*` is the ellipsoid :math:`\frac12 \delta^\top H_e
\delta \le \epsilon`, and the largest :math:`\frac12 \delta^\top H_{e'} \delta` in it is
:math:`\epsilon` times the largest generalised eigenvalue of :math:`H_{e'} v = \lambda H_e v`. For
diagonal Hessians that is the largest ratio of curvatures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from consilience.consistency._extra import scipy
from consilience.consistency._landscape import Landscape
from consilience.consistency._means import check_epsilon, check_hessians, check_is_tensor
from consilience.consistency._minimum import check_minimum
from consilience.consistency._progress import Progress
from consilience.consistency._question import Question
from consilience.consistency._result import Against, Inconsistency, Witness, check_against

Curvature = Literal["hessian", "gauss-newton"]

DENSE_UP_TO = 256
"""Parameters up to which whole Hessians are computed unless it is asked otherwise."""


ROWS_UP_TO, ROWS_BYTES = 4096, 1_000_000_000
"""How many rows a pair of Gauss-Newton matrices may have, and how large all may be, to be held."""


@dataclass(frozen=True)
class Span:
    """The range of eigenvalues of a pair, with 0 in it, and where its ends are reached."""

    low: float
    high: float
    low_at: Tensor
    high_at: Tensor


def quadratic_inconsistency(
    hessians: Tensor,
    epsilon: float,
    *,
    values: Tensor | Sequence[float] | None = None,
    damping: float = 0.0,
    against: Against = "minimum",
) -> Inconsistency:
    r"""Return the exact inconsistency score of quadratic losses with a common minimum.

    With :math:`\Delta = L_{e'}^* - L_e^*` and :math:`[0, \lambda]` the range of generalised
    eigenvalues of the pair (0 is in it: theta* itself), a pair's score is
    :math:`\max(|\Delta|, |\Delta + \epsilon \lambda|)`. It is infinite where a direction is flat
    for one environment and not for the other. A direction flat for both counts for nothing.

    Args:
        hessians: ``[environments, n, n]``, or diagonals ``[environments, n]``.
        epsilon: How much worse than at theta* an environment may fare; positive.
        values: The losses at theta*, one per environment; all the same if not given.
        damping: Added to the diagonal of every Hessian, as if each loss had a further
            :math:`\frac12 \mathrm{damping} \|\theta - \theta^*\|^2`.
        against: ``"minimum"`` compares with :math:`L_e(\theta^*)`; ``"point"`` with
            :math:`L_e(\theta)`, as the paper's equation is printed.

    Example:
        >>> curvatures = torch.tensor([[1.0, 1.0], [4.0, 0.5]])
        >>> float(quadratic_inconsistency(curvatures, epsilon=0.1))
        0.4
        >>> quadratic_inconsistency(curvatures, epsilon=0.1).matrix
        tensor([[0.1000, 0.4000],
                [0.2000, 0.1000]], dtype=torch.float64)
    """
    check_epsilon(epsilon)
    _check_damping(damping)
    check_against(against)
    check_is_tensor(hessians)
    diagonal = hessians.dim() == 2
    if not hessians.is_floating_point():
        hessians = hessians.to(torch.get_default_dtype())
    if damping:
        eye = torch.ones_like(hessians[0]) if diagonal else torch.eye(len(hessians[0])).to(hessians)
        hessians = hessians + damping * eye
    hessians = check_hessians(hessians)
    count = len(hessians)
    heights = [0.0] * count if values is None else [float(value) for value in values]
    if not all(map(math.isfinite, heights)):
        raise ValueError(f"Parameter `values` should be finite. Found `values = {values}`.")
    if len(heights) != count:
        raise ValueError(
            "Parameter `values` should have one loss per environment. Found "
            f"{len(heights)} values and {count} Hessians."
        )

    def bend(e: int, v: Tensor) -> Tensor:
        return v @ (hessians[e] * v if diagonal else hessians[e] @ v)

    def loss(e: int, v: Tensor) -> Tensor:
        return heights[e] + bend(e, v) / 2

    landscape = Landscape(
        [partial(loss, e) for e in range(count)],
        torch.zeros_like(hessians[0] if diagonal else hessians[0, 0]),
    )
    everything = [(e, other) for e in range(count) for other in range(count)]
    question = Question(landscape, heights, epsilon, against, everything, math.inf, progress=False)
    measure = _diagonal_span if diagonal else partial(_dense_span, damping=damping)
    return _score(
        question,
        lambda e, other: measure(hessians[e], hessians[other]),
        lambda e, v: float(bend(e, v)),
        "exact for quadratic losses with these Hessians",
    )


def quadratic(
    question: Question,
    *,
    curvature: Curvature = "hessian",
    damping: float = 0.0,
    dense: bool | None = None,
    precision: float = 1e-4,
    seed: int = 0,
) -> Inconsistency:
    r"""The score of the quadratic model of each loss around theta*.

    Args:
        question: What is asked.
        curvature: ``"hessian"``, or ``"gauss-newton"`` (positive semidefinite by construction
            for convex criteria; losses from :func:`environment_losses`).
        damping: Added to the diagonal of every Hessian, as if each loss had a further
            :math:`\frac12 \mathrm{damping} \|\theta - \theta^*\|^2`. Beyond the sizes of whole
            Hessians it has to be positive: networks have flat directions.
        dense: Whether to compute whole Hessians; by default up to 256 parameters. Otherwise
            products with vectors are all that is used (Lanczos, with inverses by conjugate
            gradients), and the number is a Rayleigh quotient: from below, up to `precision`. By
            default, Gauss-Newton matrices of few rows of data (rows of a pair times outputs up to
            4096) are held as those rows instead, which is exact and much faster.
        precision: Relative precision of the matrix-free eigenvalue.
        seed: Of the eigensolver's first vector.
    """
    if curvature not in ("hessian", "gauss-newton"):
        raise ValueError(
            "Parameter `curvature` should be 'hessian' or 'gauss-newton'. "
            f"Found `curvature = {curvature!r}`."
        )
    _check_damping(damping)
    landscape = question.landscape
    origin, size = landscape.origin, landscape.size
    whole = size <= DENSE_UP_TO if dense is None else dense
    if not whole and damping <= 0:
        raise ValueError(
            f"Parameter `damping` should be positive for {size} parameters: among that many some "
            "direction is flat for one environment and not for another, and the score infinite. "
            f"Found `damping = {damping}`. Use `dense=True` to see for yourself."
        )
    check_minimum(question)
    product = (
        landscape.hessian_product if curvature == "hessian" else landscape.gauss_newton_product
    )
    of = "Hessians" if curvature == "hessian" else "Gauss-Newton matrices"
    damped = f", damping {damping:g}" if damping else ""
    if whole:
        eye = torch.eye(size).to(origin)
        found = [
            torch.stack([product(e, origin, row) for row in eye])
            for e in range(landscape.environments)
        ]
        hessians = check_hessians(torch.stack([(h + h.mT) / 2 + damping * eye for h in found]))
        _check_slopes(question, lambda e, slope: _dense_solve(hessians[e], slope, damping))
        return _score(
            question,
            lambda e, other: _dense_span(hessians[e], hessians[other], damping),
            lambda e, v: float(v @ hessians[e] @ v),
            f"exact for the quadratic model from whole {of}{damped}",
        )
    if curvature == "gauss-newton" and dense is None and _rows_fit(landscape):
        rows = _Rows(landscape, damping)
        _check_slopes(question, rows.solve)
        return _score(
            question,
            rows.span,
            rows.bend,
            f"exact for the quadratic model from {of}, through their rows{damped}",
        )
    pencil = _Pencil(landscape, product, damping, precision, seed)
    if curvature == "hessian":
        pencil.check_definite()
    _check_slopes(question, pencil.solve)
    return _score(
        question,
        lambda e, other: pencil.span(e, other, both=question.against == "point"),
        lambda e, v: float(v @ pencil.times(e, v)),
        f"the quadratic model from {of}, matrix-free, from below{damped}",
    )


def _score(
    question: Question,
    span: Callable[[int, int], Span],
    curvature: Callable[[int, Tensor], float],
    meaning: str,
) -> Inconsistency:
    """Turn the eigenvalues of every pair into the score."""
    heights, epsilon = question.heights, question.epsilon
    matrix = torch.full((len(heights),) * 2, math.nan, dtype=torch.float64)
    best: tuple[float, tuple[int, int], Tensor] | None = None
    line = Progress("pairs", len(question.pairs), shown=question.progress)
    for e, other in question.pairs:
        gap = heights[other] - heights[e]
        ends = span(e, other)
        # The pair's difference goes from `gap` (theta* itself) to both of these ends.
        low, high = gap, gap + epsilon * ends.high
        if question.against == "point":
            low = gap + epsilon * min(0.0, ends.low - 1)
            high = gap + epsilon * max(0.0, ends.high - 1)
        value = max(abs(low), abs(high))
        matrix[e, other] = value
        if best is None or value > best[0]:
            best = value, (e, other), ends.high_at if abs(high) >= abs(low) else ends.low_at
        line.step(f"score {best[0]:.4g}")
    assert best is not None  # noqa: S101 - there is a pair
    value, (e, other), direction = best
    bend = curvature(e, direction)
    # A flat direction can be followed for ever; one unit of it shows where it goes.
    step = direction * math.sqrt(2 * epsilon / bend) if bend > 0 else direction
    origin = question.landscape.origin
    path = torch.stack([origin, origin + step])
    return Inconsistency(
        value,
        method="quadratic",
        meaning=meaning,
        epsilon=epsilon,
        against=question.against,
        matrix=matrix,
        pair=(e, other),
        witness=Witness((e, other), value, path, question.landscape.unflatten(path[-1])),
        error=math.nan,
    )


def _diagonal_span(below: Tensor, above: Tensor) -> Span:
    """Return the range of above / below; 0 / 0 counts as nothing."""
    ratio = torch.where(above > 0, above / below, torch.where(below > 0, 0.0, torch.nan))
    low, high = ratio.nan_to_num(math.inf, math.inf), ratio.nan_to_num(0.0, math.inf)
    at = torch.eye(len(ratio)).to(ratio)
    return Span(
        min(1.0, float(low.amin())),
        float(high.amax()),
        at[int(low.argmin())],
        at[int(high.argmax())],
    )


def _dense_span(below: Tensor, above: Tensor, damping: float = 0.0) -> Span:
    """Return the range of generalised eigenvalues of ``above v = lambda below v``.

    With a damping in both, no direction is flat, however small it is against the rounding.
    """
    values, vectors = torch.linalg.eigh(below)
    values, seen = _without_rounding(values, damping)
    flat = vectors[:, ~seen]
    if flat.shape[1]:
        bends, ways = torch.linalg.eigh(flat.T @ above @ flat)
        scale = torch.linalg.matrix_norm(above, 2)
        if bends[-1] > 10 * len(values) * torch.finfo(values.dtype).eps * scale:
            away = flat @ ways[:, -1]
            return Span(0.0, math.inf, away, away)
    if not seen.any():
        nowhere = torch.zeros_like(values)
        return Span(1.0, 0.0, nowhere, nowhere)
    # Within the range of `below`, in coordinates in which it is the identity.
    whiten = vectors[:, seen] / values[seen].sqrt()
    bends, ways = torch.linalg.eigh(whiten.T @ above @ whiten)
    return Span(
        max(0.0, float(bends[0])),
        max(0.0, float(bends[-1])),
        whiten @ ways[:, 0],
        whiten @ ways[:, -1],
    )


def _without_rounding(values: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Return eigenvalues freed from rounding as far as possible, and which are not flat.

    What is lost in the rounding is the damping alone. What is not is left as it is: that of an
    indefinite Hessian may lie below its damping.
    """
    seen = values > 10 * len(values) * torch.finfo(values.dtype).eps * values.abs().amax()
    if damping:
        return values.where(seen, values.clamp_min(damping)), torch.ones_like(seen)
    return values, seen


def _dense_solve(hessian: Tensor, slope: Tensor, damping: float) -> Tensor | None:
    """Solve a semidefinite system; None where the slope points into a flat direction."""
    values, vectors = torch.linalg.eigh(hessian)
    values, seen = _without_rounding(values, damping)
    parts = vectors.T @ slope
    if float(parts[~seen].norm()) > 1e-6 * max(1.0, float(slope.norm())):
        return None
    solution: Tensor = vectors[:, seen] @ (parts[seen] / values[seen])
    return solution


def _check_slopes(question: Question, solve: Callable[[int, Tensor], Tensor | None]) -> None:
    """Raise unless theta* is a minimum of every environment, as its quadratic model sees it."""
    if math.isinf(question.tolerance):
        return
    landscape, tolerance = question.landscape, question.tolerance * question.epsilon
    for e in range(landscape.environments):
        _, slope = landscape.value_and_gradient(e, landscape.origin)
        step = solve(e, slope)
        below = math.inf if step is None else float(slope @ step) / 2
        if below > tolerance:
            raise ValueError(
                "`method='quadratic'` is for a minimum that all environments share, up to "
                f"`tolerance * epsilon` = {tolerance:.3g}. Found that the quadratic "
                f"model of environment {e} has its minimum {below:.3g} lower (its gradient's norm "
                f"is {float(slope.norm()):.3g}). Use `method='search'`, which needs no common "
                "minimum, or raise `tolerance`."
            )


def _check_damping(damping: float) -> None:
    if not (damping >= 0 and math.isfinite(damping)):
        raise ValueError(f"Parameter `damping` should be 0 or more. Found `damping = {damping}`.")


def _rows_fit(landscape: Landscape) -> bool:
    """Return whether the rows of all Gauss-Newton matrices are few enough to be held."""
    sizes = landscape.output_sizes()
    if sizes is None:  # the error comes with the first product
        return False
    largest = max(size for batches in sizes for size in batches)
    count = sum(size for batches in sizes for size in batches)
    most = 2 * max(sum(batches) for batches in sizes)
    needed = count * landscape.origin.numel() * landscape.origin.element_size()
    return max(largest, most) <= ROWS_UP_TO and needed <= ROWS_BYTES


class _Rows:
    r"""Damped Gauss-Newton matrices :math:`F_e^\top F_e + \mathrm{damping} I` by their rows.

    What a pair has of eigenvalues other than 1 lies in the space that the rows of both span, so an
    eigenproblem as small as their number settles it.
    """

    def __init__(self, landscape: Landscape, damping: float) -> None:
        self._damping, self._size = damping, landscape.size
        self._rows = [
            landscape.gauss_newton_rows(e, landscape.origin) for e in range(landscape.environments)
        ]
        self._products: dict[tuple[int, int], Tensor] = {}

    def solve(self, e: int, vector: Tensor) -> Tensor:
        """Return the product of the inverse with a vector (Woodbury)."""
        inner = self._product(e, e) + self._damping * torch.eye(len(self._rows[e])).to(
            self._rows[e].device, torch.float64
        )
        within = torch.linalg.solve(inner, self._push(e, vector))
        solution: Tensor = (vector.double() - self._pull([e], within)) / self._damping
        return solution.to(vector)

    def bend(self, e: int, vector: Tensor) -> float:
        """Return the curvature along a vector."""
        pushed, vector = self._push(e, vector), vector.double()
        return float(pushed @ pushed + self._damping * vector @ vector)

    def span(self, e: int, other: int) -> Span:
        """Return the range of eigenvalues of a pair."""
        pair, split = [e, other], len(self._rows[e])
        gram = torch.cat([torch.cat([self._product(a, b) for b in pair], 1) for a in pair])
        values, vectors = torch.linalg.eigh(gram)
        seen = values > 1e-12 * float(values.amax() if len(values) else 0.0)
        # The rows in an orthonormal basis of their span, and what makes that basis of the rows.
        inside = vectors[:, seen] * values[seen].sqrt()
        basis = vectors[:, seen] / values[seen].sqrt()
        rank = inside.shape[1]
        ends = []
        if rank:
            eye = self._damping * torch.eye(rank).to(inside)
            below, above = (part.T @ part + eye for part in (inside[:split], inside[split:]))
            found = _dense_span(below, above, self._damping)
            ends = [
                (value, self._pull(pair, basis @ at))
                for value, at in ((found.low, found.low_at), (found.high, found.high_at))
            ]
        if rank < self._size:  # outside of the span both are the damping alone
            anywhere = torch.ones(self._size).to(gram)
            pushed = torch.cat([self._push(environment, anywhere) for environment in pair])
            ends.append((1.0, anywhere - self._pull(pair, basis @ (basis.T @ pushed))))
        low, high = (pick(ends, key=lambda end: end[0]) for pick in (min, max))
        kind = self._rows[e]
        return Span(low[0], high[0], low[1].to(kind), high[1].to(kind))

    def _product(self, e: int, other: int) -> Tensor:
        """Return the products of all rows of two environments, in float64."""
        if (other, e) in self._products:
            return self._products[other, e].T
        if (e, other) not in self._products:
            blocks = zip(*(torch.split(self._rows[i], 16384, 1) for i in (e, other)), strict=True)
            self._products[e, other] = torch.stack(
                [first.double() @ second.double().T for first, second in blocks]
            ).sum(0)
        return self._products[e, other]

    def _push(self, e: int, vector: Tensor) -> Tensor:
        """Return the products of an environment's rows with a vector, in float64."""
        return (self._rows[e] @ vector.to(self._rows[e])).double()

    def _pull(self, environments: Sequence[int], weights: Tensor) -> Tensor:
        """Return a weighted sum of the rows of environments, in float64."""
        parts = torch.split(weights, [len(self._rows[e]) for e in environments])
        sums = [
            part.to(self._rows[e]) @ self._rows[e]
            for e, part in zip(environments, parts, strict=True)
        ]
        return torch.stack(sums).sum(0).double()


class _Pencil:
    """Damped curvature matrices of all environments as operators, and their eigenvalues."""

    def __init__(
        self,
        landscape: Landscape,
        product: Callable[[int, Tensor, Tensor], Tensor],
        damping: float,
        precision: float,
        seed: int,
    ) -> None:
        self._landscape, self._product = landscape, product
        self._damping, self._precision = damping, precision
        self._linalg = scipy("sparse.linalg")
        self._first = np.random.default_rng(seed).standard_normal(landscape.size)

    def times(self, e: int, vector: Tensor) -> Tensor:
        """Return the product of environment ``e``'s damped curvature with a vector."""
        return self._product(e, self._landscape.origin, vector) + self._damping * vector

    def solve(self, e: int, vector: Tensor) -> Tensor:
        """Return the product of the inverse with a vector, by conjugate gradients."""
        return self._tensor(self._solve(e, vector.double().cpu().numpy()))

    def check_definite(self) -> None:
        """Raise unless all damped Hessians are positive definite."""
        for e in range(self._landscape.environments):
            values = self._linalg.eigsh(
                self._operator(e),
                k=1,
                which="SA",
                tol=1e-2,
                v0=self._first,
                return_eigenvectors=False,
            )
            low = float(values[0])
            if low <= 0:
                raise ValueError(
                    f"Hessians plus `damping = {self._damping:g}` should be positive definite. "
                    f"Found the eigenvalue {low:.3g} in environment {e}. Raise `damping` above "
                    f"{self._damping - low:.3g}, take `curvature='gauss-newton'`, or use "
                    "`method='search'`."
                )

    def span(self, e: int, other: int, *, both: bool) -> Span:
        """Return the largest (and the smallest, if both ends are wanted) eigenvalue of a pair."""
        high, high_at = self._top(e, other)
        if not both:
            return Span(0.0, high, high_at, high_at)
        inverse, low_at = self._top(other, e)
        return Span(1 / inverse, high, low_at, high_at)

    def _top(self, e: int, other: int) -> tuple[float, Tensor]:
        size = self._landscape.size
        inverse = self._linalg.LinearOperator(
            (size, size), matvec=lambda vector: self._solve(e, vector), dtype=np.float64
        )
        _, vectors = self._linalg.eigsh(
            self._operator(other),
            k=1,
            M=self._operator(e),
            Minv=inverse,
            which="LA",
            tol=self._precision,
            v0=self._first,
        )
        # The Rayleigh quotient is what the vector proves, whatever the solver says.
        vector = self._tensor(vectors[:, 0])
        above, below = vector @ self.times(other, vector), vector @ self.times(e, vector)
        return float(above / below), vector

    def _solve(self, e: int, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        solution, failed = self._linalg.cg(
            self._operator(e), vector.ravel(), rtol=min(1e-6, self._precision / 10), maxiter=5000
        )
        if failed:
            raise RuntimeError(
                f"Conjugate gradients did not solve environment {e}'s curvature in 5000 steps. "
                "Raise `damping`, or compute in float64."
            )
        found: np.ndarray[Any, Any] = solution
        return found

    def _operator(self, e: int) -> Any:
        size = self._landscape.size

        def matvec(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            found: np.ndarray[Any, Any] = (
                self.times(e, self._tensor(vector.ravel())).double().cpu().numpy()
            )
            return found

        return self._linalg.LinearOperator((size, size), matvec=matvec, dtype=np.float64)

    def _tensor(self, vector: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(vector)).to(self._landscape.origin)
