"""What the environments agreed about, computed when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from consilience.rules import Rule, Statistic, Tally


@dataclass(frozen=True)
class ParameterReport:
    """What the environments agreed about in one parameter.

    Attributes:
        size: How many weights it has.
        voters: How many environments voted on it.
        kept: The share of its weights whose gradient the rule kept.
        agreement: The mean of ``abs(votes) / voters``; None if the rule counts no votes.
        null_keep_rate: The share that would be kept if signs were random; None if the rule has no
            such number.
    """

    size: int
    voters: int
    kept: float
    agreement: float | None
    null_keep_rate: float | None


class Report:
    """What the environments agreed about, in total and per parameter.

    Nothing is computed, and no device is waited for, until a number is read; and it may be read
    until the next observation begins, which needs the memory.

    Example:
        >>> import torch
        >>> from consilience import Agreement, AndMask
        >>> model = torch.nn.Linear(2, 1)
        >>> agreement = Agreement(model, AndMask(threshold=1.0))
        >>> agreement.backward([model.weight.sum() + model.bias.sum()] * 3)
        >>> report = agreement.apply()
        >>> report.kept, report.null_keep_rate
        (1.0, 0.25)
        >>> report.parameters["weight"].voters
        3
        >>> print(report)
                weights  voters  kept  by chance  agreement
        weight        2       3  100%        25%       100%
        bias          1       3  100%        25%       100%
        all           3       3  100%        25%       100%
    """

    def __init__(self, rule: Rule, tallies: Mapping[str, Tally]):
        self._rule = rule
        self._tallies: Mapping[str, Tally] | None = tallies

    @cached_property
    def parameters(self) -> dict[str, ParameterReport]:
        """What the environments agreed about in each parameter that has a gradient, by name."""
        if self._tallies is None:
            raise RuntimeError(
                "This report was not read before the next observation began, which took the votes "
                "it is made of. Read it (any number of it, or `report.parameters`) right after "
                "`agreement.apply()`."
            )
        return {name: self._read(tally) for name, tally in self._tallies.items()}

    @torch.no_grad()
    def _read(self, tally: Tally) -> ParameterReport:
        size = tally.gradient.numel()
        keep = self._rule.keep(tally)
        agreement = None
        if Statistic.VOTES in self._rule.statistics and tally.voters:
            agreement = float(tally.get(Statistic.VOTES).abs().mean()) / tally.voters
        return ParameterReport(
            size=size,
            voters=tally.voters,
            kept=1.0 if keep is None else float(keep.double().mean()),
            agreement=agreement,
            null_keep_rate=self._rule.null_keep_rate(tally.voters),
        )

    def _mean(self, number: Callable[[ParameterReport], float | None]) -> float | None:
        """Average over weights."""
        found = [(number(p), p.size) for p in self.parameters.values()]
        if not found or any(value is None for value, _ in found):
            return None
        total = sum(size for _, size in found)
        return sum((value or 0.0) * size for value, size in found) / max(1, total)

    @property
    def voters(self) -> float:
        """How many environments voted, on average over weights."""
        return self._mean(lambda p: float(p.voters)) or 0.0

    @property
    def kept(self) -> float:
        """The share of weights whose gradient the rule kept."""
        return self._mean(lambda p: p.kept) or 0.0

    @property
    def agreement(self) -> float | None:
        """The mean of ``abs(votes) / voters`` over weights; None if the rule counts no votes."""
        return self._mean(lambda p: p.agreement)

    @property
    def null_keep_rate(self) -> float | None:
        """The share that would be kept if signs were random; None if the rule cannot say."""
        return self._mean(lambda p: p.null_keep_rate)

    def _expire(self) -> None:
        """Let go of the votes."""
        self._tallies = None

    def __repr__(self) -> str:
        if self._tallies is None and "parameters" not in self.__dict__:
            return "Report(<not read in time>)"

        def show(value: float | None) -> str:
            return "None" if value is None else f"{value:.4g}"

        return (
            f"Report(voters={self.voters:g}, kept={show(self.kept)}, "
            f"agreement={show(self.agreement)}, null_keep_rate={show(self.null_keep_rate)})"
        )

    def __str__(self) -> str:
        """Show a table: a line for each parameter, and one for all of them."""
        if self._tallies is None and "parameters" not in self.__dict__:
            return repr(self)

        def percent(value: float | None) -> str:
            return "-" if value is None else f"{100 * value:.3g}%"

        def line(name: str, size: int, part: ParameterReport | Report) -> list[str]:
            shares = percent(part.kept), percent(part.null_keep_rate), percent(part.agreement)
            return [name, f"{size:,}", f"{part.voters:.4g}", *shares]

        lines = [["", "weights", "voters", "kept", "by chance", "agreement"]]
        lines += [line(name, part.size, part) for name, part in self.parameters.items()]
        lines += [line("all", sum(part.size for part in self.parameters.values()), self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:])])
            for name, *rest in lines
        )
