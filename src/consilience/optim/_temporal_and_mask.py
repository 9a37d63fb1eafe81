"""An AND-mask over time, for any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from consilience.optim._bits import keep_
from consilience.optim._masked_step import (
    Decay,
    Masked,
    check_choices,
    check_step,
    masked_step,
)
from consilience.optim._pieces import pieces, room_on
from consilience.optim._sign_average import (
    average_dtype,
    bar,
    check_gradients,
    check_temporal,
    check_votes_of,
    keep_above_,
)
from consilience.rules._rescaling import Rescale, check_rescale, rescale_kept

_KEY = "temporal_and_mask"


class TemporalAndMask(Optimizer):
    r"""Any optimizer, with an AND-mask over time: only what signs agree on over steps is learned.

    .. math::
        a \gets \beta a + (1 - \beta)\, \mathrm{sign}(g), \qquad
        \text{keep where } |a| \ge \tau

    It takes the place of the optimizer that it wraps: learning rate schedulers, ``GradScaler``
    and checkpoints are given this one. Groups and state are those of the wrapped optimizer.

    ``TemporalAndMask(Adam, on="update")`` differs from :class:`TemporalAndAdam` by what is
    Adam's: its bias correction, and ``eps`` outside the root.

    Args:
        optimizer: Any optimizer but LBFGS and SparseAdam.
        beta: :math:`\beta`, in [0, 1), the rate of the average of the gradient's sign.
        threshold: :math:`\tau`, in [0, 1]; 0 masks nothing. Choose the two together, with
            :func:`share_of_voters` and :func:`temporal_null_keep_rate`.
        on: What to mask: the ``"gradient"`` that the optimizer sees (``p.grad`` is replaced), its
            ``"update"``, while its averages see the whole gradient, or ``"frozen"``: the update
            and the optimizer's own averages.
        decay: When the weight decay of the wrapped optimizer happens: ``"before"``, where the
            optimizer has it; ``"after"``, as a second update of all weights; ``"none"``.
            See :func:`masked_step`.
        bias_correction: Whether to divide the average by :math:`1 - \beta^t`. Without, nothing
            is kept until :math:`1 - \beta^t \ge \tau`.
        rescale: What to do about the magnitude that the mask takes from the gradient of a layer,
            as in :class:`~consilience.AndMask`: ``"none"``, ``"count"`` or ``"norm"``.
        max_rescale: The largest factor of the rescaling; None for no limit.

    Warning:
        - Gradients that are clipped before the step are clipped before the mask: signs do not
          change, and what is left is at most as long. ``rescale`` comes after: ``"count"`` may
          make it longer again. docs/temporal.md shows how to clip what the optimizer sees.
        - Each step looks whether all gradients are finite and raises if not, so it waits for the
          device. It leaves everything as it was.

    Memory: a float per parameter, and while stepping what :func:`masked_step` needs.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = TemporalAndMask(torch.optim.SGD([weight], lr=0.1), beta=0.5, threshold=0.8)
        >>> for first, second in [(1.0, 1.0), (1.0, -1.0), (1.0, 1.0)]:
        ...     weight.grad = torch.tensor([first, second])
        ...     optimizer.step()
        >>> (weight != 0).tolist()  # the signs of the second gradient do not agree
        [True, False]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        beta: float,
        threshold: float,
        on: Masked = "gradient",
        *,
        decay: Decay = "before",
        bias_correction: bool = False,
        rescale: Rescale | bool = "none",
        max_rescale: float | None = None,
    ) -> None:
        check_choices("on", on, decay)
        check_step(optimizer, {}, on, decay)
        check_temporal("beta", beta, threshold, bias_correction=bias_correction)
        self.optimizer = optimizer
        self.beta, self.threshold = float(beta), float(threshold)
        self.on, self.decay, self.bias_correction = on, decay, bias_correction
        self._averages: dict[Tensor, tuple[int, Tensor]] = {}
        self._known = _parameters(optimizer)
        for parameter in self._known:
            check_votes_of(parameter, "beta", self.beta)
        self.rescale, self.max_rescale = check_rescale(rescale, max_rescale)
        if self.rescale != "none" and on != "gradient":
            raise ValueError(
                "`rescale` gives a layer's gradient back what the mask took from it, and there is "
                f"no masked gradient. Found `rescale = {rescale!r}` with `on = {on!r}`. Set "
                "`on = 'gradient'`, or leave `rescale` out."
            )
        # The constructor of the base class would make groups of its own. This makes its hooks.
        super().__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default settings of the wrapped optimizer."""
        return self.optimizer.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, and return what the closure returned if one was given to evaluate the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        check_gradients(self.param_groups, "TemporalAndMask")
        keep: dict[Tensor, Tensor | None] = {}
        for parameter in self._known:
            if parameter.grad is not None:
                keep[parameter] = self._vote(parameter, parameter.grad)
        masked_step(self.optimizer, keep, masked=self.on, decay=self.decay)
        return loss

    def _vote(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Count a gradient's signs, and mask it, or return where they agree with those before."""
        if parameter not in self._averages:
            zeros = torch.zeros_like(parameter, dtype=average_dtype(parameter))
            self._averages[parameter] = (0, zeros)
        steps, average = self._averages[parameter]
        self._averages[parameter] = (steps + 1, average)
        counted = steps + 1 if self.bias_correction else None
        least = bar(self.threshold, self.beta, counted, average.dtype)
        in_place = self.on == "gradient" and self.rescale == "none"
        for g, a in pieces((gradient, average), room_on(gradient.device)):
            a.lerp_(g.sign().to(a.dtype), 1 - self.beta)
            if in_place and g.dtype == a.dtype:
                keep_above_(g, a, least)
            elif in_place:
                keep_(g, a.abs() > least)
        if in_place:
            return None
        keep = average.abs() > least
        if self.on == "gradient":
            kept = keep_(gradient.clone(), keep)
            gradient.copy_(rescale_kept(kept, gradient, keep, self.rescale, self.max_rescale))
        return keep

    def _votes_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the votes as state of a parameter, to be frozen with the rest of it."""
        found = self._averages.get(parameter)
        return {} if found is None else {"sign_avg": found[1]}

    def _check_parameters(self) -> None:
        now = _parameters(self.optimizer)
        if len(now) != len(self._known) or any(
            p is not known for p, known in zip(now, self._known, strict=True)
        ):
            raise ValueError(
                "The wrapped optimizer was given other parameters since TemporalAndMask wrapped "
                "it, and the votes belong to the old ones. Add parameters with "
                "`TemporalAndMask.add_param_group`; for a new model wrap a new optimizer."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer, with settings of their own."""
        self._check_parameters()
        self.optimizer.add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                check_votes_of(parameter, "beta", self.beta)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._known = _parameters(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer and, beside it, the votes."""
        votes = {
            i: {"step": self._averages[p][0], "sign_avg": self._averages[p][1]}
            for i, p in enumerate(self._known)
            if p in self._averages
        }
        return {**self.optimizer.state_dict(), _KEY: votes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        if _KEY not in state_dict:
            raise ValueError(
                "This state has no votes: it is that of an optimizer without a temporal mask. "
                "Load it with `mask.optimizer.load_state_dict(...)`, and votes begin anew."
            )
        self._check_parameters()
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != _KEY})
        self._averages = {}
        for i, saved in state_dict[_KEY].items():
            parameter = self._known[int(i)]
            average = saved["sign_avg"].to(parameter.device, average_dtype(parameter), copy=True)
            self._averages[parameter] = (int(saved["step"]), average)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: all but the hooks."""
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_optimizer_")}

    def __repr__(self) -> str:
        """Return how the mask was made."""
        return (
            f"TemporalAndMask({self.optimizer!r}, beta={self.beta}, threshold={self.threshold}, "
            f"on={self.on!r}, decay={self.decay!r}, bias_correction={self.bias_correction}, "
            f"rescale={self.rescale!r}, max_rescale={self.max_rescale})"
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
