# A line a case, however long: that is what makes it a table.
# ruff: noqa: E501, PLW0108
"""Awkward modules: every way that the engine promises to see a parameter being used.

One table, and each line says what is expected: `EXACT` (votes and gradients equal the
oracle's) or `raises("...")` (an error that matches, never a silent number). Models are tiny;
`check` casts them to float64 and seeds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from oracle import wavy

Batch = Callable[[int, torch.Generator], Sequence[Any]]


@dataclass(frozen=True)
class Exact:
    """The agreement counts what the oracle counts."""


@dataclass(frozen=True)
class Raises:
    """The agreement refuses, naming what it refuses."""

    match: str


EXACT = Exact()


def raises(match: str) -> Raises:
    return Raises(match)


def _losses(model: nn.Module, *batch: Any) -> Tensor:
    return wavy(model(*batch))


@dataclass(frozen=True)
class Case:
    """One module and what is expected of it.

    Attributes:
        name: Family, colon, what is awkward about it.
        build: Returns the module.
        batch: Given rows and a generator, returns its inputs.
        outcome: `EXACT` or `raises(...)`.
        loss: Maps module and inputs to one loss per row.
        oracle: Which oracle is the truth: alone, joint or uses.
        dims: Where the rows of each input lie, when not in dimension 0.
        rows: Numbers of rows to try with `env=None`; others are tried with labels.
        strict_zeros: False where a gradient is zero but for rounding (attention's key bias).
        single: True where gradients pass through float32.
        options: Keyword arguments of `Agreement`.
        observe: Keyword arguments of `Agreement.observe`.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Batch
    outcome: Exact | Raises = EXACT
    loss: Callable[..., Tensor] = _losses
    oracle: str = "alone"
    dims: Sequence[int | None] | None = None
    rows: Sequence[int] = (5,)
    labels: Sequence[Sequence[int]] = ((2, 0, 2, -1, 1, 0, 2), (3, 3, 1, 1, 2, 2, 0, 0))
    strict_zeros: bool = True
    single: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    observe: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []


def add(name: str, build: Callable[[], nn.Module], batch: Batch, *args: Any, **kwargs: Any) -> None:
    CASES.append(Case(name, build, batch, *args, **kwargs))


class Net(nn.Module):
    """A forward function with its parameters, buffers and submodules.

    A tensor becomes a parameter; a tuple of one tensor becomes a buffer.
    """

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, tuple):
                self.register_buffer(name, member[0])
            elif isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_parameter(name, nn.Parameter(member))
            else:
                setattr(self, name, member)

    def forward(self, *batch: Any) -> Any:
        return self.function(self, *batch)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def features(*shape: int) -> Batch:
    """Return a batch of rows of normal features."""
    return lambda rows, g: (torch.randn((rows, *shape), generator=g, dtype=torch.float64),)


def tokens(length: int | None, high: int) -> Batch:
    """Return a batch of rows of `length` integers below `high`; one integer where None."""
    shape = () if length is None else (length,)
    return lambda rows, g: (torch.randint(high, (rows, *shape), generator=g),)


def several(*batches: Batch) -> Batch:
    return lambda rows, g: tuple(x for batch in batches for x in batch(rows, g))


def cat_views(x: Tensor) -> Tensor:
    return torch.cat([x, x.flip(-1) * 0.5])


# fmt: off
# --- matrix products ------------------------------------------------------------------------

add("linear: plain", lambda: nn.Linear(4, 3), features(4))
add("linear: no bias", lambda: nn.Linear(4, 3, bias=False), features(4))
add("linear: one output", lambda: nn.Linear(4, 1), features(4))
add("linear: 3-D", lambda: nn.Linear(4, 3), features(5, 4))
add("linear: 4-D", lambda: nn.Linear(4, 3), features(2, 3, 4))
add("linear: two layers and ReLU", lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), features(4))
add("linear: wide, most units dead", lambda: nn.Sequential(nn.Linear(4, 40), nn.Threshold(1.0, 0.0), nn.Linear(40, 2)), features(4))
add("linear: functional on bare parameters", lambda: Net(lambda m, x: F.linear(x, m.w, m.b), w=normal(3, 4), b=normal(3)), features(4))
add("linear: keywords", lambda: Net(lambda m, x: F.linear(input=x, bias=m.b, weight=m.w), w=normal(3, 4), b=normal(3)), features(4))
add("linear: bias alone is trained", lambda: Net(lambda m, x: F.linear(x, m.w, m.b), w=(normal(3, 4),), b=normal(3)), features(4))
add("linear: weight alone is trained", lambda: Net(lambda m, x: F.linear(x, m.w, m.b), w=normal(3, 4), b=(normal(3),)), features(4))
add("linear: bias alone, by addition", lambda: Net(lambda m, x: x + m.b, b=normal(4)), features(4))
add("linear: transposed activation", lambda: Net(lambda m, x: m.l(x.transpose(1, 2)), l=nn.Linear(5, 3)), features(5, 4))
add("linear: expanded activation", lambda: Net(lambda m, x: m.l(x[:, None].expand(-1, 3, -1)), l=nn.Linear(4, 3)), features(4))
add("linear: no features", lambda: Net(lambda m, x: m.l(x) + F.linear(x[:, :0], m.w, m.b), l=nn.Linear(4, 3), w=normal(3, 0), b=normal(3)), features(4))
add("addmm: w.t()", lambda: Net(lambda m, x: torch.addmm(m.b, x, m.w.t()), w=normal(3, 4), b=normal(3)), features(4))
add("addmm: beta and alpha", lambda: Net(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=-2.0), w=normal(4, 3), b=normal(3)), features(4))
add("addmm: method of the activation", lambda: Net(lambda m, x: x[:, :3].addmm(x, m.w), w=normal(4, 3)), features(4))
add("addmm: GPT-2's folded projection", lambda: Net(lambda m, x: torch.addmm(m.b, x.reshape(-1, 4), m.w).view(*x.shape[:2], 3), w=normal(4, 3), b=normal(3)), features(5, 4))
add("addmv: bias and vector", lambda: Net(lambda m, x: torch.addmv(m.b.expand(len(x)), x, m.v), v=normal(4), b=normal(1)), features(4), loss=lambda m, x: wavy(m(x)[:, None]))
add("matmul: x @ w", lambda: Net(lambda m, x: x @ m.w, w=normal(4, 3)), features(4))
add("matmul: x @ w, 3-D", lambda: Net(lambda m, x: torch.matmul(x, m.w), w=normal(4, 3)), features(5, 4))
add("matmul: w @ columns", lambda: Net(lambda m, x: m.w @ x, w=normal(3, 4)), features(4, 5))
add("matmul: w @ vectors", lambda: Net(lambda m, x: (m.w @ x.unsqueeze(-1)).squeeze(-1), w=normal(3, 4)), features(4))
add("matmul: w @ x.t(), rows last", lambda: Net(lambda m, x: (m.w @ x.t()).t(), w=normal(3, 4)), features(4))
add("matmul: linear with the parameter as input", lambda: Net(lambda m, x: F.linear(m.w, x).t(), w=normal(3, 4)), features(4))
add("matmul: a weight per head", lambda: Net(lambda m, x: x.view(len(x), 2, 1, 4) @ m.w, w=normal(2, 4, 3)), features(8))
add("matmul: vector", lambda: Net(lambda m, x: (x @ m.v)[:, None], v=normal(4)), features(4))
add("matmul: vector, 3-D", lambda: Net(lambda m, x: x @ m.v, v=normal(4)), features(5, 4))
add("matmul: vector first", lambda: Net(lambda m, x: m.v @ x, v=normal(5)), features(5, 4))
add("matmul: __rmatmul__ style", lambda: Net(lambda m, x: torch.Tensor.matmul(x, m.w), w=normal(4, 3)), features(4))
add("mm", lambda: Net(lambda m, x: torch.mm(x, m.w), w=normal(4, 3)), features(4))
add("mv", lambda: Net(lambda m, x: torch.mv(x, m.v)[:, None], v=normal(4)), features(4))
add("inner", lambda: Net(lambda m, x: torch.inner(x, m.w), w=normal(3, 4)), features(4))
add("tensordot", lambda: Net(lambda m, x: torch.tensordot(x, m.w, dims=2), w=normal(5, 4, 3)), features(5, 4))
add("bmm: expanded weight", lambda: Net(lambda m, x: torch.bmm(x, m.w.expand(len(x), 4, 3)), w=normal(4, 3)), features(5, 4))
add("bmm: a weight per head, rows second", lambda: Net(lambda m, x: torch.bmm(x.view(-1, 2, 4).transpose(0, 1), m.w).transpose(0, 1), w=normal(2, 4, 3)), features(8))
add("baddbmm: expanded bias", lambda: Net(lambda m, x: torch.baddbmm(m.b.expand(len(x), 5, 3), x, m.w.expand(len(x), 4, 3)), w=normal(4, 3), b=normal(3)), features(5, 4))
add("baddbmm: broadcast bias", lambda: Net(lambda m, x: torch.baddbmm(m.b, x, x.transpose(1, 2), beta=2.0, alpha=0.3), b=normal(1, 5, 5)), features(5, 4))
add("addbmm: expanded weight", lambda: Net(lambda m, x: x @ torch.addbmm(m.b, m.u, m.v), b=normal(4, 3), u=normal(2, 4, 5), v=normal(2, 5, 3)), features(4))
add("einsum: bi,io->bo", lambda: Net(lambda m, x: torch.einsum("bi,io->bo", x, m.w), w=normal(4, 3)), features(4))
add("einsum: parameter first", lambda: Net(lambda m, x: torch.einsum("oi,bti->bto", m.w, x), w=normal(3, 4)), features(5, 4))
add("einsum: per head", lambda: Net(lambda m, x: torch.einsum("bthd,hdo->bto", x, m.w), w=normal(2, 3, 4)), features(5, 2, 3))
add("einsum: ellipsis", lambda: Net(lambda m, x: torch.einsum("...i,io->...o", x, m.w), w=normal(4, 3)), features(5, 4))
add("einsum: three operands", lambda: Net(lambda m, x: torch.einsum("bi,bj,ijo->bo", x, x.sin(), m.w), w=normal(4, 4, 3)), features(4))
add("einsum: two parameters and an activation", lambda: Net(lambda m, x: torch.einsum("bi,ik,ko->bo", x, m.a, m.b), a=normal(4, 2), b=normal(2, 3)), features(4))
add("einsum: batch last in the result", lambda: Net(lambda m, x: torch.einsum("bi,io->ob", x, m.w).t(), w=normal(4, 3)), features(4))
add("einsum: an index that the parameter alone has", lambda: Net(lambda m, x: torch.einsum("fed,bf,d->be", m.w, x, m.v), w=normal(4, 2, 3), v=normal(3)), features(4))
add("einsum: an index that two parameters alone have, and one summed", lambda: Net(lambda m, x: torch.einsum("be,fk,ecf->cb", x, m.v, m.w).t(), w=normal(2, 2, 4), v=normal(4, 3)), features(2))
add("einsum: sublists", lambda: Net(lambda m, x: torch.einsum(x, [0, 1], m.w, [1, 2], [0, 2]), w=normal(4, 3)), features(4))
add("einsum: operands in a list", lambda: Net(lambda m, x: torch.einsum("bi,io->bo", [x, m.w]), w=normal(4, 3)), features(4))
add("einsum: diagonal weight", lambda: Net(lambda m, x: torch.einsum("bi,i->bi", x, m.w), w=normal(4)), features(4))
add("einsum: of parameters alone", lambda: Net(lambda m, x: x @ torch.einsum("ik,ko->io", m.a, m.b), a=normal(4, 2), b=normal(2, 3)), features(4))
add("multi_dot: two parameters", lambda: Net(lambda m, x: torch.linalg.multi_dot([x, m.a, m.b]), a=normal(4, 2), b=normal(2, 3)), features(4))
add("bilinear: module", lambda: Net(lambda m, x, y: m.l(x, y), l=nn.Bilinear(4, 3, 2)), several(features(4), features(3)))
add("bilinear: no bias, 3-D", lambda: Net(lambda m, x, y: m.l(x, y), l=nn.Bilinear(4, 3, 2, bias=False)), several(features(5, 4), features(5, 3)))
add("bilinear: functional", lambda: Net(lambda m, x: F.bilinear(x, x.cos(), m.w, m.b), w=normal(2, 4, 4), b=normal(2)), features(4))

