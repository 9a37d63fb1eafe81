"""Ways to a gradient that environments agree on, each as a step that leaves it in `.grad`.

The last step of all but Agreement is the same: from gradients stacked over environments, or their
sum and votes, to the masked mean. What the first way leaves is the ordinary gradient.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload
from consilience import Agreement
from consilience.rules import Tally

Step = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """A workload with its model made and its batch drawn."""

    workload: Workload
    model: nn.Module
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, workload: Workload, dtype: torch.dtype = torch.float32) -> Problem:
        """Make the model and draw the batch, the same every time."""
        torch.manual_seed(0)
        x, y = workload.draw(workload.rows)
        model = workload.build().to(dtype)
        return cls(workload, model, x.to(dtype) if x.is_floating_point() else x, y)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def loss(self) -> Tensor:
        return self.workload.losses(self.model(self.x), self.y)

    def environment_losses(self) -> Tensor:
        """Return the mean loss of each environment, from one forward pass."""
        losses = self.workload.losses(self.model(self.x), self.y, reduction="none")
        return losses.unflatten(0, (self.workload.environments, -1)).mean(1)

    def apply(self, gradients: Sequence[Tensor], votes: Sequence[Tensor]) -> None:
        """Leave the masked mean of the environments' gradients in the parameters."""
        for parameter, gradient, count in zip(self.parameters, gradients, votes, strict=True):
            tally = Tally(gradient, self.workload.environments, votes=count)
            parameter.grad = self.workload.rule(tally)

    def apply_stacked(self, stacked: Iterable[Tensor]) -> None:
        """The same, from gradients `[environments, ...]`."""
        found = [(s.mean(0), s.sign().sum(0)) for s in stacked]
        self.apply([mean for mean, _ in found], [votes for _, votes in found])


def ordinary(problem: Problem) -> Step:
    def step() -> None:
        problem.model.zero_grad()
        problem.loss().backward()

    return step


def agreement(problem: Problem) -> Step:
    workload = problem.workload
    found = Agreement(problem.model, workload.rule, batchnorm="joint" if workload.joint else None)
    labels = workload.labels

    def step() -> None:
        problem.model.zero_grad()
        with found.observe(labels):
            loss = problem.loss()
        loss.backward()
        found.apply()

    return step


def authors(problem: Problem) -> Step:
    """One forward pass; a backward pass per environment on the retained graph; a stack."""

    def step() -> None:
        problem.model.zero_grad()
        losses = problem.environment_losses()
        found: list[list[Tensor]] = [[] for _ in problem.parameters]
        for loss in losses:
            gradients = torch.autograd.grad(loss, problem.parameters, retain_graph=True)
            for collected, gradient in zip(found, gradients, strict=True):
                collected.append(gradient)
        problem.apply_stacked(torch.stack(collected) for collected in found)

    return step


def one_by_one(problem: Problem) -> Step:
    """A forward and a backward pass per environment, folded into a sum and votes at once."""
    workload = problem.workload
    xs, ys = (t.split(workload.each) for t in (problem.x, problem.y))

    def step() -> None:
        sums = [torch.zeros_like(p) for p in problem.parameters]
        votes = [torch.zeros_like(p) for p in problem.parameters]
        for x, y in zip(xs, ys, strict=True):
            problem.model.zero_grad()
            workload.losses(problem.model(x), y).backward()
            gradients = [p.grad for p in problem.parameters]
            torch._foreach_add_(sums, gradients)
            torch._foreach_sign_(gradients)
            torch._foreach_add_(votes, gradients)
        torch._foreach_div_(sums, workload.environments)
        problem.apply(sums, votes)

    return step


def mapped(problem: Problem) -> Step:
    """`vmap(grad(...))` over environments."""
    workload = problem.workload
    shape = (workload.environments, workload.each)
    x, y = problem.x.unflatten(0, shape), problem.y.unflatten(0, shape)
    names = [name for name, _ in problem.model.named_parameters()]
    buffers = dict(problem.model.named_buffers())

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found = torch.func.functional_call(problem.model, {**parameters, **buffers}, (x,))
        return workload.losses(found, y)

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        problem.model.zero_grad()
        values = {name: p.detach() for name, p in problem.model.named_parameters()}
        found = gradients(values, x, y)
        problem.apply_stacked([found[name] for name in names])

    return step


def opacus(problem: Problem) -> Step:
    """Opacus' per-sample gradients."""
    from opacus import GradSampleModule

    model = GradSampleModule(problem.model, loss_reduction="mean")

    def step() -> None:
        for parameter in problem.parameters:
            parameter.grad = parameter.grad_sample = None
        problem.workload.losses(model(problem.x), problem.y).backward()
        problem.apply_stacked([p.grad_sample for p in problem.parameters])
        for parameter in problem.parameters:
            parameter.grad_sample = None

    return step


def backpack(problem: Problem) -> Step:
    """BackPACK's per-sample gradients."""
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import BatchGrad

    model, criterion = extend(problem.model), extend(nn.CrossEntropyLoss())

    def step() -> None:
        problem.model.zero_grad()
        loss = criterion(model(problem.x), problem.y)
        with extensions(BatchGrad()):
            loss.backward()
        stacked = [p.grad_batch * problem.workload.rows for p in problem.parameters]
        problem.apply_stacked(stacked)
        for parameter in problem.parameters:
            del parameter.grad_batch

    return step


