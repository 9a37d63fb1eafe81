"""One observation: the uses of parameters in it, and how their shares become votes.

Each time an operation consumes a tracked tensor, its ordinary forward runs with the tensor
detached, and a *tap* is put on what comes out: an autograd function that changes nothing, and in
whose backward pass the gradient of the output and the inputs meet. There the ordinary gradient of
the tensor and the votes on it are computed in one go.

Signs do not add over uses. A parameter with a single use in an observation is tallied at once,
inside that use's backward; one with several is tallied when the last of them has its gradient, or
when the votes are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from consilience.observation.environments import Environments
from consilience.observation.errors import ObservationError, UnsupportedOperationError
from consilience.observation.ledger import Ledger, accumulator_dtype
from consilience.observation.shares import Shares
from consilience.observation.sources import Pullback, Source
from consilience.rules import Statistic

if TYPE_CHECKING:
    from collections.abc import Sequence

SharesOf = Callable[["Sequence[Tensor]", "Sequence[Tensor | None]"], "list[Shares | None]"]
"""From saved tensors and gradients of outputs to the shares of each tracked tensor."""


Watched = dict[int, tuple[Tensor, set[str]]]
"""By parameter: the gradient that observed uses gave it, and the names of these uses."""


def watch(watched: Watched, index: int, parameter: Tensor, name: str) -> Tensor:
    """Return where the gradients of a parameter are summed; remember what it was used by."""
    if index not in watched:
        watched[index] = (torch.zeros_like(parameter, requires_grad=False), set())
    watched[index][1].add(name)
    return watched[index][0]


@dataclass(eq=False)
class Weight:
    """A tracked tensor, as one use consumes it."""

    source: Source
    value: Tensor

    def __post_init__(self) -> None:
        self.wants_gradient = self.value.requires_grad
        self.dtype = self.value.dtype
        self.value = self.value.detach()


@dataclass(eq=False)
class Use:
    """One consumption of tracked tensors by one operation."""

    observation: Observation
    name: str
    weights: list[Weight]
    shares_of: SharesOf
    arrived: bool = False
    pending: list[list[Shares | None]] = field(default_factory=list)

    @property
    def roots(self) -> set[int]:
        """The parameters that it consumes, directly or not."""
        return {root for weight in self.weights for root in weight.source.roots}

    def arrive(
        self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None], nodes: Sequence[Any]
    ) -> list[Tensor | None]:
        """Take the gradients of the outputs; return those of the tracked tensors."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if all(gradient is None for gradient in gradients):
                return [None] * len(self.weights)
            try:
                # A backward pass into some inputs only may not come for these tensors.
                if not any(node and torch._C._will_engine_execute_node(node) for node in nodes):
                    return [None] * len(self.weights)
            except RuntimeError:
                # `torch.autograd.grad`, of a loss that need not be the one that is to be agreed on:
                # it gets its gradients, and nobody votes.
                return self.observation.totals(self, self.shares_of(saved, gradients))
            shares = self.shares_of(saved, gradients)
            totals = self.observation.receive(self, shares)
            if not self.pending and not torch._C._autograd._get_current_graph_task_keep_graph():
                self.shares_of = _spent  # lets go of what it remembers
            return totals


def _spent(*_: Any) -> list[Shares | None]:
    raise ObservationError("A backward pass went twice through a graph that was not retained.")


