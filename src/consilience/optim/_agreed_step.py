"""One step of any optimizer on what environments agree about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from consilience.optim._masked_step import Decay, Masked, check_step, masked_step
from consilience.rules import Rule, Tally


def check_agreed_step(
    optimizer: Optimizer, parameters: list[Tensor], rule: Rule, masked: Masked, decay: Decay
) -> None:
    """Raise if an optimizer cannot step so, before any vote is used up."""
    check_step(optimizer, dict.fromkeys(parameters), masked, decay)
    rescale = getattr(rule, "rescale", "none")
    if masked == "update" and rescale != "none":
        raise ValueError(
            "`masked = 'update'` shows the optimizer the gradient before the mask, and a rescaling "
            f"makes up for what a mask took from it. Found `{rule!r}`. Leave `rescale` out, or "
            "mask the gradient."
        )


def agreed_step(
    optimizer: Optimizer,
    rule: Rule,
    tallies: Mapping[Tensor, Tally],
    *,
    masked: Masked,
    decay: Decay,
    step: Callable[[], Any] | None,
    fresh: bool,
) -> None:
    """Let an optimizer step on gradients that a rule was applied to.

    Args:
        optimizer: Whose step.
        rule: The rule that was applied.
        tallies: For each parameter what it was applied to.
        masked: What to hold back, as :func:`masked_step` has it.
        decay: When weight decay happens.
        step: What to call in place of ``optimizer.step``.
        fresh: Whether nothing can have changed the gradients since.
    """
    keep: dict[Tensor, Tensor | None] = dict.fromkeys(tallies)
    if masked != "gradient":
        ours = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter in ours & keep.keys():
            if parameter.grad is not None:
                keep[parameter] = _kept(rule, tallies[parameter], parameter.grad)
    if masked == "update":
        if not fresh:
            _check_unchanged(rule, {p: tallies[p] for p, mask in keep.items() if mask is not None})
        for parameter, mask in keep.items():
            if mask is not None:
                whole = tallies[parameter].gradient
                parameter.grad = torch.where(mask != 0, parameter.grad, whole)  # type: ignore[arg-type]
    masked_step(optimizer, keep, masked=masked, decay=decay, step=step)


def _kept(rule: Rule, tally: Tally, result: Tensor) -> Tensor:
    """Return 0 where a rule keeps nothing; where it does not say, where it made something 0."""
    keep = rule.keep(tally)
    return (result != 0) | (tally.gradient == 0) if keep is None else keep


def _check_unchanged(rule: Rule, tallies: Mapping[Tensor, Tally]) -> None:
    for parameter, tally in tallies.items():
        applied, now = rule(tally).to(parameter.dtype), parameter.grad
        if now is None or not torch.allclose(applied, now, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                "`masked = 'update'` shows the optimizer the gradient before the mask, and "
                "gradients were changed after `agreement.apply()`: clipped, or unscaled. Do that "
                "before `agreement.step`, and leave the applying to it."
            )
