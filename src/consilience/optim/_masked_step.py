"""One step of any optimizer in which masked components are treated as one chooses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer, Rprop, SparseAdam

from consilience.optim._bits import put_back_
from consilience.optim._sign_average import check_gradients

Masked = Literal["gradient", "update", "frozen"]
"""What a mask holds back: the gradient, the update, or the update and the optimizer's state."""

Decay = Literal["before", "after", "none"]
"""When weight decay happens: in the optimizer's step, as a second update after it, or never."""

T = TypeVar("T")

_SHARED_STATE = ("step", "mu", "eta", "mu_product")
"""One number for a whole parameter, which a parameter without dimensions could be mistaken for."""

_BEGINS_AT_0 = (
    "momentum_buffer",
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
    *("square_avg", "grad_avg", "acc_delta", "sum", "ax", "prev", "sign_avg"),
)
"""State that is 0 before the first step, by the names that optimizers give it."""


def masked_step(
    optimizer: Optimizer,
    keep: Mapping[Tensor, Tensor | None],
    *,
    masked: Masked = "gradient",
    decay: Decay = "before",
    step: Callable[[], T] | None = None,
) -> T | Any:
    r"""Let an optimizer step, and hold masked components back.

    A weight whose *gradient* is 0 still moves: by the momentum it has, by Adam's moments, by
    weight decay. What else to hold back is the choice here:

    ============ ============================ =======================================
    ``masked``   masked weights               their part of the optimizer's state
    ============ ============================ =======================================
    ``gradient`` move as the optimizer likes  goes on, as ``p.grad`` says
    ``update``   keep their values            goes on, as ``p.grad`` says
    ``frozen``   keep their values            keeps its values
    ============ ============================ =======================================

    So what ``p.grad`` holds where ``keep`` is 0 matters for two of the three, and is the
    caller's to supply: 0 for ``gradient``; for ``update`` the plain gradient, which the averages
    are to see while the step is masked (the paper's temporal mask); anything finite for
    ``frozen``.

    ``decay`` says when the ``weight_decay`` of the optimizer's groups happens. ``before``: where
    the optimizer has it, be it in the gradient (Adam, SGD) or beside it (AdamW); as part of its
    step it is held back from masked weights with the rest. ``after``: not there, but as a second
    update :math:`\theta \gets (1 - \mathrm{lr} \cdot \lambda)\, \theta` of every weight, masked
    or not, once the step is done. ``none``: not at all.

    The values held back are copied before the step and put back after it, so all is exact, in
    loops, foreach and fused alike, for every optimizer that keeps its state as tensors of the
    parameter's shape; ``frozen`` raises where state is of any other. What it keeps as one number
    per parameter (the number of steps behind Adam's bias correction) goes on also for
    ``frozen``. The averages of torch's optimizers that are made on this step begin at 0 (at
    ``lr`` the step sizes of Rprop); where other state begins is not known, and ``frozen`` raises.

    Memory while stepping: nothing for ``gradient``, a copy of the parameters for ``update``,
    and of parameters and state for ``frozen`` (three floats per parameter with Adam).

    Args:
        optimizer: Any optimizer but LBFGS, which evaluates the loss itself, SparseAdam and, to
            freeze, Adafactor, which keeps averages of rows and columns.
        keep: For each parameter a tensor of its shape, 0 where a component is masked; None where
            nothing is. Parameters that are missing here, or that have no gradient, step as ever.
            Parameters that the optimizer does not have may be here (another optimizer steps
            them), but not all.
        masked: What to hold back.
        decay: When weight decay happens.
        step: What to call in place of ``optimizer.step``, if that is wrapped:
            ``lambda: scaler.step(optimizer)`` with a ``GradScaler``, which may skip the step, and
            then nothing is done here either.

    Returns:
        What ``step`` returned.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> for mask in (torch.tensor([True, True]), torch.tensor([True, False])):
        ...     weight.grad = torch.ones(2) * mask
        ...     masked_step(optimizer, {weight: mask}, masked="frozen")
        >>> weight.tolist()  # momentum alone would have moved the second to 0.05 as well
        [-0.44999998807907104, 0.5]
    """
    check_step(optimizer, keep, masked, decay)
    if not _has_hooks(optimizer):  # with the defaults, which need none
        return (step or optimizer.step)()
    changes = _Changes(optimizer, keep, masked, decay)
    hooks = (
        optimizer.register_step_pre_hook(changes.before),
        optimizer.register_step_post_hook(changes.after),
    )
    try:
        return (step or optimizer.step)()
    finally:
        for hook in hooks:
            hook.remove()
        changes.restore_decay()