# --- convolutions ---------------------------------------------------------------------------

for dimension, conv, transposed in (
    (1, nn.Conv1d, nn.ConvTranspose1d),
    (2, nn.Conv2d, nn.ConvTranspose2d),
    (3, nn.Conv3d, nn.ConvTranspose3d),
):
    image = features(4, *[(7,), (6, 5), (4, 3, 4)][dimension - 1])
    size: Any = [(3,), (3, 2), (2, 1, 3)][dimension - 1]
    for text, keywords in {
        "plain": {},
        "no bias": {"bias": False},
        "stride, padding": {"stride": 2, "padding": 1},
        "dilation": {"padding": 2, "dilation": 2},
        "groups": {"groups": 2},
        "depthwise": {"groups": 4, "padding": 1},
        "same": {"padding": "same", "kernel_size": 3},
        "same, even kernel, dilated": {"padding": "same", "kernel_size": 2, "dilation": 2},
        "circular": {"padding": 1, "padding_mode": "circular"},
        "reflect": {"padding": 1, "padding_mode": "reflect", "stride": 2},
        "replicate, stride": {"padding": 1, "padding_mode": "replicate", "stride": 2},
        "1x1": {"kernel_size": 1},
    }.items():
        add(f"conv{dimension}d: {text}", lambda conv=conv, size=size, k=keywords: conv(4, 4, **{"kernel_size": size, **k}), image)
    for text, keywords in {
        "plain": {},
        "no bias, groups": {"groups": 2, "bias": False},
        "stride, output_padding": {"stride": 2, "output_padding": 1, "padding": 1},
        "dilation": {"dilation": 2, "padding": 1},
    }.items():
        add(f"conv_transpose{dimension}d: {text}", lambda conv=transposed, size=size, k=keywords: conv(4, 6, size, **k), image)

add("conv2d: functional, keywords", lambda: Net(lambda m, x: F.conv2d(x, weight=m.w, bias=m.b, padding="valid", stride=(2, 1)), w=normal(3, 4, 2, 2), b=normal(3)), features(4, 5, 5))
add("conv2d: torch.conv2d", lambda: Net(lambda m, x: torch.conv2d(x, m.w, m.b, padding=1), w=normal(3, 4, 3, 3), b=normal(3)), features(4, 5, 5))
add("conv2d: torch.convolution", lambda: Net(lambda m, x: torch.convolution(x, m.w, m.b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), w=normal(3, 4, 3, 3), b=normal(3)), features(4, 5, 5))
add("conv2d: frames folded into the batch", lambda: Net(lambda m, x: m.c(x.flatten(0, 1)).unflatten(0, x.shape[:2]), c=nn.Conv2d(2, 3, 3)), features(3, 2, 5, 5))
add("conv2d: channels_last", lambda: Net(lambda m, x: m.c(x.to(memory_format=torch.channels_last)), c=nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last)), features(4, 5, 5))
add("conv2d: standardised weight", lambda: Net(lambda m, x: F.conv2d(x, (m.w - m.w.mean((1, 2, 3), keepdim=True)) / m.w.std((1, 2, 3), keepdim=True)), w=normal(3, 4, 2, 2)), features(4, 5, 5))
add("conv2d: patches, then tokens", lambda: Net(lambda m, x: m.l(m.c(x).flatten(2).transpose(1, 2)), c=nn.Conv2d(2, 4, 2, 2), l=nn.Linear(4, 3)), features(2, 6, 4))
add("conv2d: unfold and linear", lambda: Net(lambda m, x: m.l(F.unfold(x, 2).transpose(1, 2)), l=nn.Linear(8, 3)), features(2, 4, 4))
add("conv2d: pixel shuffle", lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(2, 2, 3)), features(2, 4, 4))
add("conv2d: one filter for two scales", lambda: Net(lambda m, x: m.c(x).mean((2, 3)) + m.c(F.avg_pool2d(x, 2)).mean((2, 3)), c=nn.Conv2d(2, 3, 2)), features(2, 6, 6))
add("conv2d: squeeze-excite", lambda: Net(lambda m, x: x * m.b(F.relu(m.a(x.mean((2, 3))))).sigmoid()[:, :, None, None], a=nn.Linear(4, 3), b=nn.Linear(3, 4)), features(4, 3, 3))
add("conv2d: residual block with in-place ReLU", lambda: Net(lambda m, x: F.relu(x + m.b(F.relu(m.a(x), inplace=True)), inplace=True), a=nn.Conv2d(3, 3, 3, padding=1), b=nn.Conv2d(3, 3, 3, padding=1)), features(3, 4, 4))
add("conv2d: max pooling", lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)), features(2, 5, 5))
add("conv1d: causal, trimmed", lambda: Net(lambda m, x: m.c(F.pad(x, (2, 0)))[..., : x.shape[-1]], c=nn.Conv1d(3, 3, 3)), features(3, 6))
add("conv1d: unbatched inside the model", lambda: Net(lambda m, x: m.c(x.flatten(1).t())[None].squeeze(0).t(), c=nn.Conv1d(4, 3, 1)), features(4), outcome=raises("no dimension for rows"))

# --- embeddings -----------------------------------------------------------------------------

add("embedding: tokens", lambda: nn.Embedding(7, 3), tokens(4, 7))
add("embedding: one index a row", lambda: nn.Embedding(7, 3), tokens(None, 7))
add("embedding: repeated indices", lambda: nn.Embedding(7, 3), tokens(6, 2))
add("embedding: padding_idx", lambda: nn.Embedding(5, 3, padding_idx=1), tokens(6, 5))
add("embedding: negative padding_idx, functional", lambda: Net(lambda m, x: F.embedding(x, m.w, padding_idx=-2), w=normal(5, 3)), tokens(6, 5))
add("embedding: max_norm", lambda: nn.Embedding(5, 3, max_norm=0.5), tokens(4, 5))
add("embedding: scale_grad_by_freq", lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), tokens(6, 5), outcome=raises("scale_grad_by_freq"))
add("embedding: sparse", lambda: nn.Embedding(5, 3, sparse=True), tokens(4, 5), outcome=raises("sparse"))
add("embedding: w[index]", lambda: Net(lambda m, x: m.w[x], w=normal(5, 3)), tokens(4, 5))
add("embedding: index_select of folded tokens", lambda: Net(lambda m, x: m.w.index_select(0, x.flatten()).view(*x.shape, 3), w=normal(5, 3)), tokens(4, 5))
add("embedding: gather", lambda: Net(lambda m, x: m.w.expand(len(x), 5).gather(1, x), w=normal(5)), tokens(4, 5))
add("embedding: take_along_dim", lambda: Net(lambda m, x: torch.take_along_dim(m.w[None], x[:, :, None], 1), w=normal(5, 3)), tokens(4, 5))
add("embedding: w[i, j]", lambda: Net(lambda m, i, j: m.w[i, j], w=normal(3, 4, 2)), several(tokens(None, 3), tokens(None, 4)))
add("embedding: w[i, j] of tokens, with negative entries", lambda: Net(lambda m, i, j: m.w[i, j - 4], w=normal(3, 4)), several(tokens(5, 3), tokens(5, 4)))
add("embedding: w[:, i]", lambda: Net(lambda m, i: m.w[:, i].t(), w=normal(3, 4)), tokens(None, 4))
add("embedding: index_select of columns", lambda: Net(lambda m, i: m.w.index_select(1, i).t(), w=normal(3, 4)), tokens(None, 4))
add("embedding: take", lambda: Net(lambda m, i: m.w.take(i), w=normal(5, 3)), tokens(4, 15))
add("embedding: a matrix for each row's kind", lambda: Net(lambda m, x, i: torch.bmm(m.w[i], x[:, :, None])[..., 0], w=normal(3, 2, 4)), several(features(4), tokens(None, 3)))
add("embedding: indices with a slice in between", lambda: Net(lambda m, i, j: m.w[i, :, j], w=normal(3, 2, 4)), several(tokens(None, 3), tokens(None, 4)), outcome=raises("mixed index"))
add("embedding: indices that broadcast", lambda: Net(lambda m, i, j: m.w[i[:, None], j], w=normal(3, 4)), several(tokens(None, 3), tokens(5, 4)), outcome=raises("differ in shape"))
add("embedding: one-hot product", lambda: Net(lambda m, x: F.one_hot(x, 5).double() @ m.w, w=normal(5, 3)), tokens(4, 5))
add("embedding: two columns, two tables", lambda: Net(lambda m, x: m.a(x[:, 0]) * m.b(x[:, 1]), a=nn.Embedding(5, 3), b=nn.Embedding(5, 3)), tokens(2, 5))
add("embedding: the same table for two columns", lambda: Net(lambda m, x: m.a(x[:, 0]) * m.a(x[:, 1]), a=nn.Embedding(5, 3)), tokens(2, 5))
add("embedding: mean over tokens", lambda: Net(lambda m, x: m.l(m.e(x).mean(1)), e=nn.Embedding(5, 3), l=nn.Linear(3, 2)), tokens(4, 5))


def bags(model: nn.Module, x: Tensor, **keywords: Any) -> Tensor:
    """Look up bags of unequal sizes: row i has the first 1 + i % 4 of its tokens."""
    sizes = 1 + x[:, -1] % 4
    flat = torch.cat([row[:size] for row, size in zip(x, sizes.tolist(), strict=True)])
    offsets = sizes.cumsum(0) - sizes
    return model(flat, offsets, **keywords)


for mode in ("sum", "mean", "max"):
    add(f"embedding_bag: {mode}", lambda mode=mode: nn.EmbeddingBag(5, 3, mode=mode), tokens(6, 5))
    add(f"embedding_bag: {mode}, offsets", lambda mode=mode: Net(lambda m, x: bags(m.e, x), e=nn.EmbeddingBag(5, 3, mode=mode)), tokens(6, 5))
add("embedding_bag: repeated indices", lambda: nn.EmbeddingBag(2, 3, mode="sum"), tokens(6, 2))
add("embedding_bag: weighted", lambda: Net(lambda m, x, w: m.e(x, per_sample_weights=w), e=nn.EmbeddingBag(5, 3, mode="sum")), several(tokens(4, 5), features(4)))
add("embedding_bag: weighted by a parameter", lambda: Net(lambda m, x: m.e(x, per_sample_weights=m.w[x]), e=nn.EmbeddingBag(5, 3, mode="sum"), w=normal(5)), tokens(4, 5))
add("embedding_bag: padding_idx", lambda: nn.EmbeddingBag(5, 3, mode="mean", padding_idx=2), tokens(6, 5))
add("embedding_bag: padding_idx, offsets", lambda: Net(lambda m, x: bags(m.e, x), e=nn.EmbeddingBag(5, 3, mode="mean", padding_idx=2)), tokens(6, 5))
add("embedding_bag: include_last_offset", lambda: Net(lambda m, x: m.e(x.flatten(), torch.arange(0, x.numel() + 1, x.shape[1])), e=nn.EmbeddingBag(5, 3, mode="sum", include_last_offset=True)), tokens(4, 5))
add("embedding_bag: sparse", lambda: nn.EmbeddingBag(5, 3, mode="sum", sparse=True), tokens(4, 5), outcome=raises("sparse"))
add("embedding_bag: scale_grad_by_freq", lambda: nn.EmbeddingBag(5, 3, mode="sum", scale_grad_by_freq=True), tokens(4, 5), outcome=raises("scale_grad_by_freq"))
add("embedding_bag: max_norm", lambda: nn.EmbeddingBag(5, 3, mode="mean", max_norm=0.5), tokens(4, 5))

