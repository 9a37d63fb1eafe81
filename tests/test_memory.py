"""Memory: environments x parameters is never held."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from consilience import Agreement, AndMask, GeometricMean, Rule
from consilience.observation.ledger import BLOCK_BYTES

ENVIRONMENTS = 96


class Watch(TorchDispatchMode):
    """Adds up the memory of the tensors that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.users: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.live = self.peak = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
        if not self.users[where]:
            self.sizes[where] = size
            self.live += size
        self.users[where] += 1
        weakref.finalize(tensor, self._forget, where)
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)

    def _forget(self, where: int) -> None:
        self.users[where] -= 1
        if not self.users[where]:
            self.live -= self.sizes[where]


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Linear(512, 512), torch.randn(2 * ENVIRONMENTS, 512)


def convolution() -> tuple[nn.Module, Tensor]:
    return nn.Conv2d(96, 192, 3), torch.randn(2 * ENVIRONMENTS, 96, 4, 4)


def embedding() -> tuple[nn.Module, Tensor]:
    return nn.Embedding(5000, 64), torch.randint(5000, (2 * ENVIRONMENTS, 5))


def tied() -> tuple[nn.Module, Tensor]:
    layer = nn.Linear(400, 400)
    return nn.Sequential(layer, nn.Tanh(), layer), torch.randn(2 * ENVIRONMENTS, 400)


def weight_norm() -> tuple[nn.Module, Tensor]:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(400, 400))
    return layer, torch.randn(2 * ENVIRONMENTS, 400)


def size_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("rule", [AndMask(0.5), GeometricMean(0.5)], ids=repr)
@pytest.mark.parametrize("rows", ["rows", "environments"])
@pytest.mark.parametrize("make", [linear, convolution, embedding, tied, weight_norm])
def test_an_observation(
    make: Callable[[], tuple[nn.Module, Tensor]], rows: str, rule: Rule
) -> None:
    torch.manual_seed(0)
    model, x = make()
    parameters = size_of(model)
    env = None if rows == "rows" else torch.arange(len(x)) % ENVIRONMENTS
    agreement = Agreement(model, rule, unvoted="allow")
    with Watch() as watch:
        with agreement.observe(env):
            loss = model(x).square().mean()
        loss.backward()
        agreement.apply()
    activations = 4 * x.numel() * max(1, 64 if x.dtype == torch.long else 1)
    voters = len(x) if env is None else ENVIRONMENTS
    # Blocks, and a few times what the parameters and the activations take.
    limit = 4 * BLOCK_BYTES + 8 * parameters + 8 * activations
    dense = voters * parameters
    assert limit < dense
    assert watch.largest <= max(BLOCK_BYTES, 2 * parameters, 2 * activations)
    assert watch.peak <= limit, f"{watch.peak / 2**20:.1f} MiB of {dense / 2**20:.0f}"


def test_a_backward_pass_for_each_environment() -> None:
    torch.manual_seed(0)
    peaks = {}
    for count in (2, ENVIRONMENTS):
        model, _ = linear()
        agreement = Agreement(model, GeometricMean(0.5))
        x = torch.randn(count, 1, 512)
        with Watch() as watch:
            agreement.backward(model(x[e]).square().mean() for e in range(count))
            agreement.apply()
        peaks[count] = watch.peak
    assert peaks[ENVIRONMENTS] <= 1.2 * peaks[2]
    assert peaks[ENVIRONMENTS] <= 10 * size_of(linear()[0])


def test_the_watch_sees_what_is_dense() -> None:
    model, x = linear()
    with Watch() as watch:
        gradients = torch.func.vmap(
            torch.func.grad(lambda p, row: torch.func.functional_call(model, p, row).sum()),
            (None, 0),
        )(dict(model.named_parameters()), x)
    del gradients
    assert watch.peak >= len(x) * size_of(model) * 0.9
    assert watch.live < watch.peak / 10