def torchjd(problem: Problem) -> Step:
    """TorchJD's Jacobian of the environments' losses, its rows computed one after the other."""
    from torchjd.autojac import jac

    def step() -> None:
        problem.model.zero_grad()
        losses = problem.environment_losses()
        problem.apply_stacked(jac(losses, problem.parameters, parallel_chunk_size=1))

    return step


def torchjd_parallel(problem: Problem) -> Step:
    """The same, its rows computed in one vmapped backward pass."""
    from torchjd.autojac import jac

    def step() -> None:
        problem.model.zero_grad()
        problem.apply_stacked(jac(problem.environment_losses(), problem.parameters))

    return step


def hooks(problem: Problem) -> Step:
    """The rows' shares of one joint backward pass, from what hooks catch, row by row.

    Batch norm's parameters and the last layer by their formulas, a convolution's by its own
    gradient. What joint batch norm is verified against.
    """
    caught: dict[nn.Module, list[Tensor]] = {}

    def before(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        caught[module] = [args[0].detach().clone()]
        out.register_hook(caught[module].append)

    kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
    modules = [m for m in problem.model.modules() if isinstance(m, kinds)]
    for module in modules:
        module.register_forward_hook(before)

    def shares(module: nn.Module) -> list[Tensor]:
        x, gradient = caught[module]
        if isinstance(module, nn.Linear):
            return [gradient[:, :, None] * x[:, None]]
        if isinstance(module, nn.BatchNorm2d):
            mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), False, keepdim=True)
            normal = (x - mean) / (variance + module.eps).sqrt()
            return [(gradient * normal).sum((2, 3)), gradient.sum((2, 3))]
        weight = module.weight
        pairs = zip(x.split(1), gradient.split(1), strict=True)
        of = torch.nn.grad.conv2d_weight
        return [torch.stack([of(a, weight.shape, g, padding=1) for a, g in pairs])]

    def step() -> None:
        problem.model.zero_grad()
        problem.loss().backward()
        stacked = [share for module in modules for share in shares(module)]
        problem.apply_stacked([share * problem.workload.rows for share in stacked])

    return step


def always(_: Workload) -> bool:
    return True


@dataclass(frozen=True)
class Way:
    """How a gradient may be had.

    Attributes:
        make: From a problem to its step.
        fits: For which workloads it gives the same gradient.
        needs: The package that it needs.
        stacks: Whether it holds the gradients of all environments at once.
        passes: Whether it sends a backward pass of all rows through the graph per environment.
    """

    make: Callable[[Problem], Step]
    fits: Callable[[Workload], bool] = always
    needs: str | None = None
    stacks: bool = False
    passes: bool = False

    @property
    def installed(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def step(self, problem: Problem) -> Step:
        """Return its step, on a problem of its own; warnings of its making are not ours."""
        made = self.make(problem)

        def quiet() -> Any:
            return made()

        return quiet


def separate(workload: Workload) -> bool:
    return not workload.joint


WAYS: dict[str, Way] = {
    "ordinary backward": Way(ordinary),
    "Agreement": Way(agreement),
    "hooks, row by row": Way(hooks, lambda w: w.joint, stacks=True),
    "authors': backward per environment": Way(authors, separate, stacks=True, passes=True),
    "forward and backward per environment": Way(one_by_one, separate),
    "vmap(grad)": Way(mapped, separate, stacks=True),
    "Opacus": Way(opacus, lambda w: w.single and w.sequential, "opacus", stacks=True),
    "BackPACK": Way(backpack, lambda w: w.single and w.sequential, "backpack", stacks=True),
    "TorchJD, one row at a time": Way(torchjd, separate, "torchjd", stacks=True, passes=True),
    "TorchJD, all rows at once": Way(
        torchjd_parallel, separate, "torchjd", stacks=True, passes=True
    ),
}
FLOOR, OURS = "ordinary backward", "Agreement"


def verify(workload: Workload, names: Iterable[str]) -> None:
    """Check in float64 that ways give one and the same masked gradient; raise if not."""
    small = workload.smaller()
    expected: list[Tensor] | None = None
    for name in names:
        if name == FLOOR:
            continue
        problem = Problem.of(small, torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            WAYS[name].step(problem)()
        found = [p.grad for p in problem.parameters]
        if expected is None:
            expected = found
            kept = sum(int((g != 0).sum()) for g in found) / sum(g.numel() for g in found)
            assert 0.0 < kept < 1.0, (
                f"{workload.name}: the mask keeps {kept:.0%}, which tests nothing"
            )
        # A bias of a key has no influence on attention: what is left of its gradient is rounding.
        largest = max(float(a.abs().max()) for a in expected)
        for (parameter, _), a, b in zip(
            problem.model.named_parameters(), expected, found, strict=True
        ):
            close = torch.isclose(a, b, rtol=1e-6, atol=1e-9 * largest)
            wrong = int((~close).sum())
            assert not wrong, f"{workload.name}, {name}: {wrong} components of {parameter} differ"