# --- norms ----------------------------------------------------------------------------------


def inexact_start(norm: nn.Module) -> nn.Module:
    """Move a norm's parameters and statistics away from 1 and 0."""
    for p in norm.parameters():
        nn.init.normal_(p)
    for name, buffer in norm.named_buffers():
        if name.startswith("running"):
            nn.init.uniform_(buffer, 0.5, 1.5)
    return norm


add("norm: layer", lambda: inexact_start(nn.LayerNorm(4)), features(4))
add("norm: layer, 3-D, no bias", lambda: inexact_start(nn.LayerNorm(4, bias=False)), features(5, 4))
add("norm: layer, over two dimensions", lambda: inexact_start(nn.LayerNorm((5, 4))), features(2, 5, 4))
add("norm: layer, functional, 1 + w", lambda: Net(lambda m, x: F.layer_norm(x, (4,), 1 + m.w, m.b), w=normal(4), b=normal(4)), features(5, 4))
add("norm: layer, after linear", lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)), features(4))
add("norm: group", lambda: inexact_start(nn.GroupNorm(2, 4)), features(4, 3, 3))
add("norm: group, no space", lambda: inexact_start(nn.GroupNorm(2, 4)), features(4))
add("norm: group, frames folded", lambda: Net(lambda m, x: m.n(x.flatten(0, 1)).view_as(x), n=inexact_start(nn.GroupNorm(1, 4))), features(3, 4, 5))
add("norm: instance 1d", lambda: inexact_start(nn.InstanceNorm1d(4, affine=True)), features(4, 6))
add("norm: instance 2d", lambda: inexact_start(nn.InstanceNorm2d(4, affine=True)), features(4, 3, 3))
add("norm: instance 3d", lambda: inexact_start(nn.InstanceNorm3d(2, affine=True)), features(2, 3, 2, 2))
add("norm: instance, tracking, train", lambda: inexact_start(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), features(4, 3, 3))
add("norm: instance, tracking, eval", lambda: inexact_start(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)).eval(), features(4, 3, 3))
add("norm: RMS", lambda: inexact_start(nn.RMSNorm(4)), features(5, 4))
add("norm: RMS by hand, cast", lambda: Net(lambda m, x: (m.w * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)), w=normal(4)), features(5, 4))
add("norm: local statistics of two parameters", lambda: Net(lambda m, x: m.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + m.b, a=normal(4), b=normal(4)), features(5, 4))
for dimension, norm in ((1, nn.BatchNorm1d), (2, nn.BatchNorm2d), (3, nn.BatchNorm3d)):
    add(f"norm: batch {dimension}d, eval", lambda norm=norm: inexact_start(norm(4)).eval(), features(4, *[3] * dimension))
add("norm: batch, eval, no space", lambda: inexact_start(nn.BatchNorm1d(4)).eval(), features(4))
add("norm: batch, functional, eval", lambda: Net(lambda m, x: F.batch_norm(x, m.mean, m.var, m.w, m.b), w=normal(4), b=normal(4), mean=(normal(4),), var=(positive(4),)), features(4, 3))
add("norm: batch, frozen by eval inside train", lambda: Net(lambda m, x: m.l(m.n.eval()(x)), n=inexact_start(nn.BatchNorm1d(4)), l=nn.Linear(4, 2)), features(4))
add("norm: weights as scale and shift", lambda: Net(lambda m, x: F.group_norm(x, 2, m.w, m.b), w=normal(4), b=normal(4)), features(4, 3))

# --- arithmetic with bare parameters --------------------------------------------------------

add("arithmetic: PReLU, one slope", lambda: nn.PReLU(), features(4, 3))
add("arithmetic: PReLU, a slope a channel", lambda: nn.PReLU(4), features(4, 3, 3))
add("arithmetic: PReLU, 2-D", lambda: Net(lambda m, x: F.prelu(x, m.w), w=normal(4)), features(4))
add("arithmetic: positions [1, T, F]", lambda: Net(lambda m, x: x + m.w, w=normal(1, 3, 4)), features(3, 4))
add("arithmetic: positions [T, F]", lambda: Net(lambda m, x: x + m.w, w=normal(3, 4)), features(3, 4))
add("arithmetic: positions, sliced", lambda: Net(lambda m, x: x + m.w[:, : x.shape[1]], w=normal(1, 9, 4)), features(3, 4))
add("arithmetic: class token, expand and cat", lambda: Net(lambda m, x: m.l(torch.cat([m.w.expand(len(x), -1, -1), x], 1)).square(), w=normal(1, 1, 4), l=nn.Linear(4, 3)), features(3, 4))
add("arithmetic: class token, repeat", lambda: Net(lambda m, x: torch.cat((m.w.repeat(len(x), 1, 1), x), dim=1).square(), w=normal(1, 1, 4)), features(3, 4))
add("arithmetic: class token, expand_as and stack", lambda: Net(lambda m, x: torch.stack([m.w.expand_as(x), x], 1).cos(), w=normal(4)), features(4))
add("arithmetic: class token, zeros plus w", lambda: Net(lambda m, x: torch.cat([torch.zeros_like(x[:, :1]) + m.w, x], 1).sin(), w=normal(4)), features(3, 4))
add("arithmetic: class token, broadcast_to, hstack", lambda: Net(lambda m, x: torch.hstack([torch.broadcast_to(m.w, (len(x), 2)), x]).sin(), w=normal(2)), features(4))
add("arithmetic: mask token by where", lambda: Net(lambda m, x: torch.where(x[..., :1] > 0.3, m.w, x).sin(), w=normal(4)), features(3, 4))
add("arithmetic: mask token by masked assignment", lambda: Net(lambda m, x: m.l(_assign_masked(x, m.w)), w=normal(4), l=nn.Linear(4, 2)), features(3, 4))
add("arithmetic: layer scale", lambda: Net(lambda m, x: x + m.w * x.sin(), w=normal(4)), features(3, 4))
add("arithmetic: scale of channels", lambda: Net(lambda m, x: x * m.w[:, None, None] + m.b[None, :, None, None], w=normal(4), b=normal(4)), features(4, 3, 3))
add("arithmetic: temperature, 0-D", lambda: Net(lambda m, x: x * m.t, t=normal()), features(4))
add("arithmetic: temperature, shape [1]", lambda: Net(lambda m, x: x / m.t, t=positive(1)), features(3, 4))
add("arithmetic: logit scale, exp", lambda: Net(lambda m, x: m.t.exp() * F.normalize(x, dim=-1), t=normal()), features(4))
add("arithmetic: minus, both ways", lambda: Net(lambda m, x: (x - m.a) * (m.b - x), a=normal(4), b=normal(4)), features(4))
add("arithmetic: division, both ways", lambda: Net(lambda m, x: (x / m.a) + m.b / (x.square() + 1), a=positive(4), b=normal(4)), features(4))
add("arithmetic: power", lambda: Net(lambda m, x: (x.abs() + 0.5) ** m.p, p=normal(4)), features(4))
add("arithmetic: GeM pooling", lambda: Net(lambda m, x: F.avg_pool2d(x.clamp(min=1e-6).pow(m.p), 3).pow(1.0 / m.p), p=positive(1)), features(4, 3, 3))
add("arithmetic: add with alpha", lambda: Net(lambda m, x: torch.add(x, m.w, alpha=3.0), w=normal(4)), features(4))
add("arithmetic: sub and rsub with alpha", lambda: Net(lambda m, x: torch.sub(m.w, x, alpha=0.5) + torch.rsub(x, m.v, alpha=2.0), w=normal(4), v=normal(3, 4)), features(3, 4))
add("arithmetic: addcmul", lambda: Net(lambda m, x: torch.addcmul(m.b, x, m.w, value=0.5), w=normal(4), b=normal(4)), features(4))
add("arithmetic: addcdiv", lambda: Net(lambda m, x: torch.addcdiv(x, x.sin(), m.w, value=0.5), w=positive(4)), features(4))
add("arithmetic: lerp", lambda: Net(lambda m, x: torch.lerp(x, x.sin(), m.w), w=positive(4)), features(4))
add("arithmetic: maximum and minimum", lambda: Net(lambda m, x: torch.maximum(x, m.a) * torch.minimum(m.b, x), a=normal(4), b=normal(4)), features(4))
add("arithmetic: clamp by parameters", lambda: Net(lambda m, x: torch.clamp(x, m.a, m.b), a=-positive(4), b=positive(4)), features(3, 4))
add("arithmetic: atan2 and hypot", lambda: Net(lambda m, x: torch.atan2(x, m.a) + torch.hypot(m.b, x), a=normal(4), b=normal(4)), features(3, 4))
add("arithmetic: Swish with a slope", lambda: Net(lambda m, x: x * torch.sigmoid(m.b * x), b=normal(1)), features(4))
add("arithmetic: Snake", lambda: Net(lambda m, x: x + torch.sin(m.a * x).square() / m.a, a=positive(4, 1)), features(4, 3))
add("arithmetic: in place, mul_ and add_", lambda: Net(lambda m, x: x.clone().mul_(m.w).add_(m.b).sin(), w=normal(4), b=normal(4)), features(3, 4))
add("arithmetic: augmented assignment", lambda: Net(lambda m, x: _augmented(x, m.w, m.b), w=normal(4), b=normal(4)), features(3, 4))
add("arithmetic: in place with alpha", lambda: Net(lambda m, x: x.clone().add_(m.w, alpha=-0.5), w=normal(4)), features(4))
add("arithmetic: out of two parameters", lambda: Net(lambda m, x: x * (m.a + m.b), a=normal(4), b=normal(4)), features(4))
add("arithmetic: squared distances to prototypes", lambda: Net(lambda m, x: (x[:, None] - m.w).square().sum(-1), w=normal(3, 4)), features(4))
add("arithmetic: cdist to prototypes", lambda: Net(lambda m, x: torch.cdist(x, m.w), w=normal(3, 4)), features(4))
add("arithmetic: cosine similarity to prototypes", lambda: Net(lambda m, x: F.cosine_similarity(x[:, None], m.w[None], dim=-1), w=normal(3, 4)), features(4))
add("arithmetic: cosine classifier", lambda: Net(lambda m, x: F.linear(F.normalize(x), F.normalize(m.w)), w=normal(3, 4)), features(4))
add("arithmetic: gate of two branches", lambda: Net(lambda m, x: m.a(x) * m.g.sigmoid() + (1 - m.g.sigmoid()) * x, a=nn.Linear(4, 4), g=normal()), features(4))
add("arithmetic: relative position bias", lambda: Net(lambda m, x: (x @ x.transpose(1, 2) + m.w[m.i]).softmax(-1) @ x, w=normal(5), i=((torch.arange(3)[:, None] - torch.arange(3)) + 2,)), features(3, 4))
add("arithmetic: swapped broadcast, parameter has more dimensions", lambda: Net(lambda m, x: (x[:, None] * m.w).sum(-1), w=normal(1, 3, 4)), features(4))
add("arithmetic: parameter as a batch of one", lambda: Net(lambda m, x: x + m.w, w=normal(1, 4)), features(4))
add("arithmetic: complex filter", lambda: Net(lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.w), n=6), w=normal(4, 2)), features(3, 6))
add("arithmetic: spectral operator", lambda: Net(lambda m, x: torch.fft.irfft(torch.einsum("bix,iox->box", torch.fft.rfft(x), torch.view_as_complex(m.w)), n=6), w=normal(3, 2, 4, 2)), features(3, 6))
add("arithmetic: cross entropy with learned logits offset", lambda: Net(lambda m, x: x + m.b, b=normal(4)), several(features(4), tokens(None, 4)), loss=lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"))
add("arithmetic: Gaussian likelihood with learned variance", lambda: Net(lambda m, x, y: F.gaussian_nll_loss(m.l(x), y, m.v.exp().expand(len(x), 3), reduction="none"), l=nn.Linear(4, 3), v=normal(3)), several(features(4), features(3)))

add("arithmetic: masked fill by a parameter", lambda: Net(lambda m, x: x.sin().masked_fill(x > 0.3, m.w) + x.cos().masked_fill_(x < 0, m.w), w=normal()), features(4))
add("arithmetic: a parameter masked by rows", lambda: Net(lambda m, x: m.w.masked_fill(x > 0.3, 2.0) * x, w=normal(4)), features(4))
add("arithmetic: max and min of two", lambda: Net(lambda m, x: torch.max(x, m.a) * torch.min(m.b, x), a=normal(4), b=normal(4)), features(4))
add("arithmetic: clamp_min, clamp_max, fmod, remainder", lambda: Net(lambda m, x: torch.clamp_min(x, m.a) + torch.clamp_max(x, m.b) + torch.fmod(x, m.a) + torch.remainder(m.b, x), a=normal(4), b=normal(4)), features(4))
add("arithmetic: cdist, prototypes first", lambda: Net(lambda m, x: torch.cdist(m.w, x).t(), w=normal(3, 4)), features(4))
add("arithmetic: cdist, prototypes of each row", lambda: Net(lambda m, x: torch.cdist(m.w[: len(x)], x), w=normal(8, 3, 4)), features(5, 4), oracle="joint")
add("arithmetic: cosine similarity to a vector of each row", lambda: Net(lambda m, x: F.cosine_similarity(m.w[: len(x)], x)[:, None], w=normal(8, 4)), features(4), oracle="joint")
add("arithmetic: outer and vecdot", lambda: Net(lambda m, x: torch.outer(x[:, 0], m.a) * torch.linalg.vecdot(x, m.b)[:, None], a=normal(3), b=normal(4)), features(4))
for loss_of in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
    add(f"arithmetic: {loss_of.__name__} against learned centres", lambda f=loss_of: Net(lambda m, x: f(m.l(x), m.w.expand(len(x), 3), reduction="none"), l=nn.Linear(4, 3), w=normal(3)), features(4))
add("arithmetic: divergence from a learned distribution", lambda: Net(lambda m, x: F.kl_div(m.l(x).log_softmax(1), m.w.softmax(0).expand(len(x), 3), reduction="none"), l=nn.Linear(4, 3), w=normal(3)), features(4))
add("arithmetic: meshgrid with rows", lambda: Net(lambda m, x: torch.meshgrid(x[:, 0], m.w, indexing="ij")[1].sin(), w=normal(3)), features(4), outcome=raises("no operator observes it"))
add("arithmetic: positions made from an inverted mask", lambda: Net(lambda m, x: x.masked_fill(~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), 0.0) * m.w, w=normal(5)), features(5, 5))
add("derived: activation in place", lambda: Net(lambda m, x: F.linear(x, F.relu(m.l(m.c), inplace=True)), c=(normal(3, 5),), l=nn.Linear(5, 4)), features(4))
add("view: an expert, by a number that rows chose", lambda: Net(lambda m, x: F.linear(x, m.w[(x[:, 0] > 0).long().sum() % 3]), w=normal(3, 3, 4)), features(4), oracle="joint")
add("layout: rows picked under a leading dimension", lambda: Net(lambda m, x: x[:, :3].index_add(0, torch.arange(0, len(x), 2), m.l(x[None, ::2].reshape(-1, 4))), l=nn.Linear(4, 3)), features(4), oracle="joint")
add("layout: overlapping windows by as_strided", lambda: Net(lambda m, x: m.l(x.transpose(1, 2).contiguous().transpose(1, 2).as_strided((len(x), 4, 3, 2), (15, 1, 5, 1)).flatten(2)), l=nn.Linear(6, 2)), features(5, 3))