class Tap(torch.autograd.Function):
    """Changes nothing; in its backward pass, inputs and output gradients of a use meet."""

    @staticmethod
    def forward(
        ctx: Any, use: Use, saved: tuple[Tensor, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = tensors[:count]
        ctx.use = use
        ctx.set_materialize_grads(False)
        # The outputs are handed on as they are. Were they returned as views, an in-place
        # activation behind them would be refused.
        ctx.mark_dirty(*outputs)
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        count = len(gradients)
        if torch.is_grad_enabled():
            raise UnsupportedOperationError(
                f"A gradient of a gradient (`create_graph=True`) goes through `{ctx.use.name}`, "
                "which consumes a tracked parameter. Compute it outside of the observation, or use "
                "`agreement.backward(environment_losses)`, which is exact for any graph."
            )
        nodes = [node for node, _ in ctx.next_functions[count:]]
        found = ctx.use.arrive(ctx.saved_tensors, gradients, nodes)
        return (None, None, None, *gradients, *found)


class Observation:
    """The uses of parameters in one ``observe`` block, and the votes that came of them."""

    def __init__(
        self,
        parameters: list[Tensor],
        names: list[str],
        statistics: frozenset[Statistic],
        environments: Environments,
        watching: set[int],
        wake: Callable[[Observation], None],
    ):
        self._wake = wake
        self._asleep = True
        self.watching = watching
        self.watched: Watched = {}
        self.met_strangers = False
        self.parameters = parameters
        self.names = names
        self.statistics = statistics
        self.environments = environments
        self.ledger = Ledger()
        self.uses: dict[int, list[Use]] = {}
        self.dead = False
        self.replaying = False
        self._tallied: set[int] = set()

    def _watch(self, use: Use, totals: Sequence[Tensor | None]) -> None:
        for weight, total in zip(use.weights, totals, strict=True):
            source = weight.source.settled()
            if total is None or not self.watching & set(source.roots):
                continue
            sums = {
                root: watch(self.watched, root, self.parameters[root], use.name)
                for root in self.watching & set(source.roots)
            }
            if source.view:
                source.evaluate(sums, casts=False).add_(total)
            else:
                pull = Pullback(source, weight.value, self.parameters, use.name)
                for root, pulled in pull(total.reshape(weight.value.shape)).items():
                    if root in sums:
                        sums[root].add_(pulled)

    @property
    def open(self) -> bool:
        """Whether a backward pass through one of its uses may still come."""
        return any(use.pending or not use.arrived for uses in self.uses.values() for use in uses)

    def tap(
        self,
        name: str,
        outputs: tuple[Tensor, ...],
        weights: Sequence[tuple[Tensor, Source]],
        saved: tuple[Tensor, ...],
        shares_of: SharesOf,
    ) -> tuple[Tensor, ...]:
        """Put a tap on the outputs of an operation that consumed tracked tensors."""
        use = Use(self, name, [Weight(source, t) for t, source in weights], shares_of)
        if not self.replaying:
            for root in use.roots:
                if root in self._tallied:
                    raise ObservationError(
                        f"Parameter `{self.names[root]}` was consumed by `{name}` after a backward "
                        "pass through an earlier use of it, in the same observation. Signs do not "
                        "add over uses: run all forward passes first, or open an observation of "
                        "its own for each backward pass (with environments of its own)."
                    )
                self.uses.setdefault(root, []).append(use)
        if len(outputs) > 1:  # autograd refuses to hand on several outputs where one is a view
            outputs = tuple(t.clone() if t._is_view() else t for t in outputs)
        # Nothing is written: operations that remember their own output may go on trusting it.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(outputs):
            tapped: tuple[Tensor, ...] = Tap.apply(  # type: ignore[no-untyped-call]
                use, saved, len(outputs), *outputs, *(t for t, _ in weights)
            )
        return tapped

    def receive(self, use: Use, shares: list[Shares | None]) -> list[Tensor | None]:
        """Tally the shares of a use, now or when the rest of them is there."""
        use.arrived = True
        if self.dead:
            return self.totals(use, shares)
        if self._asleep:  # the first gradient, or the first since its votes were applied
            self._wake(self)
            self._asleep = False
        totals = self._tally(use, shares)
        if self.watching:
            self._watch(use, totals)
        return totals

    def _tally(self, use: Use, shares: list[Shares | None]) -> list[Tensor | None]:
        kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        if not kept and not use.pending and self._alone(use):
            return self._tally_alone(use, shares)
        use.pending.append(shares)
        totals = self.totals(use, shares)
        if not kept:
            group = self._group(use)
            if all(member.arrived for member in group):
                self._tally_group(group)
        return totals

    def finish(self) -> None:
        """Tally what is still waiting for uses that no backward pass reached."""
        seen: set[int] = set()
        for uses in self.uses.values():
            for use in uses:
                if use.pending and id(use) not in seen:
                    group = [member for member in self._group(use) if member.pending]
                    seen |= {id(member) for member in group}
                    with torch.no_grad():
                        self._tally_group(group)
        for uses in self.uses.values():
            for use in uses:
                use.arrived = False
        self._tallied.clear()
        self._asleep = True

    def totals(self, use: Use, shares: list[Shares | None]) -> list[Tensor | None]:
        """Return the ordinary gradients of a use's tracked tensors."""
        return [
            share.total().to(weight.dtype) if share is not None and weight.wants_gradient else None
            for weight, share in zip(use.weights, shares, strict=True)
        ]

    def _alone(self, use: Use) -> bool:
        """Whether no component of a parameter is consumed twice, by this use or another."""
        for weight in use.weights:
            for root in weight.source.roots:
                uses = self.uses[root]
                if len(uses) == 1 and sum(root in w.source.roots for w in use.weights) == 1:
                    continue
                if not self._apart(root):
                    return False
        return True

    def _apart(self, root: int) -> bool:
        """Whether all uses of a parameter are of views that do not overlap in memory."""
        spans = []
        for use in self.uses[root]:
            for weight in use.weights:
                if root not in weight.source.roots:
                    continue
                source = weight.source.settled()
                if not source.view:
                    return False
                # On an accumulator's memory layout, which is the parameter's.
                value = source.evaluate({root: self.parameters[root].detach()}, casts=False)
                extent = sum(
                    (size - 1) * stride
                    for size, stride in zip(value.shape, value.stride(), strict=True)
                )
                spans.append((value.storage_offset(), value.storage_offset() + extent))
        spans.sort()
        return all(a[1] < b[0] for a, b in pairwise(spans))

    def _group(self, use: Use) -> list[Use]:
        """Return the uses that share parameters with this one, directly or not."""
        group, roots, queue = [use], set[int](), [use]
        while queue:
            for root in queue.pop().roots - roots:
                roots.add(root)
                for other in self.uses[root]:
                    if other not in group:
                        group.append(other)
                        queue.append(other)
        return group

    def _mark(self, roots: Iterable[int]) -> None:
        for root in roots:
            self._tallied.add(root)
            self.ledger[root].voters = self.environments.count

    def _tally_alone(self, use: Use, shares: list[Shares | None]) -> list[Tensor | None]:
        totals: list[Tensor | None] = []
        for weight, share in zip(use.weights, shares, strict=True):
            if share is None:
                totals.append(None)
                continue
            source = weight.source.settled()
            if source.root:
                total = share.tally(self.statistics, self.ledger[source.roots[0]].add)
            elif source.view:
                total = share.tally(self.statistics, self._part(source))
            else:
                pull = Pullback(source, weight.value, self.parameters, use.name)
                for block in share.blocks():
                    for one in block:
                        self._add_pulled(source.roots, pull(one))
                total = share.total()
            totals.append(total.to(weight.dtype) if weight.wants_gradient else None)
            self._mark(weight.source.roots)
        return totals

    def _part(self, source: Source) -> Callable[[Statistic, Tensor], None]:
        """Return a sink that adds to the part of an accumulator that a view is of."""
        root = source.roots[0]
        count, parameter = self.ledger[root], self.parameters[root]

        touched: set[Statistic] = set()

        def add(statistic: Statistic, amount: Tensor) -> None:
            if statistic not in count.statistics:
                # Components that no view reaches have shares of zero.
                zero = statistic.of(amount.new_zeros(1, 1)).item() * self.environments.count
                whole = torch.zeros_like(parameter, dtype=accumulator_dtype(parameter.dtype))
                count.statistics[statistic] = whole.fill_(zero)
            part = source.evaluate({root: count.statistics[statistic]}, casts=False)
            if statistic not in touched:
                touched.add(statistic)
                part.zero_()
            part.add_(amount)

        return add

    def _add_pulled(self, roots: Iterable[int], pulled: dict[int, Tensor]) -> None:
        for root in roots:
            share = pulled.get(root)
            if share is None:
                share = torch.zeros_like(self.parameters[root])
            self.ledger[root].add_shares(share[None], self.statistics)

    def _tally_group(self, group: list[Use]) -> None:
        """Sum an environment's shares over all uses, before taking signs."""
        members = [
            (weight.source.settled(), weight, share, use.name)
            for use in group
            for shares in use.pending
            for weight, share in zip(use.weights, shares, strict=True)
            if share is not None
        ]
        if not members:
            return
        roots = sorted({root for source, *_ in members for root in source.roots})
        if all(source.root for source, *_ in members):
            for root in roots:
                self._tally_sum(root, [share for s, _, share, _ in members if s.roots[0] == root])
        else:
            pulls = {
                id(weight): Pullback(source, weight.value, self.parameters, name)
                for source, weight, _, name in members
                if not source.view
            }
            for e in range(self.environments.count):
                sums = {root: torch.zeros_like(self.parameters[root]) for root in roots}
                for source, weight, share, _ in members:
                    one = share.block(e, e + 1)[0]
                    if source.view:
                        root = source.roots[0]
                        source.evaluate({root: sums[root]}, casts=False).add_(one)
                    else:
                        for root, pulled in pulls[id(weight)](one).items():
                            sums[root].add_(pulled)
                self._add_pulled(roots, sums)
        self._mark(roots)
        for use in group:
            use.pending = []

    def _tally_sum(self, root: int, shares: list[Shares]) -> None:
        block_size = max(1, self.parameters[root].numel()) * 8
        step = max(1, (8 * 2**20) // block_size)
        count = self.environments.count
        for start in range(0, count, step):
            stop = min(count, start + step)
            block = shares[0].block(start, stop)
            for share in shares[1:]:
                block = block + share.block(start, stop)
            self.ledger[root].add_shares(block, self.statistics)
