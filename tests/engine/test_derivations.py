"""Parameters reached through any chain of views and functions, and used up to three times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from consilience import Agreement
from engine.modules import Net, normal
from oracle import Record, compare, shares_alone, wavy

STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transpose": lambda w, v: w.t(),
    "slice": lambda w, v: w[-2:, :2],
    "rows by a list": lambda w, v: w[[0, -1, 0]],
    "rows by a mask": lambda w, v: w[torch.arange(len(w)) % 2 == 0],
    "affine": lambda w, v: w * 2 - 1,
    "clone": lambda w, v: w.t().clone().t(),
    "cat": lambda w, v: torch.cat([w, w * 0.5]),
    "stack": lambda w, v: torch.stack([w, w.sin()]).sum(0),
    "chunks swapped": lambda w, v: torch.cat(w.chunk(2)[::-1]),
    "expand": lambda w, v: w[:, :1].expand(-1, 3),
    "reshape": lambda w, v: w.reshape(w.shape[1], w.shape[0]),
    "flip": lambda w, v: w.flip(0),
    "repeat": lambda w, v: w.repeat(2, 1),
    "exp": lambda w, v: (w * 0.3).exp(),
    "outer": lambda w, v: torch.outer(w[:, 0], w[0]),
    "product with itself": lambda w, v: w @ w.t() @ w * 0.1,
    "another parameter added": lambda w, v: w + v[0],
    "another parameter in the last row": lambda w, v: torch.cat([w, v[:1].expand_as(w[:1])]),
    "straight through": lambda w, v: w + (w.sin() - w).detach(),
    "where": lambda w, v: torch.where(w > 0, w, w * 0.1),
    "pad": lambda w, v: F.pad(w, (0, 1, 1, 0), value=0.5),
    "cumulated": lambda w, v: w.cumsum(0),
    "sorted": lambda w, v: w.sort(1).values,
    "gather": lambda w, v: w.gather(1, torch.zeros(len(w), 2, dtype=torch.long)),
    "row by row": lambda w, v: torch.stack([row * (i + 1) for i, row in enumerate(w)]),
    "softened": lambda w, v: w / (1 + w.square().mean()),
}


def fitted(x: Tensor, width: int) -> Tensor:
    """Repeat features until there are `width` of them."""
    return torch.cat([x * (i + 1) for i in range(-(-width // x.shape[1]))], 1)[:, :width]


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(fitted(x, w.shape[1]), w),
    "matmul": lambda x, w: fitted(x, w.shape[0]) @ w,
    "scale": lambda x, w: fitted(x, w.shape[1])[:, None] * w,
    "sum": lambda x, w: (fitted(x, w.shape[1])[:, None] + w).sin(),
    "tokens": lambda x, w: torch.cat([w.expand(len(x), *w.shape), x[:, None, :1] + w[:1]], 1).cos(),
    "embedding": lambda x, w: F.embedding((x[:, :2] > 0).long() % len(w), w),
    "index": lambda x, w: w[(x[:, 0] > 0).long() % len(w)],
    "convolution": lambda x, w: F.conv1d(x[:, None], w[:, None, :2]),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", fitted(x, w.shape[1]), w),
    "scalar": lambda x, w: x * w.sum(),
    "mask token": lambda x, w: torch.where(fitted(x, w.shape[1]) > 0, w[0], 0.0),
    "bmm": lambda x, w: torch.bmm(fitted(x, w.shape[1])[:, None], w.t().expand(len(x), -1, -1)),
}


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    uses=st.lists(
        st.tuples(st.lists(st.sampled_from(list(STEPS)), max_size=3), st.sampled_from(list(USES))),
        min_size=1,
        max_size=3,
    ),
    env=st.sampled_from([None, [1, 0, 1], [0, 0, 1, 2, -1], [3, 4]]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_chains_of_derivations(shape: Any, uses: Any, env: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        parts = []
        for number, (steps, use) in enumerate(uses):
            w = m.w
            for step in steps:
                w = STEPS[step](w, m.v)
            parts.append((USES[use](x, w).flatten(1) * (number + 1)).sin())
        result = parts[0]
        for part in parts[1:]:
            result = result * (1 + part.mean(1, keepdim=True))
        return result

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(forward, w=normal(*shape), v=normal(2))

    rows = 4 if env is None else len(env)
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = lambda model, x: wavy(model(x))  # noqa: E731
    model, record = build(), Record()
    agreement = Agreement(model, record)
    try:
        with agreement.observe(env):
            loss = losses(model, x).mean()
        loss.backward()
        agreement.apply()
    except RuntimeError as error:
        event("refused")
        assert "observed" in str(error) or "rows" in str(error), str(error)  # noqa: PT017
        return
    event("exact")
    expected = shares_alone(build, losses, (x,), env)
    assert compare(record.of(model), expected, strict_zeros=False) == []