def _assign_masked(x: Tensor, w: Tensor) -> Tensor:
    x = x.clone()
    x[x[..., 0] > 0.3] = w
    return x


def _augmented(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x.sin()
    x *= w
    x += b
    x /= w
    x -= b
    return x * x


# --- views, casts and derived parameters ----------------------------------------------------

add("view: w[:n]", lambda: Net(lambda m, x: F.linear(x, m.w[:3], m.b[:3]), w=normal(5, 4), b=normal(5)), features(4))
add("view: strided and reversed columns", lambda: Net(lambda m, x: x @ m.w[::2].flip(1), w=normal(8, 3)), features(4))
add("view: rows by a list", lambda: Net(lambda m, x: F.linear(x, m.w[[0, 2, 2]]), w=normal(5, 4)), features(4))
add("view: columns by a buffer", lambda: Net(lambda m, x: F.linear(x, m.w[:, m.i]), w=normal(3, 9), i=(torch.tensor([0, 3, 3, 8]),)), features(4))
add("view: rows by a mask", lambda: Net(lambda m, x: F.linear(x, m.w[m.i]), w=normal(4, 4), i=(torch.tensor([True, False, True, True]),)), features(4))
add("view: chunk", lambda: Net(lambda m, x: _product(F.linear(x, w) for w in m.w.chunk(3)), w=normal(9, 4)), features(4))
add("view: split", lambda: Net(lambda m, x: torch.cat([F.linear(x, w) * s for w, s in zip(m.w.split([2, 3]), (1.0, -2.0), strict=True)], 1), w=normal(5, 4)), features(4))
add("view: unbind", lambda: Net(lambda m, x: _product(F.linear(x, w) for w in m.w.unbind(0)), w=normal(2, 3, 4)), features(4))
add("view: iterated", lambda: Net(lambda m, x: _product(F.linear(x, w) for w in m.w), w=normal(2, 3, 4)), features(4))
add("view: stacked weights by number", lambda: Net(lambda m, x: F.linear(F.linear(x, m.w[0], m.b[0]).tanh(), m.w[1], m.b[1]), w=normal(2, 4, 4), b=normal(2, 4)), features(4))
add("view: view, reshape, flatten, permute", lambda: Net(lambda m, x: x @ m.w.view(12).reshape(3, 4).permute(1, 0) + m.b.flatten(), w=normal(2, 6), b=normal(1, 3)), features(4))
add("view: unsqueeze, squeeze, expand", lambda: Net(lambda m, x: x * m.w.unsqueeze(0).expand(3, 4) + m.b.squeeze(), w=normal(4), b=normal(1, 4, 1)), features(3, 4))
add("view: narrow, select, movedim", lambda: Net(lambda m, x: x @ m.w.narrow(1, 1, 4).movedim(0, 2).select(1, 1), w=normal(3, 6, 2)), features(4))
add("view: to float32 and back", lambda: Net(lambda m, x: F.linear(x, m.w.float().double()), w=normal(3, 4)), features(4), single=True)
add("view: type_as, contiguous, clone", lambda: Net(lambda m, x: F.linear(x, m.w.t().contiguous().t().type_as(x).clone()), w=normal(3, 4)), features(4))
add("view: stack of parameters", lambda: Net(lambda m, x: torch.einsum("bi,koi->bko", x, torch.stack([m.a, m.b])), a=normal(3, 4), b=normal(3, 4)), features(4))
add("view: cat of parameters", lambda: Net(lambda m, x: F.linear(x, torch.cat([m.a, m.b]), torch.cat([m.c, m.c.sin()])), a=normal(2, 4), b=normal(2, 4), c=normal(2)), features(4))
add("view: cat of parameter and constant", lambda: Net(lambda m, x: F.linear(x, torch.cat([m.a, torch.ones(1, 4, dtype=torch.float64)])), a=normal(2, 4)), features(4))
add("view: repeat and repeat_interleave", lambda: Net(lambda m, x: x * m.a.repeat(2) + m.b.repeat_interleave(2), a=normal(2), b=normal(2)), features(4))
add("view: pad, tril, diag", lambda: Net(lambda m, x: F.pad(x @ m.w.tril(), (1, 1)) @ torch.diag(F.pad(m.d, (1, 1), value=0.5)), w=normal(4, 4), d=normal(4)), features(4))
add("view: whole and slice together", lambda: Net(lambda m, x: F.linear(x, m.w) + F.linear(x, m.w[1:2]).sin(), w=normal(3, 4)), features(4))
add("view: taken before the forward branches", lambda: Net(_branches, w=normal(4, 3)), features(4))
add("derived: exp", lambda: Net(lambda m, x: F.linear(x, m.w.exp()), w=normal(3, 4)), features(4))
add("derived: softplus, scaled", lambda: Net(lambda m, x: F.linear(x, F.softplus(m.w) * m.s), w=normal(3, 4), s=normal(3, 1)), features(4))
add("derived: masked weight", lambda: Net(lambda m, x: F.linear(x, m.w * m.mask), w=normal(3, 4), mask=(torch.tensor([[1.0, 0, 1, 0]] * 3, dtype=torch.float64),)), features(4))
add("derived: centred and normalised", lambda: Net(lambda m, x: F.linear(x, (m.w - m.w.mean()) / m.w.norm()), w=normal(3, 4)), features(4))
add("derived: softmax mixture of branches", lambda: Net(lambda m, x: sum(a * f(x) for a, f in zip(m.a.softmax(0), (torch.sin, torch.cos, torch.tanh), strict=True)), a=normal(3)), features(4))
add("derived: low rank, F.linear(x, B @ A)", lambda: Net(lambda m, x: F.linear(x, m.w + m.b @ m.a), w=(normal(3, 4),), b=normal(3, 2), a=normal(2, 4)), features(4))
add("derived: low rank, two products", lambda: Net(lambda m, x: m.l(x) + 0.5 * (x @ m.a.t()) @ m.b.t(), l=nn.Linear(4, 3).requires_grad_(False), b=normal(3, 2), a=normal(2, 4)), features(5, 4))
add("derived: low rank on a trained weight", lambda: Net(lambda m, x: F.linear(x, m.l.weight + m.b @ m.a, m.l.bias), l=nn.Linear(4, 3), b=normal(3, 2), a=normal(2, 4)), features(4))
add("derived: weights out of a network of parameters", lambda: Net(lambda m, x: F.linear(x, m.h(m.z).view(3, 4)), z=normal(5), h=nn.Linear(5, 12)), features(4))
add("derived: Kronecker product", lambda: Net(lambda m, x: x @ torch.kron(m.a, m.b), a=normal(2, 2), b=normal(2, 3)), features(4))
add("derived: matrix exponential", lambda: Net(lambda m, x: x @ torch.linalg.matrix_exp(m.w - m.w.t()), w=normal(4, 4)), features(4))
add("derived: w and exp(w)", lambda: Net(lambda m, x: F.linear(x, m.w) + F.linear(x.sin(), m.w.exp()), w=normal(3, 4)), features(4))
add("derived: straight-through rounding", lambda: Net(lambda m, x: F.linear(x, m.w + (m.w.round() - m.w).detach()), w=normal(3, 4)), features(4))
add("derived: half of it detached", lambda: Net(lambda m, x: F.linear(x, m.w) * F.linear(x, m.w.detach()), w=normal(3, 4)), features(4))
add("derived: noise on the weights", lambda: Net(lambda m, x: F.linear(x, m.mu + m.rho.exp() * m.eps), mu=normal(3, 4), rho=normal(3, 4), eps=(normal(3, 4),)), features(4))
add("derived: old weight norm", lambda: _quiet(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.utils.weight_norm(nn.Linear(3, 2), dim=None))), features(4))
add("derived: weight norm", lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(3, 2), dim=None)), features(4))
add("derived: weight norm of a convolution", lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 2)), features(2, 4, 4))
add("derived: old spectral norm, train", lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), features(4))
add("derived: old spectral norm, eval", lambda: nn.utils.spectral_norm(nn.Linear(4, 3)).eval(), features(4))
add("derived: spectral norm, train", lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 2)), features(2, 4, 4))
add("derived: orthogonal", lambda: parametrizations.orthogonal(nn.Linear(4, 4)), features(4))
add("derived: a parametrization of one's own, cached", lambda: Net(lambda m, x: _cached(m, x), l=_parametrized(nn.Linear(4, 4))), features(4))
add("derived: pruned", lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", amount=0.5), features(4))
add("derived: linear of latents, then broadcast", lambda: Net(lambda m, x: (m.l(m.z)[None] * x[:, None]).sum(-1), z=normal(3, 4), l=nn.Linear(4, 4)), features(4))
add("derived: changed in place, sign turned", lambda: Net(lambda m, x: F.linear(x, m.w.clone().neg_()), w=normal(3, 4)), features(4))
add("derived: changed in place, masked", lambda: Net(lambda m, x: F.linear(x, m.w.clone().mul_(m.mask)), w=normal(3, 4), mask=(torch.tensor([1.0, 0, -1, 2], dtype=torch.float64),)), features(4))
add("derived: changed in place, augmented", lambda: Net(lambda m, x: F.linear(x, _rescaled(m.w)), w=normal(3, 4)), features(4))
add("derived: changed in place, a row set to zero", lambda: Net(lambda m, x: F.linear(x, _first_row_zero(m.w)), w=normal(3, 4)), features(4))
add("derived: changed in place, transposed", lambda: Net(lambda m, x: F.linear(x, m.w.clone().t_()), w=normal(4, 3)), features(4))
add("derived: changed in place through a view", lambda: Net(lambda m, x: F.linear(x, _first_row_filled(m.w)), w=normal(3, 4)), features(4), outcome=raises("changed in place through a view"))
add("derived: a view of it taken before it changed", lambda: Net(lambda m, x: F.linear(x, _view_of_changed(m.w)), w=normal(3, 4)), features(4), outcome=raises("changed in place through a view"))
add("derived: written into zeros", lambda: Net(lambda m, x: F.linear(x, _assembled(m.a, m.b)), a=normal(2, 4), b=normal(1, 4)), features(4))
add("derived: copied into zeros", lambda: Net(lambda m, x: F.linear(x, x.new_zeros(3, 4).copy_(-m.w)), w=normal(3, 4)), features(4))
add("derived: added by index", lambda: Net(lambda m, x: F.linear(x, x.new_ones(3, 4).index_add_(0, torch.tensor([2, 0]), m.w)), w=normal(2, 4)), features(4))


def _rescaled(w: Tensor) -> Tensor:
    w = w * 1.0
    w *= -0.5
    w += 1.0
    with torch.no_grad():
        w.clamp_(min=0.1)
    return w


def _first_row_zero(w: Tensor) -> Tensor:
    w = w.clone()
    w[0] = 0.0
    return w


def _first_row_filled(w: Tensor) -> Tensor:
    w = w.clone()
    w[0].fill_(0.0)
    return w


def _view_of_changed(w: Tensor) -> Tensor:
    w = w.clone()
    view = w[:2]
    w.neg_()
    return view


def _assembled(a: Tensor, b: Tensor) -> Tensor:
    w = a.new_zeros(3, 4)
    w[:2] = a
    w[2:] = b.exp()
    return w



def _branches(m: Any, x: Tensor) -> Tensor:
    w = m.w.t()
    return F.linear(x, w) + F.linear(x.sin(), w.flip(0))


def _product(parts: Any) -> Tensor:
    result: Any = 1.0
    for part in parts:
        result = result * part
    return result


def _quiet(build: Callable[[], Any]) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


def _parametrized(layer: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def _cached(m: Any, x: Tensor) -> Tensor:
    with parametrize.cached():
        return m.l(m.l(x).tanh())


# --- parameters used several times ----------------------------------------------------------


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x)).tanh())


