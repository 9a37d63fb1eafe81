r"""Means of Hessians, and what their determinants say about the inconsistency score.

Hessians come stacked over environments, either whole, ``[environments, n, n]``, or as their
diagonals, ``[environments, n]``. Everything here needs torch alone.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

__all__ = ["arithmetic_mean", "determinant_bound", "geometric_mean", "log_determinant_ratio"]


def arithmetic_mean(hessians: Tensor) -> Tensor:
    r"""Return :math:`H_+ = \frac{1}{d} \sum_e H_e`, the Hessian of the pooled loss.

    Example:
        >>> arithmetic_mean(torch.tensor([[0.05, 1.0], [1.0, 0.05]]))
        tensor([0.5250, 0.5250])
    """
    return check_hessians(hessians).mean(0)


def geometric_mean(
    hessians: Tensor, *, tolerance: float = 1e-12, max_iterations: int = 200
) -> Tensor:
    r"""Return the geometric (Karcher) mean :math:`H_\wedge` of positive definite matrices.

    It is the unique positive definite solution :math:`X` of
    :math:`\sum_e \log(H_e^{-1} X) = 0`, the point with the least sum of squared Riemannian
    distances to all :math:`H_e` (Ando, Li and Mathias, 2004).

    - Diagonals (``[environments, n]``): the geometric mean of the entries; zeros are allowed.
    - Two matrices: :math:`A^{1/2} (A^{-1/2} B A^{-1/2})^{1/2} A^{1/2}`.
    - More: the iteration of Bini and Iannazzo (2013),
      :math:`X \leftarrow X^{1/2} \exp(\vartheta \sum_e \log(X^{-1/2} H_e X^{-1/2})) X^{1/2}`,
      with their step :math:`\vartheta`, until the sum of logarithms vanishes.

    Args:
        hessians: ``[environments, n, n]``, or the diagonals ``[environments, n]``.
        tolerance: When to stop, on the norm of the mean logarithm relative to :math:`\sqrt n`
            (never below what the numbers' precision allows).
        max_iterations: When to give up, with an error.

    Returns:
        The mean, ``[n, n]`` or ``[n]``.

    Example:
        >>> geometric_mean(torch.tensor([[0.0625, 1.0], [1.0, 0.0625]]))
        tensor([0.2500, 0.2500])
    """
    hessians = check_hessians(hessians)
    if hessians.dim() == 2:
        return hessians.log().mean(0).exp()
    check_definite(hessians)
    if len(hessians) == 1:
        return hessians[0]
    if len(hessians) == 2:
        root, inverse = _roots(hessians[0])
        return _symmetric(root @ _power(inverse @ hessians[1] @ inverse, 0.5) @ root)
    return _karcher(hessians, tolerance, max_iterations)


def log_determinant_ratio(hessians: Tensor) -> float:
    r"""Return :math:`\log R = \log\det H_+ - \log\det H_\wedge`, which is 0 or more.

    How many times (in logarithms) the volume of the arithmetic mean exceeds that of the
    geometric one. Computed from eigenvalues in log space, so it neither over- nor underflows,
    and without the geometric mean itself, since :math:`\log\det H_\wedge = \frac1d \sum_e
    \log\det H_e`. Infinite where some :math:`H_e` is singular and :math:`H_+` is not. A
    direction that is flat in every environment counts for neither.

    Example:
        >>> pair = torch.tensor([[0.01, 1.0], [1.0, 0.01]])
        >>> round(math.exp(log_determinant_ratio(pair)), 1)
        25.5
    """
    hessians = check_hessians(hessians)
    if hessians.dim() == 2:
        seen = (hessians > 0).any(0)
        arithmetic = hessians.mean(0)[seen].log().sum()
        geometric = hessians[:, seen].log().mean(0).sum()
    else:
        # Work inside the range of the sum: what is flat for all is a factor of 1 for both.
        values, vectors = torch.linalg.eigh(hessians.mean(0))
        seen = values > _rank_tolerance(values)
        basis = vectors[:, seen]
        inside = torch.linalg.eigvalsh(basis.T @ hessians @ basis)
        floor = _rank_tolerance(inside)
        arithmetic = values[seen].log().sum()
        geometric = torch.where(inside > floor, inside, 0.0).log().sum(-1).mean()
    return max(0.0, float(arithmetic - geometric))


def determinant_bound(
    hessians: Tensor,
    epsilon: float,
    *,
    form: Literal["sharp", "corrected", "printed"] = "corrected",
) -> float:
    r"""Bound the inconsistency score of quadratic losses by determinants of Hessian means.

    With :math:`R = \det H_+ / \det H_\wedge` of a pair of environments:

    ============= ================================================= ======================
    ``sharp``     :math:`\epsilon (R + \sqrt{R^2 - 1})^2`           equality in one dimension
    ``corrected`` :math:`\epsilon (4 R^2 - 2)`                      the proposition's own way
    ``printed``   :math:`2 \epsilon R^2`                            as printed; **not a bound**
    ============= ================================================= ======================

    Why: let :math:`r_i` be the generalised eigenvalues of the pair (for diagonal Hessians,
    ratios of curvatures). The score is :math:`\epsilon \max_i \max(r_i, 1/r_i)`, and
    :math:`R = \prod_i \rho_i` with :math:`\rho_i = (r_i + 1) / (2 \sqrt{r_i}) \ge 1`, so
    :math:`\max(r_i, 1/r_i) = (\rho_i + \sqrt{\rho_i^2 - 1})^2 \le r_i + 1/r_i = 4 \rho_i^2 - 2`,
    and no :math:`\rho_i` exceeds :math:`R`. Determinants do not care for the basis, so none of
    this needs diagonal Hessians. The printed form loses a factor: it fails in one dimension as
    soon as :math:`r > 1 + \sqrt 2` (curvatures 1 and 4: score 4 epsilon, printed 3.125).

    Args:
        hessians: ``[environments, n, n]`` or diagonals ``[environments, n]``; with more than
            two environments the bound is the largest over pairs, as the score is.
        epsilon: The score's epsilon.
        form: Which of the three.

    Example:
        >>> pair = torch.tensor([[1.0], [4.0]])
        >>> forms = ("sharp", "corrected", "printed")
        >>> [round(determinant_bound(pair, 1.0, form=form), 3) for form in forms]
        [4.0, 4.25, 3.125]
    """
    check_epsilon(epsilon)
    hessians = check_hessians(hessians)
    if len(hessians) == 1:
        return epsilon
    logs = max(
        log_determinant_ratio(hessians[[a, b]]) for a, b in combinations(range(len(hessians)), 2)
    )
    ratio = math.exp(logs) if logs < 300 else math.inf
    if form == "printed":
        return 2 * epsilon * ratio**2
    if form == "corrected":
        return epsilon * (4 * ratio**2 - 2)
    if form == "sharp":
        return epsilon * (ratio + math.sqrt(ratio**2 - 1)) ** 2
    raise ValueError(
        f"Parameter `form` should be 'sharp', 'corrected' or 'printed'. Found `form = {form!r}`."
    )


def check_epsilon(epsilon: float) -> None:
    """Raise unless epsilon is a positive number."""
    try:
        fit = epsilon > 0 and math.isfinite(epsilon)
    except TypeError:
        fit = False
    if not fit:
        raise ValueError(
            f"Parameter `epsilon` should be positive and finite. Found `epsilon = {epsilon!r}`."
        )


def check_is_tensor(hessians: Tensor) -> None:
    """Raise unless Hessians came stacked in a tensor."""
    if not isinstance(hessians, Tensor):
        raise TypeError(
            "Parameter `hessians` should be a tensor, with environments stacked along its first "
            f"axis (`torch.stack`, `torch.as_tensor`). Found `{type(hessians).__name__}`."
        )


def check_hessians(hessians: Tensor) -> Tensor:
    """Return Hessians as floating point, or raise: shape, finiteness, symmetry, semidefiniteness.

    What rounding leaves below zero is cut off on diagonals; matrices stay as they are. Half
    precision becomes single.
    """
    check_is_tensor(hessians)
    shape = list(hessians.shape)
    square = hessians.dim() == 3 and shape[1] == shape[2]
    if not (square or hessians.dim() == 2) or 0 in shape:
        raise ValueError(
            "Parameter `hessians` should be stacked as [environments, n, n], or as diagonals "
            f"[environments, n]. Found `hessians.shape = {shape}`."
        )
    if not hessians.is_floating_point():
        hessians = hessians.to(torch.get_default_dtype())
    if hessians.dtype.itemsize < 4:
        hessians = hessians.float()
    if not hessians.isfinite().all():
        raise ValueError("Parameter `hessians` should be finite. Found NaN or infinity in it.")
    if hessians.dim() == 2:
        values = hessians
    else:
        skew = (hessians - hessians.mT).abs().amax()
        if skew > 1e3 * torch.finfo(hessians.dtype).eps * hessians.abs().amax():
            raise ValueError(
                f"Parameter `hessians` should be symmetric. Found entries that differ by {skew:.3g}"
                " from their mirror image."
            )
        values = torch.linalg.eigvalsh(hessians)
    # Each environment has a scale of its own, as in `quadratic`.
    low, scale = values.amin(1), values.abs().amax(1)
    wrong = low < -1e3 * torch.finfo(hessians.dtype).eps * scale
    if wrong.any():
        e = int(wrong.nonzero()[0])
        raise ValueError(
            "Parameter `hessians` should be positive semidefinite. Found the eigenvalue "
            f"{low[e]:.4g} in environment {e}. There the loss falls away from the point, so it is "
            "no minimum of that environment; descend further, or use `method='search'`."
        )
    return hessians.clamp_min(0) if hessians.dim() == 2 else hessians


def check_definite(hessians: Tensor) -> None:
    """Raise unless matrices that passed ``check_hessians`` have no flat direction."""
    values = torch.linalg.eigvalsh(hessians)
    flat = values.amin(1) <= _rank_tolerance(values).squeeze(-1)
    if flat.any():
        e = int(flat.nonzero()[0])
        raise ValueError(
            "Parameter `hessians` should be positive definite. Found the eigenvalue "
            f"{values[e].amin():.3g} in environment {e}, which is 0 to working precision. Add a "
            "damping to every Hessian: `hessians + damping * torch.eye(n)`."
        )


def _rank_tolerance(values: Tensor) -> Tensor:
    """Return the size below which eigenvalues ``[..., n]`` are zero to working precision."""
    eps = torch.finfo(values.dtype).eps
    return 10 * values.shape[-1] * eps * values.abs().amax(-1, keepdim=True)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(_symmetric(matrix))
    powered: Tensor = (vectors * values.pow(exponent).unsqueeze(-2)) @ vectors.mT
    return powered


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    return _power(matrix, 0.5), _power(matrix, -0.5)


def _karcher(hessians: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    n = hessians.shape[-1]
    # The logarithms cannot be known better than the condition of the matrices allows.
    values = torch.linalg.eigvalsh(hessians)
    condition = float((values.amax(1) / values.amin(1)).amax())
    tolerance = max(tolerance, 20 * torch.finfo(hessians.dtype).eps * math.sqrt(condition))
    mean, residual = hessians.mean(0), math.inf
    for _ in range(max_iterations):
        root, inverse = _roots(mean)
        values, vectors = torch.linalg.eigh(_symmetric(inverse @ hessians @ inverse))
        logs = ((vectors * values.log().unsqueeze(-2)) @ vectors.mT).sum(0)
        residual = float(logs.norm()) / len(hessians) / math.sqrt(n)
        if residual <= tolerance:
            return mean
        ratio = (values[:, -1] / values[:, 0]).clamp_min(1.0)
        # (c + 1) / (c - 1) log c, which tends to 2 as c tends to 1.
        weights = torch.where(ratio - 1 > 1e-4, (ratio + 1) / (ratio - 1) * ratio.log(), 2.0)
        values, vectors = torch.linalg.eigh(_symmetric(logs) * (2 / weights.sum()))
        mean = _symmetric(root @ ((vectors * values.exp()) @ vectors.mT) @ root)
    raise RuntimeError(
        f"The geometric mean did not settle in {max_iterations} iterations (residual "
        f"{residual:.3g}, tolerance {tolerance:.3g}). Add a damping to the Hessians, use float64, "
        "or raise `max_iterations`."
    )
