"""The paper's algorithm: Adam that steps where the signs of a weight's gradient agree in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from consilience.optim._pieces import pieces, room_on
from consilience.optim._sign_average import (
    average_dtype,
    bar,
    check_beta,
    check_gradients,
    check_temporal,
    check_votes_of,
    keep_above_,
)

PUBLISHED_SETTINGS: tuple[dict[str, Any], ...] = tuple(
    {"lr": lr, "betas": (beta1, 0.999, beta3), "threshold": threshold, "weight_decay": decay}
    for lr, beta1, beta3, threshold, decay in (
        (0.0078, 0.21, 0.79, 0.36, 0.057),
        (0.0072, 0.26, 0.86, 0.40, 0.041),
        (0.0080, 0.23, 0.84, 0.41, 0.045),
        (0.0068, 0.33, 0.72, 0.47, 0.077),
        (0.0063, 0.67, 0.65, 0.47, 0.080),
    )
)
"""The settings of the paper's five best runs on CoinRun, best first (table 3).

``TemporalAndAdam(model.parameters(), **PUBLISHED_SETTINGS[0])``. The paper does not give
:math:`\\beta_2`; 0.999 is Adam's.
"""


_AVERAGES = ("exp_avg", "exp_avg_sq", "sign_avg")


class TemporalAndAdam(Optimizer):
    r"""Adam with an AND-mask over time: a weight moves only while its gradient's sign persists.

    For data that comes one environment at a time, so that the environments' votes have to be
    collected over steps. Algorithm 1 of *Learning explanations that are hard to vary* (appendix
    B.6), to the letter:

    .. math::
        m &\gets \beta_1 m + (1 - \beta_1)\, g \\
        v &\gets \beta_2 v + (1 - \beta_2)\, g^2 \\
        a &\gets \beta_3 a + (1 - \beta_3)\, \mathrm{sign}(g) \\
        \theta &\gets \theta - \alpha\, [\,|a| \ge \tau\,]\; m / \sqrt{v + \epsilon} \\
        \theta &\gets \theta - \alpha \lambda\, \theta

    It is the update that is masked, not the gradient: the averages of a masked weight go on.
    To choose :math:`\beta_3` and :math:`\tau` together, see :func:`share_of_voters` and
    :func:`temporal_null_keep_rate`.

    Args:
        params: Parameters, named parameters or groups of them. Every setting below may differ
            between groups.
        lr: :math:`\alpha`.
        betas: :math:`(\beta_1, \beta_2, \beta_3)`, each in [0, 1): the rates of the averages of
            the gradient, of its square and of its sign.
        threshold: :math:`\tau`, in [0, 1]; 0 masks nothing.
        eps: :math:`\epsilon`, positive. It stands inside the root.
        weight_decay: :math:`\lambda`.
        bias_correction: Whether to divide each average by :math:`1 - \beta^t`, as Adam does with
            its two, so that the first steps are neither too long nor all masked.
        decay: ``"after"``: a second update after the masked one, which shrinks every weight,
            masked or not (the paper). ``"before"``: :math:`g \gets g + \lambda \theta` first of
            all, as in ``torch.optim.Adam``, so that decay takes part in all three averages and
            votes.
        maximize: Ascend instead of descend. Decay shrinks all the same.
        foreach: False works on one parameter at a time, True or None on many small ones
            together. Same results.

    Warning:
        - Without ``bias_correction`` nothing moves until :math:`1 - \beta_3^t \ge \tau`, and
          Adam's early steps are up to :math:`(1 - \beta_1^t) / \sqrt{1 - \beta_2^t}` times
          ``lr``, which for its usual rates is 3.2 at once and 6.6 after a dozen steps.
        - ``eps = 1e-8`` inside the root weighs as much as ``1e-4`` outside it, where
          ``torch.optim.Adam`` has it.
        - A gradient of exactly 0 is a vote for nobody.
        - Each step looks whether all gradients are finite and raises if not, so it waits for the
          device once. It leaves everything as it was.
        - There is no ``differentiable``: sign and mask have derivative 0 almost everywhere, and
          what would come back through the step is not its sensitivity.
        - Parameters of half precision have averages in single precision.

    Memory: three floats per parameter, and while stepping one more for a part of the parameters
    (a quarter of a million components on a processor, 16 million elsewhere, or the largest).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = TemporalAndAdam([weight], lr=0.1, betas=(0.9, 0.999, 0.5), threshold=0.8)
        >>> for first, second in [(1.0, 1.0), (1.0, -1.0), (1.0, 1.0)]:
        ...     weight.grad = torch.tensor([first, second])
        ...     optimizer.step()
        >>> (weight != 0).tolist()  # the signs of the second gradient do not agree
        [True, False]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.79),
        threshold: float = 0.36,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = False,
        decay: Literal["after", "before"] = "after",
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "threshold": threshold,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "decay": decay,
            "maximize": maximize,
            "foreach": foreach,
        }
        _check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with settings of their own where the group names them."""
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for parameter in group["params"]:
                check_votes_of(parameter, "betas[2]", group["betas"][2])
                _check_eps(parameter, group["eps"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, and return what the closure returned if one was given to evaluate the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compiling = torch.compiler.is_compiling()
        for bucket in self._prepare(compiling=compiling):
            _average(bucket)
            (_move_compiled if compiling else _move)(bucket)
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _prepare(self, *, compiling: bool = False) -> list[_Bucket]:
        """Check the gradients, count the step, and sort the work into buckets."""
        for group in self.param_groups:
            _check_settings(group)  # which may have been changed since
        check_gradients(self.param_groups, "TemporalAndAdam")
        buckets: list[_Bucket] = []
        for group in self.param_groups:
            used, last = 0, None
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                room = 0 if group["foreach"] is False else room_on(parameter.device)
                state = self._state_of(parameter)
                averages = [state[key] for key in _AVERAGES]
                numbers = _numbers(group, state)
                whole = (parameter, parameter.grad, *averages)
                kind = (parameter.device, parameter.dtype, averages[0].dtype)
                for piece in pieces(whole, 0 if compiling else room):
                    used += piece[0].numel()
                    if used > room or kind != last:
                        buckets.append(_Bucket(group))
                        used, last = piece[0].numel(), kind
                    buckets[-1].add(piece, numbers)
        if compiling:
            for bucket in buckets:
                bucket.to_tensors()
        return buckets

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for key in _AVERAGES:
                state[key] = torch.zeros_like(parameter, dtype=average_dtype(parameter))
        state["step"] += 1
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; nothing is shared with it."""
        for state in state_dict["state"].values():
            if "sign_avg" not in state:
                raise ValueError(
                    "This state has no votes (`sign_avg`): it is that of another optimizer. "
                    f"Found {', '.join(f'`{key}`' for key in state)}."
                )
        for group in state_dict["param_groups"]:
            _check_settings({**self.defaults, **group})
        super().load_state_dict(state_dict)
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        theirs = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for parameter, key in zip(ours, theirs, strict=True):
            # The base class casts averages to the type of the parameter, and copies nothing.
            for name, value in state_dict["state"].get(key, {}).items():
                like = self.state[parameter][name]
                dtype = like.dtype if name == "step" else average_dtype(parameter)
                self.state[parameter][name] = value.detach().to(like.device, dtype, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickled or loaded state, of this version or an earlier one."""
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)


@dataclass
class _Bucket:
    """Parameters, or pieces of them, that step together, and the numbers that differ."""

    group: dict[str, Any]
    params: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    sign_avgs: list[Tensor] = field(default_factory=list)
    scratch: list[Tensor] = field(default_factory=list)
    eps: list[Any] = field(default_factory=list)
    rates: list[Any] = field(default_factory=list)
    bars: list[Any] = field(default_factory=list)
    shrink: Any = field(init=False)

    def __post_init__(self) -> None:
        self.shrink = 1 - float(self.group["lr"]) * self.group["weight_decay"]

    def add(self, tensors: Sequence[Tensor], numbers: tuple[float, float, float]) -> None:
        lists = (self.params, self.gradients, self.exp_avgs, self.exp_avg_sqs, self.sign_avgs)
        for into, tensor in zip(lists, tensors, strict=True):
            into.append(tensor)
        for numbers_into, number in zip((self.eps, self.rates, self.bars), numbers, strict=True):
            numbers_into.append(number)

    def to_tensors(self) -> None:
        """Make tensors of what changes from step to step: each new number would be compiled."""
        self.eps, self.rates, self.bars = (
            list(torch.tensor(numbers, dtype=torch.float64).unbind())
            for numbers in (self.eps, self.rates, self.bars)
        )
        self.shrink = torch.tensor(self.shrink, dtype=torch.float64)


def _numbers(group: dict[str, Any], state: dict[str, Tensor]) -> tuple[float, float, float]:
    """Return what a parameter has for eps, for the learning rate, and as bar for its signs."""
    beta1, beta2, beta3 = group["betas"]
    eps, rate, steps = group["eps"], -float(group["lr"]), None
    if group["bias_correction"]:
        # (m / c1) / sqrt(v / c2 + eps) = sqrt(c2) / c1 * m / sqrt(v + eps c2)
        steps = state["step"].item()
        correction1, correction2 = 1 - beta1**steps, 1 - beta2**steps
        eps, rate = eps * correction2, rate * correction2**0.5 / correction1
    return eps, rate, bar(group["threshold"], beta3, steps, state["sign_avg"].dtype)


def _average(bucket: _Bucket) -> None:
    """Take the gradients into the three averages."""
    group = bucket.group
    beta1, beta2, beta3 = group["betas"]
    dtype = bucket.exp_avgs[0].dtype
    gradients = [gradient.to(dtype) for gradient in bucket.gradients]
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    if group["weight_decay"] != 0 and group["decay"] == "before":
        gradients = list(torch._foreach_add(gradients, bucket.params, alpha=group["weight_decay"]))
    _mix_(bucket.exp_avgs, gradients, beta1)
    torch._foreach_mul_(bucket.exp_avg_sqs, beta2)
    torch._foreach_addcmul_(bucket.exp_avg_sqs, gradients, gradients, 1 - beta2)
    bucket.scratch = list(torch._foreach_sign(gradients))
    _mix_(bucket.sign_avgs, bucket.scratch, beta3)


def _mix_(averages: list[Tensor], values: list[Tensor], beta: float) -> None:
    """Set averages to beta x averages + (1 - beta) x values."""
    if beta >= 0.5:
        torch._foreach_lerp_(averages, values, 1 - beta)
    else:
        # Interpolation is told 1 - beta, which rounds here, and takes beta from it: a small rate
        # would come out wrong where an old gradient is far larger than those that follow.
        torch._foreach_mul_(averages, beta)
        torch._foreach_add_(averages, values, alpha=1 - beta)


def _move(bucket: _Bucket) -> None:
    """Move the parameters where their signs agree, with no more memory than the signs took."""
    scales = bucket.scratch
    torch._foreach_copy_(scales, bucket.exp_avg_sqs)
    torch._foreach_add_(scales, bucket.eps)
    torch._foreach_rsqrt_(scales)
    for scale, average, least in zip(scales, bucket.sign_avgs, bucket.bars, strict=True):
        keep_above_(scale, average, least)
    torch._foreach_addcmul_(bucket.params, bucket.exp_avgs, scales, bucket.rates)
    if bucket.group["weight_decay"] != 0 and bucket.group["decay"] == "after":
        torch._foreach_mul_(bucket.params, bucket.shrink)
    scales.clear()


def _move_compiled(bucket: _Bucket) -> None:
    """Do the same in operations that a compiler fuses, with tensors for numbers."""
    for parameter, m, v, a, eps, rate, least in zip(
        bucket.params,
        bucket.exp_avgs,
        bucket.exp_avg_sqs,
        bucket.sign_avgs,
        bucket.eps,
        bucket.rates,
        bucket.bars,
        strict=True,
    ):
        scale = torch.where(a.abs() > least, torch.rsqrt(v + eps), 0)
        parameter.add_(m * scale * rate)
        if bucket.group["weight_decay"] != 0 and bucket.group["decay"] == "after":
            parameter.mul_(bucket.shrink)


def _check_settings(settings: dict[str, Any]) -> None:
    lr = settings["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"`lr` should be one number. Found a tensor of shape {list(lr.shape)}.")
    for name, kinds in (("lr", Real | Tensor), ("eps", Real), ("weight_decay", Real)):
        if not isinstance(settings[name], kinds):
            raise TypeError(f"`{name}` should be a number. Found `{name} = {settings[name]!r}`.")
    if not lr >= 0:  # also refuses NaN
        raise ValueError(f"`lr` should be 0 or more. Found `lr = {lr!r}`.")
    betas = settings["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 3:
        raise ValueError(
            "`betas` should be three numbers, for the averages of the gradient, of its square and "
            f"of its sign. Found `betas = {betas!r}`."
        )
    for i, beta in enumerate(betas):
        check_beta(f"betas[{i}]", beta)
    check_temporal(
        "betas[2]",
        betas[2],
        settings["threshold"],
        bias_correction=settings["bias_correction"],
    )
    if not settings["eps"] > 0:
        raise ValueError(
            "`eps` should be positive: inside the root it is what keeps a weight that has had no "
            f"gradient from 0 / 0. Found `eps = {settings['eps']!r}`."
        )
    if not settings["weight_decay"] >= 0:
        raise ValueError(
            "`weight_decay` should be 0 or more. "
            f"Found `weight_decay = {settings['weight_decay']!r}`."
        )
    if settings["decay"] not in ("after", "before"):
        raise ValueError(
            f"`decay` should be 'after' or 'before'. Found `decay = {settings['decay']!r}`."
        )


def _check_eps(parameter: Tensor, eps: float) -> None:
    dtype = average_dtype(parameter)
    if eps < torch.finfo(dtype).tiny:
        raise ValueError(
            f"`eps` should be at least {torch.finfo(dtype).tiny:.2g} for parameters of "
            f"{parameter.dtype}, whose averages are in {dtype}: a smaller one is 0 there. "
            f"Found `eps = {eps!r}`."
        )