def _unrolled(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 4)
    for t in range(x.shape[1]):
        h = torch.tanh(m.i(x[:, t]) + m.h(h))
    return h


def _cells(m: Any, x: Tensor) -> Tensor:
    state = None
    outputs = []
    for t in range(x.shape[1]):
        state = m.c(x[:, t], state)
        outputs.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(outputs, 1)


add("reuse: tied embedding", TiedLanguageModel, tokens(5, 6))
add("reuse: tied autoencoder, w and w.t()", lambda: Net(lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w.t()), w=normal(3, 4)), features(4))
add("reuse: a cell unrolled", lambda: Net(_unrolled, i=nn.Linear(3, 4), h=nn.Linear(4, 4)), features(5, 3))
add("reuse: the same layer twice", lambda: Net(lambda m, x: m.l(m.l(x).tanh()), l=nn.Linear(4, 4)), features(4))
add("reuse: the same layer for both inputs", lambda: Net(lambda m, x, y: m.l(x) * m.l(y), l=nn.Linear(4, 3)), several(features(4), features(4)))
add("reuse: a layer on tokens and on their mean", lambda: Net(lambda m, x: m.l(x).sin().mean(1) + m.l(x.mean(1)), l=nn.Linear(4, 3)), features(5, 4))
add("reuse: module call and functional call", lambda: Net(lambda m, x: m.l(x) + F.linear(x.sin(), m.l.weight), l=nn.Linear(4, 3)), features(4))
add("reuse: module call and a bare product", lambda: Net(lambda m, x: m.l(x) * (x @ m.l.weight.t()).cos() + m.l.bias, l=nn.Linear(4, 3)), features(4))
add("reuse: two norms with one scale", lambda: Net(lambda m, x: F.layer_norm(x, (4,), m.w) + F.rms_norm(x, (4,), m.w), w=normal(4)), features(4))
add("reuse: one slope everywhere", lambda: Net(lambda m, x: F.prelu(m.l(F.prelu(x, m.w)), m.w), w=normal(1), l=nn.Linear(4, 4)), features(4))
add("reuse: one position table for two streams", lambda: Net(lambda m, x: (x + m.w) * (x.sin() - m.w), w=normal(3, 4)), features(3, 4))
add("reuse: a shared convolution, stacked", lambda: Net(lambda m, x: m.c(m.c(x).relu()).relu() + m.c(x), c=nn.Conv1d(3, 3, 3, padding=1)), features(3, 5))
add("reuse: shared blocks", lambda: Net(lambda m, x: m.b(m.b(m.b(x))), b=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())), features(3, 4))
add("reuse: embedding and embedding_bag", lambda: Net(lambda m, x: F.embedding(x, m.w).mean(1) * F.embedding_bag(x, m.w, mode="sum"), w=normal(5, 3)), tokens(4, 5))
add("reuse: a parameter under two names", lambda: _aliased(), features(4))
add("reuse: cancelling uses", lambda: Net(lambda m, x: F.linear(x, m.w) - 2 * F.linear(x, m.w) + F.linear(x.flip(1), m.w), w=normal(3, 4)), features(4))


def _aliased() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight, second.bias = first.weight, first.bias
    return nn.Sequential(first, nn.Tanh(), second)


# --- attention ------------------------------------------------------------------------------


def self_attention(first: bool = True, **keywords: Any) -> nn.Module:
    """Attention of width 4 with two heads; with `first` False, time comes first inside."""
    call = {k: keywords.pop(k) for k in ("need_weights", "average_attn_weights") if k in keywords}
    masks = keywords.pop("masks", lambda x: {})

    def forward(m: Any, x: Tensor) -> Tensor:
        y = x if first else x.transpose(0, 1)
        y, _ = m.a(y, y, y, **call, **masks(x))
        return y if first else y.transpose(0, 1)

    attention = nn.MultiheadAttention(4, 2, batch_first=first, **keywords)
    for p in attention.parameters():
        nn.init.normal_(p, std=0.7)
    return Net(forward, a=attention)


def _causal(x: Tensor) -> dict[str, Any]:
    return {"attn_mask": torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)}


def _padding(x: Tensor) -> dict[str, Any]:
    return {"key_padding_mask": torch.arange(x.shape[1])[None] > 1 + (x[:, :1, 0] > 0)}


def _mask_per_head(x: Tensor) -> dict[str, Any]:
    mask = x[:, :, :1] * x[:, None, :, 1]
    return {"attn_mask": mask.repeat_interleave(2, 0)}


noisy = {"strict_zeros": False}  # the key's bias has no gradient but rounding
add("attention: batch first", lambda: self_attention(), features(3, 4), **noisy)
add("attention: time first", lambda: self_attention(first=False), features(3, 4), **noisy)
add("attention: time first, as long as the batch", lambda: self_attention(first=False), features(5, 4), **noisy)
add("attention: time first, twice the batch", lambda: self_attention(first=False), features(10, 4), **noisy)
add("attention: no weights wanted", lambda: self_attention(need_weights=False), features(3, 4), **noisy)
add("attention: weights of each head wanted", lambda: self_attention(average_attn_weights=False), features(3, 4), **noisy)
add("attention: no bias", lambda: self_attention(bias=False), features(3, 4), **noisy)
add("attention: bias_k, bias_v", lambda: self_attention(add_bias_kv=True), features(3, 4), **noisy)
add("attention: zero attention", lambda: self_attention(add_zero_attn=True), features(3, 4), **noisy)
add("attention: causal", lambda: self_attention(masks=_causal), features(3, 4), **noisy)
add("attention: causal, no weights wanted", lambda: self_attention(masks=lambda x: {**_causal(x), "is_causal": True}, need_weights=False), features(3, 4), **noisy)
add("attention: padding", lambda: self_attention(masks=_padding), features(4, 4), **noisy)
add("attention: padding, time first", lambda: self_attention(first=False, masks=_padding), features(4, 4), **noisy)
add("attention: a float mask per row and head", lambda: self_attention(masks=_mask_per_head), features(3, 4), **noisy)
add("attention: eval", lambda: self_attention().eval(), features(3, 4), **noisy)
add("attention: cross", lambda: Net(lambda m, x, y: m.a(x, y, y)[0], a=nn.MultiheadAttention(4, 2, batch_first=True)), several(features(3, 4), features(5, 4)), **noisy)
add("attention: cross, kdim and vdim", lambda: Net(lambda m, x, y, z: m.a(x, y, z)[0], a=nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)), several(features(3, 4), features(2, 3), features(2, 5)), **noisy)
add("attention: query is a learned token", lambda: Net(lambda m, x: m.a(m.q.expand(len(x), -1, -1), x, x)[0], q=normal(1, 2, 4), a=nn.MultiheadAttention(4, 2, batch_first=True)), features(3, 4), **noisy)
add("attention: the loss reads the weights", lambda: Net(lambda m, x: m.a(x, x, x)[1], a=nn.MultiheadAttention(4, 2, batch_first=True)), features(3, 4), strict_zeros=False)
add("attention: one projection, chunked, scaled_dot_product_attention", lambda: Net(_fused, qkv=nn.Linear(4, 12), o=nn.Linear(4, 4)), features(3, 4), **noisy)
add("attention: learned bias of scores", lambda: Net(lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m.b), b=normal(2, 3, 3)), features(2, 3, 4))
add("attention: learned keys and values", lambda: Net(lambda m, x: F.scaled_dot_product_attention(x, m.k.expand(len(x), -1, -1), m.v.expand(len(x), -1, -1)), k=normal(5, 4), v=normal(5, 4)), features(3, 4))
add("attention: windows folded into the batch", lambda: Net(_windows, qkv=nn.Linear(4, 12), o=nn.Linear(4, 4), b=normal(4, 4)), features(4, 6, 4), **noisy)
for norm_first in (False, True):
    add(f"transformer: encoder layer, norm_first={norm_first}", lambda n=norm_first: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, activation="gelu", batch_first=True, norm_first=n), features(3, 4), **noisy)
