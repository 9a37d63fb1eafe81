"""Where rows are after a function, held against what its output depends on.

Every function is called on an activation whose rows are in dimension 0 or 1, with as many rows as
there are steps, so that a wrong guess fits the shapes. Which rows a component of the output depends
on is found by changing one row after the other. It has to be what the engine believes, or the
engine has to say that it cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilience import Agreement, AndMask
from consilience.observation.layout import Layout, Scattered

ROWS = 4
BACK = torch.arange(ROWS).flip(0)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    y = torch.zeros_like(x)
    y[index] = value
    return y


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "activation": torch.tanh,
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "transpose": lambda x: x.transpose(0, 1),
    "transpose, in place": lambda x: x.clone().transpose_(0, 1),
    "swapdims, in place": lambda x: x.clone().swapdims_(1, 2),
    "unsqueeze, in place": lambda x: x.clone().unsqueeze_(0),
    "squeeze, in place": lambda x: x[:, None].clone().squeeze_(1),
    "transpose_copy": lambda x: torch.transpose_copy(x, 0, 1),
    "as_strided": lambda x: x.contiguous().as_strided((ROWS, ROWS, 3), (3, 3 * ROWS, 1)),
    "unfold, of a tensor": lambda x: x.unfold(1, 2, 1),
    "diagonal": lambda x: x.diagonal(0, 0, 1),
    "linalg.diagonal": lambda x: torch.linalg.diagonal(x, dim1=0, dim2=2),
    "diag_embed": lambda x: torch.diag_embed(x[..., 0], dim1=0, dim2=1),
    "roll": lambda x: x.roll(1, 0),
    "fftshift": lambda x: torch.fft.fftshift(x, 1),
    "take": lambda x: x.take(torch.arange(x.numel()).flip(0)[:8]),
    "masked_select": lambda x: x.masked_select(torch.arange(3) < 1),
    "take_along_dim": lambda x: torch.take_along_dim(x, BACK[:, None, None].expand(x.shape), 0),
    "gather": lambda x: x.gather(1, BACK[None, :, None].expand(x.shape)),
    "index_select": lambda x: x.index_select(0, BACK),
    "index_copy": lambda x: _zeros(x).index_copy(0, BACK, x),
    "index_copy, at home": lambda x: _zeros(x).index_copy(0, torch.arange(ROWS), x),
    "index_copy, in place": lambda x: _zeros(x).index_copy_(1, BACK, x),
    "index_add": lambda x: x.index_add(0, BACK, x.sin()),
    "index_add, of some": lambda x: x.index_add(0, torch.tensor([1]), x[1:2]),
    "index_put": lambda x: _zeros(x).index_put((BACK,), x),
    "scatter": lambda x: _zeros(x).scatter(0, BACK[:, None, None].expand(x.shape), x),
    "scatter, along another": lambda x: _zeros(x).scatter(
        1, BACK[None, :, None].expand(x.shape), x
    ),
    "scatter_add": lambda x: _zeros(x).scatter_add(0, BACK[:, None, None].expand(x.shape), x),
    "masked_scatter": lambda x: _zeros(x).masked_scatter(torch.arange(3) > 0, x),
    "masked_scatter, at home": lambda x: _zeros(x).masked_scatter(torch.arange(3) < 4, x),
    "assigned": lambda x: _set(x, slice(None), x),
    "assigned, shifted": lambda x: _set(x, slice(1, None), x[:-1]),
    "assigned, reversed": lambda x: _set(x, BACK, x),
    "assigned, transposed": lambda x: _set(x, (slice(None), BACK), x),
    "assigned, one step": lambda x: _set(x, (slice(None), 1), x[:, 1]),
    "softmax": lambda x: x.softmax(0),
    "softmax, functional": lambda x: F.softmax(x, dim=1),
    "softmin": lambda x: F.softmin(x, dim=1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: x.cummax(0).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "glu": lambda x: F.glu(x, dim=1),
    "kthvalue": lambda x: x.kthvalue(1, dim=2).values,
    "mode": lambda x: x.mode(0).values,
    "nanmedian": lambda x: x.nanmedian(1).values,
    "median of all": lambda x: x.median(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "std_mean": lambda x: torch.std_mean(x, 2),
    "sort": lambda x: x.sort(1).values,
    "msort": torch.msort,
    "unique": lambda x: torch.unique(x[..., 0]),
    "renorm": lambda x: x.renorm(2, 1, 0.5),
    "cross": lambda x: torch.linalg.cross(x, x.sin(), dim=2),
    "trapezoid": lambda x: torch.trapezoid(x, dim=2),
    "gradient": lambda x: torch.gradient(x, dim=0),
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "fft2": lambda x: torch.fft.fft2(x).real,
    "fftn": lambda x: torch.fft.fftn(x).real,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "pad, circular shift": lambda x: F.pad(x, (0, 0, 1, -1)),
    "pad of the first": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "conv1d": lambda x: F.conv1d(x, torch.ones(ROWS, ROWS, 1, dtype=x.dtype)),
    "conv2d, unbatched": lambda x: F.conv2d(x[:, :, :, None], x.new_ones(ROWS, ROWS, 1, 1)),
    "max_pool1d": lambda x: F.max_pool1d(x, 3),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "interpolate": lambda x: F.interpolate(x, 6),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "one_hot": lambda x: F.one_hot((x[..., 0] > 0).long(), 2) * 1.0,
    "embedding": lambda x: F.embedding((x[..., 0] > 0).long(), torch.eye(4, dtype=x.dtype)),
    "matmul": lambda x: x @ torch.ones(3, ROWS, dtype=x.dtype),
    "matmul, from the left": lambda x: torch.ones(ROWS, ROWS, dtype=x.dtype) @ x,
    "matmul with itself": lambda x: x @ x.mT,
    "matmul of all pairs": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "bmm, permuted": lambda x: torch.bmm(x.transpose(0, 1), x.permute(1, 2, 0)),
    "baddbmm": lambda x: torch.baddbmm(x[..., :1], x, x.mT),
    "linear": lambda x: F.linear(x, torch.ones(ROWS, 3, dtype=x.dtype)),
    "linear, rows last": lambda x: F.linear(x.mT, torch.ones(ROWS, ROWS, dtype=x.dtype)),
    "cdist": lambda x: torch.cdist(x, x.sin() * 2),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.cos(), dim=-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention of one head": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "attention, as a whole": lambda x: F.multi_head_attention_forward(
        x, x, x, 3, 1, x.new_ones(9, 3), None, None, None, False, 0.0, x.new_ones(3, 3), None
    )[0],
    "linalg.inv": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(ROWS, dtype=x.dtype)),
    "qr": lambda x: torch.linalg.qr(x).R,
    "cov": lambda x: x.flatten(1).cov(),
    "pdist": lambda x: F.pdist(x.flatten(1))[:ROWS],
    "block_diag": lambda x: torch.block_diag(x[0], x[1]),
    "kron": lambda x: torch.kron(x[:, 0], x[:1, 0]),
    "combinations": lambda x: torch.combinations(x[:, 0, 0])[:ROWS],
    "broadcast against fewer dimensions": lambda x: x[:, 0, 0] * x[:, :, 0],
    "lerp": lambda x: torch.lerp(x[:, 0, 0], x[:, :, 0], 0.5),
    "where": lambda x: torch.where(x > 0, x, x[:, :1]),
}


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [t for t in found if isinstance(t, Tensor)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_are_where_they_are_said_to_be(name: str, dim: int) -> None:
    function = FUNCTIONS[name]
    x = torch.randn(ROWS, ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    before = _tensors(function(x.clone()))
    changed = []
    for row in range(ROWS):
        y = x.clone()
        y.select(dim, row).mul_(1.01).add_(1e-3)
        changed.append(_tensors(function(y)))
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    agreement = Agreement([scale], AndMask(1.0))
    rows_first = x if dim == 0 else x.transpose(0, 1).contiguous()
    with agreement.observe(list(range(ROWS))):
        mode = agreement._mode
        assert mode is not None
        activation = (rows_first * scale).transpose(0, dim).contiguous()
        after = _tensors(function(activation))
        layouts = [mode.layout(t) for t in after]
    for number, (out, layout) in enumerate(zip(after, layouts, strict=True)):
        if layout is None or isinstance(layout, Scattered):
            continue
        assert isinstance(layout, Layout)
        shape = [1] * out.dim()
        shape[layout.dim] = -1
        said = layout.rows_of(out.shape[layout.dim], ROWS).reshape(shape).expand(out.shape)
        for row in range(ROWS):
            depends = changed[row][number] != before[number]
            assert not (depends & (said != row)).any(), f"row {row} reaches others' places"


MOVED_ONLY = [
    "activation",
    "assigned",
    "attention",
    "fft",
    "gather",
    "glu",
    "index_add, of some",
    "index_copy, at home",
    "index_select",
    "layer_norm",
    "masked_scatter, at home",
    "matmul",
    "normalize",
    "scatter, along another",
    "softmin",
    "transpose",
    "transpose, in place",
    "unfold, of a tensor",
    "unsqueeze, in place",
    "as_strided",
    "where",
]


@pytest.mark.parametrize("name", MOVED_ONLY)
def test_what_keeps_rows_apart_is_not_refused(name: str) -> None:
    """The check above would pass, were everything refused."""
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    agreement = Agreement([scale], AndMask(1.0))
    x = torch.randn(ROWS, ROWS, 3, dtype=torch.float64)
    with agreement.observe(list(range(ROWS))):
        out = FUNCTIONS[name](x * scale)
        assert agreement._mode is not None
        assert isinstance(agreement._mode.layout(out), Layout)
