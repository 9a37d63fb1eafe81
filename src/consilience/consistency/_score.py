"""The inconsistency score of a minimum, and checks of what it is asked of."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from consilience.consistency._grid import check_grid, grid
from consilience.consistency._landscape import Landscape, Parameters
from consilience.consistency._means import check_epsilon
from consilience.consistency._quadratic import quadratic
from consilience.consistency._question import Question
from consilience.consistency._result import Against, Inconsistency, check_against
from consilience.consistency._search import search

__all__ = ["WitnessCheck", "check_witness", "inconsistency"]

_METHODS: dict[str, Callable[..., Inconsistency]] = {
    "quadratic": quadratic,
    "grid": grid,
    "search": search,
}


def inconsistency(
    losses: Sequence[Callable[[Any], Tensor]],
    parameters: Parameters,
    *,
    epsilon: float,
    method: Literal["quadratic", "grid", "search"] = "quadratic",
    against: Against = "minimum",
    pairs: Sequence[tuple[int, int]] | None = None,
    tolerance: float = 0.01,
    progress: bool = False,
    **options: Any,
) -> Inconsistency:
    r"""Return how hard to vary a minimum is: the paper's inconsistency score.

    .. math:: I^\epsilon(\theta^*) = \max_{(e, e')} \; \max_{\theta \in N_e}
              |L_{e'}(\theta) - L_e(\theta^*)|

    where :math:`N_e` is the connected component, containing :math:`\theta^*`, of the parameters
    that environment :math:`e` holds for as good: :math:`|L_e(\theta) - L_e(\theta^*)| \le
    \epsilon`. It is large where one environment's loss is indifferent to a change that another's
    is not: the solution is sewn together from parts that serve different environments. Environments
    that see the same loss give :math:`\epsilon`, the smallest value.

    The result reads as a number, and says in `meaning` what kind of number it is:

    ============= ==================================== ========================================
    method        for                                  the number
    ============= ==================================== ========================================
    ``quadratic`` minima that all environments share   exact for the quadratic model (Hessians)
    ``grid``      up to 3 parameters                   exact up to the grid; `error` says how far
    ``search``    anything differentiable              a lower bound, with its `witness`
    ============= ==================================== ========================================

    Args:
        losses: One function per environment, of what `parameters` is: a tensor, a module, or a
            mapping from names to tensors. For data and loaders, see :func:`environment_losses`.
            They should be deterministic: a module with dropout belongs in eval mode.
        parameters: The minimum :math:`\theta^*`. It is not changed. Of a module, the parameters
            that require a gradient vary.
        epsilon: How much worse (or better) than at :math:`\theta^*` an environment may fare.
        method: See above.
        against: ``"minimum"`` compares with :math:`L_e(\theta^*)`, as the paper's proofs do;
            ``"point"`` with :math:`L_e(\theta)`, as its equation is printed.
        pairs: Pairs (e, e') to look at; all of them by default.
        tolerance: How far above a minimum of the mean loss :math:`\theta^*` may be, as a share of
            `epsilon`; beyond it an error says how far it is. ``math.inf`` switches that off. For
            ``quadratic`` it holds for every environment's loss.
        progress: Whether to write progress to standard error.
        **options: What the method takes besides:

            - ``quadratic``: `curvature` (``"hessian"`` or ``"gauss-newton"``), `damping` (0),
              `dense` (whole Hessians; by default up to 256 parameters), `precision` (1e-4) and
              `seed` (0) of the matrix-free eigensolver.
            - ``grid``: `points` along each axis, `width` of the box (fitted by default), `memory`
              in bytes.
            - ``search``: `starts` (8) per pair, `steps` (200), `radius` (how far from
              :math:`\theta^*`; 1000 max(1, its norm)), `checks` (8) along each segment, `seed` (0).

    Returns:
        An :class:`Inconsistency`: a float with `matrix` (a score per pair), `pair`, `witness`,
        `meaning` and `error`.

    Warning:
        - The score depends on how parameters are scaled: a unit of distance has no part in it, but
          epsilon is in units of the loss.
        - A network that has more parameters than its data determine has directions that one
          environment does not feel and another does. Its score is then infinite, whatever it has
          learned; what can be compared is the score within a `radius`, or with a `damping`.

    Example:
        Environment 0 does not care for the second parameter, environment 1 does:

        >>> import torch
        >>> flat = lambda p: (p * p * torch.tensor([1.0, 0.01])).sum()
        >>> steep = lambda p: (p * p * torch.tensor([1.0, 1.00])).sum()
        >>> score = inconsistency([flat, steep], torch.zeros(2), epsilon=0.1)
        >>> print(f"{score:.3f}", score.pair, score.meaning)
        10.000 (0, 1) exact for the quadratic model from whole Hessians
        >>> inconsistency([steep, steep], torch.zeros(2), epsilon=0.1) < 0.1001
        True
    """
    run = check_options(epsilon, method, against, tolerance, options)
    landscape = Landscape(losses, parameters)
    if method == "grid":
        check_grid(landscape.size, options.get("points"), options.get("memory"))
    wanted = _check_pairs(pairs, landscape.environments)
    heights = _check_losses(landscape, differentiable=method != "grid")
    question = Question(landscape, heights, epsilon, against, wanted, tolerance, progress)
    return run(question, **options)


def check_options(
    epsilon: float, method: str, against: str, tolerance: float, options: Mapping[str, Any]
) -> Callable[..., Inconsistency]:
    """Return the function of a method, once what it is given has been checked."""
    check_epsilon(epsilon)
    check_against(against)
    if method not in _METHODS:
        raise ValueError(
            f"Parameter `method` should be one of {', '.join(map(repr, _METHODS))}. "
            f"Found `method = {method!r}`."
        )
    if not tolerance >= 0:
        raise ValueError(
            f"Parameter `tolerance` should be 0 or more. Found `tolerance = {tolerance}`."
        )
    run = _METHODS[method]
    known = set(inspect.signature(run).parameters) - {"question"}
    if unknown := set(options) - known:
        raise TypeError(
            f"`method={method!r}` takes the options {', '.join(sorted(known))}. "
            f"Found {', '.join(sorted(unknown))}."
        )
    return run


@dataclass(frozen=True)
class WitnessCheck:
    """What came out when a witness was checked.

    Attributes:
        holds: Whether the whole path stays within epsilon and the value is reached at its end.
        excess: The largest abs(L_e - L_e(theta*)) along the path, over epsilon; 1 at most if the
            path stays inside.
        value: The pair's difference at the end of the path, computed anew.
    """

    holds: bool
    excess: float
    value: float


def check_witness(
    losses: Sequence[Callable[[Any], Tensor]],
    parameters: Parameters,
    score: Inconsistency,
    *,
    checks: int = 64,
) -> WitnessCheck:
    """Check the claim of a score at its witness, from nothing but the losses.

    Args:
        losses: The losses that the score was computed of.
        parameters: The minimum that it was computed at.
        score: The score.
        checks: Points at which the condition is checked on each segment of the path.

    Example:
        >>> import torch
        >>> losses = [lambda p: p.square().sum(), lambda p: 3 * p.square().sum()]
        >>> score = inconsistency(losses, torch.zeros(2), epsilon=0.1, method="search")
        >>> check_witness(losses, torch.zeros(2), score).holds
        True
    """
    if score.witness is None:
        raise ValueError("This score has no witness.")
    landscape = Landscape(losses, parameters)
    path = score.witness.path.to(landscape.origin)
    if path.shape[1:] != landscape.origin.shape or not torch.equal(path[0], landscape.origin):
        raise ValueError(
            "Parameter `parameters` should be the minimum that the score was computed at. Found "
            "another point than the witness starts from."
        )
    e, other = score.witness.pair
    height = landscape.value(e, landscape.origin)
    shares = torch.linspace(0, 1, checks + 2)[1:].to(path)
    excess = 0.0
    for first, last in itertools.pairwise(path):
        along = first + shares[:, None] * (last - first)
        along[-1] = last
        for point in along:
            inner = abs(landscape.value(e, point) - height) / score.epsilon
            excess = max(excess, math.inf if math.isnan(inner) else inner)
    base = landscape.value(e, path[-1]) if score.against == "point" else height
    value = abs(landscape.value(other, path[-1]) - base)
    # Room for what rounding does to the losses.
    slack = 1e3 * torch.finfo(path.dtype).eps * (abs(height) + score.epsilon)
    reached = value >= score.witness.value - slack * max(1.0, score.witness.value / score.epsilon)
    return WitnessCheck(reached and excess <= 1 + slack / score.epsilon, excess, value)


def _check_losses(landscape: Landscape, *, differentiable: bool) -> list[float]:
    """Return the losses at theta*, or raise if they are no fit ones."""
    heights = []
    for e in range(landscape.environments):
        found = landscape.loss(e, landscape.origin.clone().requires_grad_())
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(
                "Each of `losses` should return one number as a tensor. Found "
                f"{what} from that of environment {e}."
            )
        if differentiable and not found.requires_grad:
            raise ValueError(
                "Parameter `losses` should be differentiable functions of their argument. Found "
                f"that of environment {e} without a gradient: does it use another copy of the "
                "parameters, `detach`, `item` or `no_grad`? `method='grid'` needs no gradient."
            )
        value = float(found.detach())
        if not math.isfinite(value):
            raise ValueError(
                "Parameter `losses` should be finite at `parameters`. Found the loss "
                f"{value} in environment {e}."
            )
        again = landscape.value(e, landscape.origin)
        rounding = max(1e-6, 100 * torch.finfo(landscape.origin.dtype).eps)
        if abs(again - value) > rounding * max(abs(value), abs(again)):
            raise ValueError(
                "Parameter `losses` should give the same number each time. Found "
                f"{value:.8g} and then {again:.8g} in environment {e}. Put the module into eval "
                "mode, or fix the seed within the loss."
            )
        heights.append(value)
    return heights


def _check_pairs(
    pairs: Sequence[tuple[int, int]] | None, environments: int
) -> list[tuple[int, int]]:
    if environments < 2:
        raise ValueError(
            "Parameter `losses` should have two environments or more. Found one: there is nothing "
            "to be consistent with."
        )
    everything = [(e, other) for e in range(environments) for other in range(environments)]
    if pairs is None:
        return everything
    wanted = list(pairs)
    if not wanted or not all(pair in everything for pair in wanted):
        raise ValueError(
            "Parameter `pairs` should be pairs (e, e') of environments from 0 to "
            f"{environments - 1}. Found `pairs = {pairs!r}`."
        )
    return [(int(e), int(other)) for e, other in wanted]