class _Changes:
    """What is done around a step, by hooks, so that it is done only if the step is."""

    def __init__(
        self,
        optimizer: Optimizer,
        keep: Mapping[Tensor, Tensor | None],
        masked: Masked,
        decay: Decay,
    ) -> None:
        self.optimizer, self.keep, self.masked, self.decay = optimizer, keep, masked, decay
        self.depth = 0  # a subclass that calls the step of its base runs the hooks twice
        self.skipped = False
        self.weights: dict[Tensor, Tensor] = {}
        self.states: dict[Tensor, dict[str, Tensor]] = {}
        self.decays: list[tuple[dict[str, Any], float]] = []

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise ValueError(
                "A masked step takes no closure: it would replace the gradients that the mask "
                "belongs to. Evaluate the loss and its gradients first."
            )
        found_inf = getattr(optimizer, "found_inf", None)
        self.skipped = found_inf is not None and bool(found_inf)  # fused, under GradScaler
        if self.skipped:
            return
        if self.masked != "gradient":
            if found_inf is None:
                check_gradients(optimizer.param_groups, f"A step with `masked={self.masked!r}`")
            self._copy()
        if self.decay != "before":
            for group in optimizer.param_groups:
                if group.get("weight_decay"):
                    self.decays.append((group, group["weight_decay"]))
                    group["weight_decay"] = 0.0

    def _copy(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.keep.get(parameter) is None:
                    continue
                self.weights[parameter] = parameter.clone()
                if self.masked == "frozen":
                    state = self._componentwise(parameter)
                    self.states[parameter] = {key: state[key].clone() for key in state}

    @torch.no_grad()
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        self.depth -= 1
        if self.depth > 0 or self.skipped:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self.weights:
                    continue
                keep = self.keep[parameter]
                assert keep is not None  # noqa: S101
                masked = keep == 0
                put_back_(parameter, masked, self.weights.pop(parameter))
                if self.masked == "frozen":
                    old = self.states.pop(parameter)
                    for key, now in self._componentwise(parameter).items():
                        if key not in old:
                            old[key] = self._beginning(key, now, group)
                        put_back_(now, masked, old.pop(key))
        for group, decay in self.decays:
            if self.decay == "after":
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.mul_(1 - float(group["lr"]) * decay)
        self.restore_decay()

    def restore_decay(self) -> None:
        for group, decay in self.decays:
            group["weight_decay"] = decay
        self.decays.clear()

    def _componentwise(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter that has a value for each of its components."""
        found = {}
        state = dict(self.optimizer.state.get(parameter, {}))
        if hasattr(self.optimizer, "_votes_of"):  # TemporalAndMask
            state.update(self.optimizer._votes_of(parameter))
        for key, value in state.items():
            if key in _SHARED_STATE:
                continue
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                found[key] = value
            elif any(tensor.numel() > 1 for tensor in _tensors(value)):
                what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else "several"
                raise RuntimeError(
                    "`masked = 'frozen'` needs state of the shape of the parameter. "
                    f"{type(self.optimizer).__name__} keeps `{key}` of {what} "
                    f"for a parameter of shape {list(parameter.shape)}. Use `masked = 'update'`."
                )
        return found

    def _beginning(self, key: str, now: Tensor, group: dict[str, Any]) -> Tensor:
        """Return what state that was made on this step was before it."""
        if key == "step_size" and isinstance(self.optimizer, Rprop):
            return torch.full_like(now, float(group["lr"]))
        if key not in _BEGINS_AT_0:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} made `{key}` on this step, and with what it "
                "began is not known, so `masked = 'frozen'` cannot put it back. The step was "
                "taken, and this state is not frozen. Use `masked = 'update'`, at least for the "
                "first step."
            )
        return torch.zeros_like(now)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a piece of state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_tensors, value.values()))
    elif isinstance(value, list | tuple | deque):
        yield from chain.from_iterable(map(_tensors, value))


def _refuse_unmaskable(optimizer: Optimizer) -> None:
    """Raise if steps of an optimizer cannot be masked."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"`optimizer` should be a `torch.optim.Optimizer`. Found {type(optimizer).__name__}."
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS cannot take a masked step: it evaluates the loss several times in a step, and "
            "its history mixes all components. Use a first-order optimizer."
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError(
            "SparseAdam cannot take a masked step: a component without an entry in a sparse "
            "gradient has not voted. Use Adam, with `sparse = False` on the embedding."
        )


def check_step(
    optimizer: Optimizer, keep: Mapping[Tensor, Tensor | None], masked: Masked, decay: Decay
) -> None:
    """Raise if an optimizer cannot take a masked step."""
    _refuse_unmaskable(optimizer)
    check_choices("masked", masked, decay)
    if (masked, decay) != ("gradient", "before") and not _has_hooks(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} was not set up by `torch.optim.Optimizer.__init__`, and "
            "its steps have no hooks. Give the optimizer that it wraps, and "
            "`step = wrapper.step` where there is such an argument."
        )
    if masked == "frozen" and isinstance(optimizer, Adafactor):
        raise ValueError(
            "Adafactor cannot freeze components: it keeps averages of rows and columns. Use "
            "`masked = 'update'`."
        )
    groups = optimizer.param_groups
    if decay == "after" and not any("weight_decay" in group for group in groups):
        raise ValueError(
            "`decay = 'after'` takes `weight_decay` from the groups of the optimizer, and those "
            f"of {type(optimizer).__name__} have none. Use `decay = 'before'`."
        )
    parameters = [parameter for group in groups for parameter in group["params"]]
    if keep and not any(parameter in keep for parameter in parameters):
        raise ValueError(
            "None of the masked parameters is the optimizer's. It was given other parameters: "
            "make it from the same model, after the model was moved or changed."
        )
    for parameter in parameters:
        mask, gradient = keep.get(parameter), parameter.grad
        if mask is not None and parameter.is_complex():
            raise TypeError(
                "Masked parameters should be real: a complex number has no sign. Found one of "
                f"{parameter.dtype}. Optimize `torch.view_as_real` of it."
            )
        if mask is not None and mask.shape != parameter.shape:
            raise ValueError(
                "Each mask should have the shape of its parameter. Found a mask of shape "
                f"{list(mask.shape)} for a parameter of shape {list(parameter.shape)}."
            )
        if gradient is not None and gradient.is_sparse:
            raise RuntimeError(
                "A masked step does not support sparse gradients: a component without an entry "
                "has not voted. Set `sparse = False` on the embedding."
            )


def _has_hooks(optimizer: Optimizer) -> bool:
    return getattr(type(optimizer).step, "hooked", False)


def check_choices(masked_name: str, masked: Masked, decay: Decay) -> None:
    """Raise if the choices of a masked step are not among those there are."""
    for name, value, choices in ((masked_name, masked, Masked), ("decay", decay, Decay)):
        if value not in get_args(choices):
            raise ValueError(
                f"`{name}` should be one of {', '.join(map(repr, get_args(choices)))}. "
                f"Found `{name} = {value!r}`."
            )