add("transformer: encoder layer, time first", lambda: Net(lambda m, x: m.t(x.transpose(0, 1)).transpose(0, 1), t=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)), features(3, 4), **noisy)
add("transformer: encoder layer, eval", lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).eval(), features(3, 4), **noisy)
add("transformer: two layers", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False), features(3, 4), **noisy)
add("transformer: decoder layer", lambda: Net(lambda m, x, y: m.t(x, y), t=nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)), several(features(3, 4), features(2, 4)), **noisy)
add("transformer: whole", lambda: Net(lambda m, x, y: m.t(x, y), t=nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)), several(features(3, 4), features(2, 4)), **noisy)


def _fused(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).view(len(x), -1, 3, 2, 2).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.o(y.transpose(1, 2).flatten(2))


def _windows(m: Any, x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    y = x.view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
    q, k, v = m.qkv(y).chunk(3, -1)
    y = m.o((q @ k.transpose(1, 2) + m.b).softmax(-1) @ v)
    return y.view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)


# --- recurrent networks ---------------------------------------------------------------------


def recurrent(
    kind: type[nn.RNNBase], first: bool = True, last: bool = False, **keywords: Any
) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        y, state = m.r(x if first else x.transpose(0, 1))
        if last:
            state = state[0] if isinstance(state, tuple) else state
            return torch.cat([state[-1], state[0]], -1)
        return y if first else y.transpose(0, 1)

    return Net(forward, r=kind(3, 4, batch_first=first, **keywords))


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    name = kind.__name__
    add(f"recurrent: {name}", lambda k=kind: recurrent(k), features(5, 3))
    add(f"recurrent: {name}, time first", lambda k=kind: recurrent(k, first=False), features(4, 3))
    add(f"recurrent: {name}, bidirectional, 2 layers", lambda k=kind: recurrent(k, bidirectional=True, num_layers=2), features(4, 3))
    add(f"recurrent: {name}, last state, no bias", lambda k=kind: recurrent(k, last=True, num_layers=2, bias=False), features(4, 3))
add("recurrent: LSTM, time first, as long as the batch", lambda: recurrent(nn.LSTM, first=False), features(5, 3))
add("recurrent: LSTM, proj_size", lambda: recurrent(nn.LSTM, proj_size=2), features(4, 3))
add("recurrent: RNN, ReLU", lambda: recurrent(nn.RNN, nonlinearity="relu"), features(4, 3))
add("recurrent: GRU, learned initial state", lambda: Net(lambda m, x: m.r(x, m.h.expand(-1, len(x), -1).contiguous())[0], h=normal(1, 1, 4), r=nn.GRU(3, 4, batch_first=True)), features(4, 3))
add("recurrent: LSTM, packed by length", lambda: Net(lambda m, x: _packed(m, x), r=nn.LSTM(3, 4, batch_first=True)), features(4, 3), outcome=raises("packed"))
add("recurrent: LSTM between linear layers", lambda: Net(lambda m, x: m.o(m.r(m.i(x))[0][:, -1]), i=nn.Linear(3, 3), r=nn.LSTM(3, 4, batch_first=True), o=nn.Linear(4, 2)), features(4, 3))
add("recurrent: LSTMCell loop", lambda: Net(_cells, c=nn.LSTMCell(3, 4)), features(4, 3))
add("recurrent: GRUCell loop", lambda: Net(_cells, c=nn.GRUCell(3, 4)), features(4, 3))
add("recurrent: RNNCell loop", lambda: Net(_cells, c=nn.RNNCell(3, 4)), features(4, 3))


def _packed(m: Any, x: Tensor) -> Tensor:
    lengths = 2 + (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0).long()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, _ = nn.utils.rnn.pad_packed_sequence(
        m.r(packed)[0], batch_first=True, total_length=x.shape[1]
    )
    return y


# --- rows that are not where one thinks -----------------------------------------------------

add("layout: tokens folded into the batch", lambda: Net(lambda m, x: m.l(x.reshape(-1, 4)).view(len(x), -1, 3), l=nn.Linear(4, 3)), features(5, 4))
add("layout: each row twice, side by side", lambda: Net(lambda m, x: m.l(x.repeat_interleave(2, 0)).view(len(x), -1), l=nn.Linear(4, 3)), features(4))
for length in (3, 5, 7, 8, 10, 14):
    add(f"layout: time first, length {length}", lambda: Net(lambda m, x: m.n(m.l(x.transpose(0, 1)).sin()).transpose(0, 1), l=nn.Linear(4, 3), n=nn.LayerNorm(3)), features(length, 4))
for length in (3, 5, 7, 8):
    add(f"layout: time first and folded, length {length}", lambda: Net(lambda m, x: (m.l(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], len(x), 3).transpose(0, 1)), l=nn.Linear(4, 3)), features(length, 4))
add("layout: two views, cat along the batch", lambda: Net(lambda m, x: torch.cat(m.l(cat_views(x)).chunk(2), 1), l=nn.Linear(4, 3)), features(4))
add("layout: two views, cat along the batch, of folded tokens", lambda: Net(lambda m, x: torch.cat(m.l(cat_views(x)).chunk(2), 1), l=nn.Linear(4, 3)), features(2, 4))
add("layout: batch repeated as a whole", lambda: Net(lambda m, x: m.l(x.repeat(2, 1)).view(2, len(x), -1).transpose(0, 1), l=nn.Linear(4, 3)), features(4))
add("layout: two views stacked in front", lambda: Net(lambda m, x: m.l(torch.stack([x, x.sin()])).transpose(0, 1), l=nn.Linear(4, 3)), features(4))
add("layout: rows reversed inside", lambda: Net(lambda m, x: m.l(x.flip(0)).flip(0), l=nn.Linear(4, 3)), features(4))
add("layout: rows sorted inside", lambda: Net(lambda m, x: _sorted(m, x), l=nn.Linear(4, 3)), features(4))
add("layout: rows rolled inside", lambda: Net(lambda m, x: m.l(x.roll(1, 0)).roll(-1, 0), l=nn.Linear(4, 3)), features(4))
add("layout: features first", lambda: Net(lambda m, x: (m.w[:, None] * x.t() + m.b[:, None]).t(), w=normal(4), b=normal(4)), features(4))
add("layout: routed by a mask", lambda: Net(_routed_by_mask, a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(4))
add("layout: routed by an index", lambda: Net(_routed_by_index, a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(2, 4))
add("layout: some rows only", lambda: Net(lambda m, x: _first_rows(m, x), l=nn.Linear(4, 3)), features(4))
add("layout: half the batch", lambda: Net(lambda m, x: _halves(m, x), l=nn.Linear(4, 3), k=nn.Linear(4, 3)), features(4), labels=((2, 0, 2, -1, 1, 0), (0, 0, 1, 1)), rows=(4,), oracle="joint")
add("layout: row by row in a loop", lambda: Net(lambda m, x: torch.stack([m.l(row) for row in x]), l=nn.Linear(4, 3)), features(4), outcome=raises("one row was selected"))
add("layout: row by row, batches of one", lambda: Net(lambda m, x: torch.cat([m.l(row[None]) for row in x]), l=nn.Linear(4, 3)), features(4), outcome=raises("one row was selected"))
add("layout: vmap over rows", lambda: Net(lambda m, x: torch.vmap(lambda row: F.linear(row, m.w))(x), w=normal(3, 4)), features(4), outcome=raises("rows"))
for length in (3, 5, 7, 8, 10, 14):
    add(f"layout: positions looked up, [T], length {length}", lambda n=length: Net(lambda m, x: m.l(x + m.p(torch.arange(x.shape[1]))).sin(), p=nn.Embedding(n, 4), l=nn.Linear(4, 3)), features(length, 4))
    add(f"layout: positions looked up in a buffer, [1, T], length {length}", lambda n=length: Net(lambda m, x: x.sin() * m.p(m.i[:, : x.shape[1]]), p=nn.Embedding(20, 4), i=(torch.arange(20)[None],)), features(length, 4))
    add(f"layout: positions as a parameter [T, F], length {length}", lambda n=length: Net(lambda m, x: m.l(x + m.p).sin(), p=normal(n, 4), l=nn.Linear(4, 3)), features(length, 4))
    add(f"layout: latents through a linear layer, {length} of them", lambda n=length: Net(lambda m, x: (m.l(m.z) * x[:, None]).sum(-1), z=normal(n, 4), l=nn.Linear(4, 4)), features(4))
add("layout: positions looked up in a buffer of the batch's length", lambda: Net(lambda m, x: x.sin() * m.p(m.i), p=nn.Embedding(8, 4), i=(torch.arange(8),)), features(8, 4))
add("layout: a constant table through a linear layer, as long as the batch", lambda: Net(lambda m, x: (m.l(m.z) * x[:, None]).sum(-1), z=(normal(5, 4),), l=nn.Linear(4, 4)), features(4))
add("layout: graph, nodes of each row folded", lambda: Net(lambda m, x: (m.a @ m.l(x)).sin(), a=(normal(3, 3),), l=nn.Linear(4, 3)), features(3, 4))
add("layout: products of all pairs of rows", lambda: Net(lambda m, x: F.normalize(m.a(x)) @ F.normalize(m.b(x.sin())).t(), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(4), oracle="uses")
add("layout: batch mean subtracted", lambda: Net(lambda m, x: m.l(x) - m.l(x).mean(0), l=nn.Linear(4, 3)), features(4), oracle="uses")
add("layout: mixed up inside the model", lambda: Net(lambda m, x: m.b((0.7 * m.a(x) + 0.3 * m.a(x).flip(0)).sin()), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), features(4), outcome=raises("joined different rows"))


def _sorted(m: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.l(x[order])[order.argsort()]


def _routed_by_mask(m: Any, x: Tensor) -> Tensor:
    first = x[:, 0] > 0
    y = x.new_zeros(len(x), 3)
    y[first] = m.a(x[first])
    y[~first] = m.b(x[~first])
    return y


def _routed_by_index(m: Any, x: Tensor) -> Tensor:
    flat = x.reshape(-1, 4)
    y = flat.new_zeros(len(flat), 3)
    for number, expert in enumerate((m.a, m.b)):
        index = ((flat[:, 0] > 0).long() == number).nonzero().squeeze(1)
        y = y.index_add(0, index, expert(flat[index]))
    return y.view(len(x), 2, 3)


def _first_rows(m: Any, x: Tensor) -> Tensor:
    keep = (x[:, 0] > -0.2).nonzero().squeeze(1)
    return x[:, :3].clone().index_add(0, keep, m.l(x[keep]))


def _halves(m: Any, x: Tensor) -> Tensor:
    a, b = x.chunk(2)
    return torch.cat([m.l(a), m.k(b)])


# --- what a loss may look like --------------------------------------------------------------


def _without_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


def _input_gradient(m: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = m(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.squeeze(1) + slope.square().sum(1)


def _two_outputs(m: nn.Module, x: Tensor) -> Tensor:
    y, z = m(x)
    return wavy(y) + z.square().sum(1)


add("loss: a parameter it does not use", lambda: Net(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3), w=normal(5)), features(4))
add("loss: a parameter multiplied by zero", lambda: Net(lambda m, x: m.a(x) + 0.0 * m.b(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(4))
add("loss: an output thrown away", lambda: Net(lambda m, x: (m.a(x), m.b(x))[0], a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(4))
add("loss: frozen layers", lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 3)), features(4))
add("loss: a frozen layer above a trained one", lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3).requires_grad_(False)), features(4))
add("loss: two outputs", lambda: Net(lambda m, x: (m.a(x), m.b(m.a(x).sin())), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), features(4), loss=_two_outputs)
add("loss: outputs in a dictionary", lambda: Net(lambda m, x: {"y": m.a(x)}, a=nn.Linear(4, 3)), features(4), loss=lambda m, x: wavy(m(x)["y"]))
add("loss: cross entropy of tokens", lambda: nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6)), tokens(5, 6), loss=lambda m, x: F.cross_entropy(m(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none").mean(1))
add("loss: two forward passes", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), features(4), loss=lambda m, x: wavy(m(x)) + (m(x) - m(x.sin())).square().sum(1))
add("loss: reads the weights too, row by row", lambda: nn.Linear(4, 3), features(4), loss=lambda m, x: wavy(m(x)) + x[:, 0] * m.weight.square().sum())
add("loss: detached branch", lambda: Net(lambda m, x: m.a(x) * m.b(x).detach(), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(4))
add("loss: a branch without gradients", lambda: Net(lambda m, x: m.a(x) + _without_grad(m.a, x), a=nn.Linear(4, 3)), features(4))
add("loss: dropout in eval", lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval(), features(4))
add("loss: dropout of probability 0", lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0), nn.Linear(6, 3)), features(4))
add("loss: in-place activations", lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(inplace=True), nn.Linear(6, 6), nn.SiLU(inplace=True), nn.Linear(6, 3), nn.Hardtanh(inplace=True)), features(4))
add("loss: gated units", lambda: nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 6), nn.Softmax(-1)), features(3, 4))
add("loss: input mixed up outside", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), lambda rows, g: [0.6 * x + 0.4 * x.flip(0) for x in features(4)(rows, g)])
add("loss: gradient of the input inside", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), features(4), loss=_input_gradient, outcome=raises("gradient of a gradient"))
add("loss: parameters in lists and dictionaries", lambda: Net(lambda m, x: sum(x @ w for w in m.a) * m.b["scale"], a=nn.ParameterList([normal(4, 3), normal(4, 3)]), b=nn.ParameterDict({"scale": normal(3)})), features(4))
add("loss: an empty parameter", lambda: Net(lambda m, x: m.l(torch.cat([x, m.e.expand(len(x), 0)], 1)), l=nn.Linear(4, 3), e=normal(0)), features(4))
add("loss: shared statistics, per-row products", lambda: Net(lambda m, x: torch.linalg.vecdot(m.a(x), m.b(x))[:, None], a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(4))

# --- layouts made to deceive ----------------------------------------------------------------

def _permuted(m: Any, x: Tensor) -> Tensor:
    order = torch.arange(len(x) - 1, -1, -1)
    return m.l(x[order])[order]


def _written(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), 4, dtype=x.dtype)
    outputs = torch.zeros(x.shape[1], len(x), 4, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(m.i(x[:, t]) + m.h(h))
        outputs[t] = h
    return m.o(outputs).transpose(0, 1)


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate + x * gate * (1 - gate))


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _scripted() -> Any:
    return _quiet(lambda: torch.jit.script(_swish))


def _put(x: Tensor, places: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    result[places] = x
    return result


def _shifted(x: Tensor) -> Tensor:
    result = x.clone()
    result[1:] = x[:-1]
    return result


def _routed(m: Any, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, 4)
    chosen = m.g(tokens).argmax(-1)
    result = tokens.new_zeros(len(tokens), 3)
    for number, expert in enumerate((m.a, m.b)):
        mine = chosen == number
        result[mine] = expert(tokens[mine])
    return result.view(*x.shape[:2], 3)


def _expert_choice(m: Any, x: Tensor) -> Tensor:
    score, chosen = m.g(x).squeeze(1).topk(2, dim=0)
    return x[:, :3].index_add(0, chosen, m.l(x[chosen]) * score[:, None])


def _unequal(m: Any, x: Tensor) -> Tensor:
    times = 1 + torch.arange(len(x)) % 2
    owner = torch.arange(len(x)).repeat_interleave(times)
    return x[:, :3].index_add(0, owner, m.l(x.repeat_interleave(times, 0)).sin())


def _modulated(m: Any, x: Tensor, style: Tensor) -> Tensor:
    rows, channels, length = x.shape
    w = m.w[None] * (1 + m.a(style))[:, None, :, None]
    w = w * torch.rsqrt(w.square().sum((2, 3), keepdim=True) + 1e-8)
    y = F.conv1d(x.reshape(1, rows * channels, length), w.flatten(0, 1), groups=rows)
    return y.view(rows, 3, -1)


def _adversarial(m: nn.Module, x: Tensor) -> Tensor:
    attacked = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(wavy(m(attacked)).sum(), attacked)
    return wavy(m(x + 0.1 * slope.sign()))


def _other_gradient(m: nn.Module, x: Tensor) -> Tensor:
    torch.autograd.grad(m(x.sin()).square().sum(), list(m.parameters()))
    return wavy(m(x))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -0.5 * grad


def _reversed_gradient(m: nn.Module, x: Tensor) -> Tensor:
    hidden = m[1](m[0](x))
    return wavy(m[2](hidden)) + wavy(m[2](_Reversed.apply(hidden)))


def _fast_weights(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    parameters = dict(m.named_parameters())
    inner = wavy(m(x)).mean()
    steps = torch.autograd.grad(inner, list(parameters.values()))
    fast = {n: p - 0.1 * g for (n, p), g in zip(parameters.items(), steps, strict=True)}
    return wavy(torch.func.functional_call(m, fast, (y,)))


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    for module in model[1:]:  # the first one's input needs no gradient
        module.register_full_backward_hook(lambda module, given, taken: None)
    return model


def _scaled_gradient(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 3 * grad)
    return x


EVEN = {"labels": ((2, 0, 2, -1, 1, 0), (3, 3, 1, 1, 2, 2, 0, 0)), "rows": (4,)}
add("deceit: batch cut in two and stacked", lambda: Net(lambda m, x: m.l(x.view(2, -1, 4)).view(len(x), 3), l=nn.Linear(4, 3)), features(4), **EVEN, outcome=raises("folded together"))
add("deceit: neighbours folded into features", lambda: Net(lambda m, x: m.l(x.reshape(-1, 8)).view(len(x), 3), l=nn.Linear(8, 6)), features(4), outcome=raises("folded together"), **EVEN)
add("deceit: neighbours averaged", lambda: Net(lambda m, x: m.l(x.view(-1, 2, 4).mean(1)).repeat_interleave(2, 0) * x[:, :3], l=nn.Linear(4, 3)), features(4), outcome=raises("folded together"), **EVEN)
add("deceit: halves swapped", lambda: Net(lambda m, x: torch.cat(m.l(torch.cat(x.chunk(2)[::-1])).chunk(2)[::-1]), l=nn.Linear(4, 3)), features(4), **EVEN)
add("deceit: indexed by a permutation", lambda: Net(_permuted, l=nn.Linear(4, 3)), features(4))
add("deceit: sorted along the batch", lambda: Net(lambda m, x: m.l(x.sort(0).values), l=nn.Linear(4, 3)), features(4), outcome=raises("reordered by `sort`"))
add("deceit: cumulated along the batch", lambda: Net(lambda m, x: m.l(x.cumsum(0)), l=nn.Linear(4, 3)), features(4), outcome=raises("`cumsum` joined"))
add("deceit: softmax along the batch", lambda: Net(lambda m, x: m.b(m.a(x).softmax(0)), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), features(4), outcome=raises("`softmax` joined"))
add("deceit: mean of the batch through a layer", lambda: Net(lambda m, x: m.l(x.mean(0, keepdim=True)) * x[:, :3], l=nn.Linear(4, 3)), features(4), outcome=raises("reduced by `mean`"))
add("deceit: mean of the batch's features through a layer", lambda: Net(lambda m, x: m.l(m.k(x).sin().mean(0)) * x[:, :3], k=nn.Linear(4, 4), l=nn.Linear(4, 3)), features(4), outcome=raises("reduced by `mean`"))
add("deceit: the batch as a sequence", lambda: Net(lambda m, x: m.l(x[None])[0], l=nn.Linear(4, 3)), features(4))
add("deceit: attention between rows", lambda: Net(lambda m, x: m.a(x[None], x[None], x[None])[0][0], a=nn.MultiheadAttention(4, 2, batch_first=True)), features(4), outcome=raises("mixed its dimensions|rows"))
add("deceit: attention between rows, unbatched", lambda: Net(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2)), features(4), outcome=raises("mixed its dimensions|rows"))
add("deceit: recurrence along the batch", lambda: Net(lambda m, x: m.r(x[None])[0][0], r=nn.GRU(4, 3, batch_first=True)), features(4), outcome=raises("rows"))
add("deceit: convolution along the batch", lambda: Net(lambda m, x: m.c(x.t()[None])[0].t(), c=nn.Conv1d(4, 3, 3, padding=1)), features(4), outcome=raises("rows"))
add("deceit: weight along the batch", lambda: Net(lambda m, x: (m.w[: len(x), : len(x)] @ x), w=normal(8, 8)), features(4), outcome=raises("sums over the dimension that holds the rows"))
add("deceit: layer norm over the batch", lambda: Net(lambda m, x: F.layer_norm(x.t(), (len(x),), m.w[: len(x)]).t(), w=normal(8)), features(4), outcome=raises("normalizes over the dimension that holds the rows"))
add("deceit: group norm, rows as channels", lambda: Net(lambda m, x: F.group_norm(x[None], 1, m.w[: len(x)])[0], w=normal(8)), features(4), outcome=raises("rows"))
add("deceit: a scale for each row", lambda: Net(lambda m, x: m.l(x) * m.w[: len(x), None], w=normal(8), l=nn.Linear(4, 3)), features(4), oracle="joint")
add("deceit: permute, then a reshape that mixes", lambda: Net(lambda m, x: m.l(x.permute(1, 0, 2).reshape(x.shape)), l=nn.Linear(4, 3)), features(3, 4), outcome=raises("rows"))
add("deceit: outputs written into zeros, time first", lambda: Net(_written, i=nn.Linear(3, 4), h=nn.Linear(4, 4), o=nn.Linear(4, 2)), features(5, 3))
add("deceit: copied into a buffer", lambda: Net(lambda m, x: m.l(torch.empty(len(x), 4, dtype=x.dtype).copy_(x)), l=nn.Linear(4, 3)), features(4))
add("deceit: copied into a buffer, reversed", lambda: Net(lambda m, x: m.l(torch.empty_like(x).copy_(x.flip(0))), l=nn.Linear(4, 3)), features(4), outcome=raises("joined different rows"))
add("deceit: x.data", lambda: Net(lambda m, x: m.l(x.data), l=nn.Linear(4, 3)), features(4))
add("deceit: x.T and x.mT", lambda: Net(lambda m, x: m.l(x.T.mT) + m.k(x.T.contiguous().t()), l=nn.Linear(4, 3), k=nn.Linear(4, 3)), features(4))
add("deceit: transposed in place, as many steps as rows", lambda: Net(lambda m, x: m.k(m.l(x).transpose_(0, 1)).transpose_(0, 1), l=nn.Linear(4, 3), k=nn.Linear(3, 2)), features(5, 4))
add("deceit: features first in place, as many as rows", lambda: Net(lambda m, x: (m.l(x).t_() * m.w[:, None]).t(), l=nn.Linear(4, 5), w=normal(5)), features(4))
add("deceit: copied by index, reversed", lambda: Net(lambda m, x: m.l(torch.zeros_like(x).index_copy(0, torch.arange(len(x)).flip(0), x)), l=nn.Linear(4, 3)), features(4), outcome=raises("places of other rows"))
add("deceit: put by index, reversed", lambda: Net(lambda m, x: m.l(_put(x, torch.arange(len(x)).flip(0))), l=nn.Linear(4, 3)), features(4), outcome=raises("places of other rows"))
add("deceit: put by index, at home", lambda: Net(lambda m, x: m.l(_put(x, torch.arange(len(x)))), l=nn.Linear(4, 3)), features(4))
add("deceit: assigned one place further", lambda: Net(lambda m, x: m.l(_shifted(x)), l=nn.Linear(4, 3)), features(4), outcome=raises("places of other rows"))
add("deceit: scattered, reversed", lambda: Net(lambda m, x: m.l(torch.zeros_like(x).scatter(0, torch.arange(len(x)).flip(0)[:, None].expand(x.shape), x)), l=nn.Linear(4, 3)), features(4), outcome=raises("places of other rows"))
add("deceit: permuted by a matrix", lambda: Net(lambda m, x: m.l(torch.eye(len(x), dtype=x.dtype).flip(0) @ x), l=nn.Linear(4, 3)), features(4), outcome=raises("`matmul` joined"))
add("deceit: mixed by a matrix of the batch's length", lambda: Net(lambda m, x: m.l(m.a[: len(x), : len(x)] @ x), a=(normal(8, 8),), l=nn.Linear(4, 3)), features(4), outcome=raises("`matmul` joined"))
add("deceit: msort along the batch", lambda: Net(lambda m, x: m.l(x.msort()), l=nn.Linear(4, 3)), features(4), outcome=raises("rows"))
add("deceit: taken by number, reversed", lambda: Net(lambda m, x: m.l(x.take(torch.arange(x.numel()).view_as(x).flip(0))).flip(0), l=nn.Linear(4, 3)), features(4))
add("deceit: taken along the batch, reversed", lambda: Net(lambda m, x: m.l(torch.take_along_dim(x, torch.arange(len(x)).flip(0)[:, None], 0)), l=nn.Linear(4, 3)), features(4), outcome=raises("rows"))
add("deceit: shifted by padding", lambda: Net(lambda m, x: m.l(F.pad(x, (0, 0, 1, -1))), l=nn.Linear(4, 3)), features(4), outcome=raises("rows"))
add("deceit: frozen attention that takes the batch for time", lambda: Net(lambda m, x: m.l(m.a(x, x, x)[0]), a=nn.MultiheadAttention(4, 2).requires_grad_(False), l=nn.Linear(4, 3)), features(5, 4), outcome=raises("rows"))
add("deceit: routed by boolean masks", lambda: Net(_routed, g=nn.Linear(4, 2), a=nn.Linear(4, 3), b=nn.Linear(4, 3)), features(3, 4), oracle="joint")
add("deceit: scripted function of rows that were moved", lambda: Net(lambda m, x: m.k(_scripted()(m.l(x).transpose(0, 1))).transpose(0, 1), l=nn.Linear(4, 3), k=nn.Linear(3, 2)), features(5, 4), rows=(5,), labels=((0, 1, 1, 0, 2),), outcome=raises("rows"))
add("deceit: scripted function of rows that were not", lambda: Net(lambda m, x: m.k(_scripted()(m.l(x))), l=nn.Linear(4, 3), k=nn.Linear(3, 2)), features(4))
add("deceit: custom function of rows that were moved", lambda: Net(lambda m, x: m.k(_Swish.apply(m.l(x).transpose(0, 1))).transpose(0, 1), l=nn.Linear(4, 3), k=nn.Linear(3, 2)), features(5, 4))
add("deceit: custom function after attention", lambda: Net(lambda m, x: m.k(_Swish.apply(m.a(x, x, x)[0])), a=nn.MultiheadAttention(4, 2, batch_first=True), k=nn.Linear(4, 2)), features(5, 4), strict_zeros=False)
add("deceit: vmap that puts rows second", lambda: Net(lambda m, x: m.k(torch.vmap(torch.sin, out_dims=1)(m.l(x))).transpose(0, 1), l=nn.Linear(4, 3), k=nn.Linear(3, 2)), features(5, 4), rows=(5,), labels=((0, 1, 1, 0, 2),), outcome=raises("rows"))
add("deceit: nested tensors", lambda: Net(lambda m, x: m.l(_quiet(lambda: torch.nested.as_nested_tensor(list(x.unbind(0))))), l=nn.Linear(4, 3)), features(3, 4), outcome=raises("nested"))
add("deceit: product of sparse rows", lambda: Net(lambda m, x: torch.sparse.mm(x.to_sparse(), m.w), w=normal(4, 3)), features(4), outcome=raises("no operator observes it"))
add("deceit: padded along the batch", lambda: Net(lambda m, x: m.l(F.pad(x, (0, 0, 1, 1)))[1:-1], l=nn.Linear(4, 3)), features(4), outcome=raises("rows"))
add("deceit: the first row dropped", lambda: Net(lambda m, x: torch.cat([x[:1, :3], m.l(x[1:])]), l=nn.Linear(4, 3)), features(4), oracle="joint")
add("deceit: every other row", lambda: Net(lambda m, x: x[:, :3].index_add(0, torch.arange(0, len(x), 2), m.l(x[::2])), l=nn.Linear(4, 3)), features(4), oracle="joint")
add("deceit: top rows chosen by an expert", lambda: Net(_expert_choice, g=nn.Linear(4, 1), l=nn.Linear(4, 3)), features(4), oracle="joint")
add("deceit: tiled", lambda: Net(lambda m, x: torch.cat(m.l(x.tile((3, 1))).chunk(3), 1), l=nn.Linear(4, 3)), features(4))
add("deceit: repeated unequally", lambda: Net(lambda m, x: _unequal(m, x), l=nn.Linear(4, 3)), features(4), outcome=raises("repeat_interleave"))
add("deceit: einsum that moves rows", lambda: Net(lambda m, x: m.l(torch.einsum("btf->tbf", x)).transpose(0, 1), l=nn.Linear(4, 3)), features(5, 4))
add("deceit: modulated convolution, rows as groups", lambda: Net(_modulated, w=normal(3, 2, 3), a=nn.Linear(4, 2)), several(features(2, 6), features(4)))
add("deceit: rows as strided view", lambda: Net(lambda m, x: m.l(x.as_strided(x.shape, x.stride())), l=nn.Linear(4, 3)), features(4))
add("deceit: rows as strided view, reversed columns of a fold", lambda: Net(lambda m, x: m.l(x.as_strided((x.shape[1], len(x), 4), (4, 4 * x.shape[1], 1))).transpose(0, 1), l=nn.Linear(4, 3)), features(3, 4))
add("deceit: unbind and stack in another order", lambda: Net(lambda m, x: m.l(torch.stack(x.unbind(0)[::-1])).flip(0), l=nn.Linear(4, 3)), features(4), outcome=raises("rows"))
add("deceit: unbind and stack", lambda: Net(lambda m, x: m.l(torch.stack(x.unbind(0))), l=nn.Linear(4, 3)), features(4), outcome=raises("one row was selected"))
add("deceit: time unbound and stacked first", lambda: Net(lambda m, x: m.l(torch.stack(x.unbind(1))).transpose(0, 1), l=nn.Linear(4, 3)), features(5, 4))
add("deceit: meshgrid of positions, as many as rows", lambda: Net(lambda m, x: m.l(torch.linspace(-1, 1, 5, dtype=x.dtype)[:, None]).t()[None] * x[:, :, None], l=nn.Linear(1, 3)), features(3))
add("deceit: coordinates of rows repeated", lambda: Net(lambda m, x: (m.l(torch.linspace(-1, 1, 5, dtype=x.dtype)[:, None])[None] * x[:, None, :3]).sin(), l=nn.Linear(1, 3)), features(4))
add("deceit: one-hot of positions, as many as rows", lambda: Net(lambda m, x: m.l(torch.eye(5, dtype=x.dtype))[None] * x[:, None, :3], l=nn.Linear(5, 3)), features(4))
add("deceit: batch of one environment folded twice", lambda: Net(lambda m, x: m.l(x.view(-1, 2, 2, 4).transpose(0, 1).reshape(-1, 4)).view(2, len(x), 2, 3).transpose(0, 1), l=nn.Linear(4, 3)), features(4, 4))
add("deceit: batch in the middle", lambda: Net(lambda m, x: m.n(m.l(x.permute(1, 0, 2))).permute(1, 0, 2).sin(), l=nn.Linear(4, 3), n=nn.LayerNorm(3)), features(5, 4))
add("deceit: batch last", lambda: Net(lambda m, x: m.n(x.permute(1, 2, 0).reshape(4, -1).t()).view(3, len(x), 4).transpose(0, 1), n=nn.LayerNorm(4)), lambda rows, g: (torch.randn(rows, 4, 3, generator=g, dtype=torch.float64),))
add("deceit: scale along time, time first, as long as the batch", lambda: Net(lambda m, x: (x.transpose(0, 1) * m.w[:, None]).transpose(0, 1), w=normal(5, 4)), features(5, 4))
add("deceit: scale along features, features first, as many as rows", lambda: Net(lambda m, x: (x.t() * m.w[:, None]).t(), w=normal(5)), features(5))
add("deceit: adversarial input", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), features(4), loss=_adversarial)
add("deceit: gradient of another loss, thrown away", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), features(4), loss=_other_gradient)
add("deceit: reversed gradient", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), features(4), loss=_reversed_gradient)
add("deceit: w.data and w.detach()", lambda: Net(lambda m, x: F.linear(x, m.w) + F.linear(x, m.w.data) * F.linear(x, m.w.detach()), w=normal(3, 4)), features(4))
add("deceit: non-contiguous parameters", lambda: Net(lambda m, x: F.linear(x, m.w) * m.v, w=normal(4, 3).t(), v=normal(3, 2)[:, 0]), features(4))
add("deceit: functional_call with the parameters themselves", lambda: Net(lambda m, x: torch.func.functional_call(m.l, dict(m.l.named_parameters()), (x,)), l=nn.Linear(4, 3)), features(4))
add("deceit: functional_call with scaled parameters", lambda: Net(lambda m, x: torch.func.functional_call(m.l, {n: p * 2 for n, p in m.l.named_parameters()}, (x,)), l=nn.Linear(4, 3)), features(4))
add("deceit: fast weights of an inner step", lambda: nn.Linear(4, 2), several(features(4), features(4)), loss=_fast_weights, oracle="joint")
add("deceit: parameters of a data-parallel model", lambda: nn.DataParallel(nn.Linear(4, 3)), features(4))
add("deceit: backward hooks on modules", lambda: _hooked(), features(4))
add("deceit: a hook that scales an activation's gradient", lambda: Net(lambda m, x: _scaled_gradient(m.a(x)).sin() @ m.w, a=nn.Linear(4, 3), w=normal(3, 2)), features(4))
add("deceit: dropout with a mask of its own", lambda: Net(lambda m, x: m.b(m.a(x) * (torch.arange(3) > 0)), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), features(4))
