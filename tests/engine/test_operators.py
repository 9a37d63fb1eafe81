"""Every operator family, on shapes and options that hypothesis thinks of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.modules import Net, features, inexact_start, normal, tokens
from oracle import check, environments

quick = settings(max_examples=40, deadline=None, derandomize=True)
labels = environments(least=2, most=6, most_rows=3)
small = st.integers(1, 4)
leading = st.lists(small, max_size=2).map(tuple)


@given(env=labels, shape=leading, fan_in=small, fan_out=small, bias=st.booleans())
@quick
def test_linear(env: Tensor, shape: Any, fan_in: int, fan_out: int, bias: bool) -> None:
    check(lambda: nn.Linear(fan_in, fan_out, bias), features(*shape, fan_in), env)


@given(env=labels, shape=st.lists(small, min_size=1, max_size=2), fan_in=small, fan_out=small)
@quick
def test_linear_of_folded_tokens(env: Tensor, shape: Any, fan_in: int, fan_out: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.l(x.reshape(-1, fan_in)).view(len(x), -1)

    build = lambda: Net(forward, l=nn.Linear(fan_in, fan_out))  # noqa: E731
    check(build, features(*shape, fan_in), env)


@given(env=labels, shape=leading, fan_in=small, fan_out=small)
@quick
def test_matmul(env: Tensor, shape: Any, fan_in: int, fan_out: int) -> None:
    build = lambda: Net(lambda m, x: x @ m.w, w=normal(fan_in, fan_out))  # noqa: E731
    check(build, features(*shape, fan_in), env)


@given(env=labels, heads=small, fan_in=small, fan_out=small, length=small)
@quick
def test_matmul_with_the_parameter_first(
    env: Tensor, heads: int, fan_in: int, fan_out: int, length: int
) -> None:
    build = lambda: Net(lambda m, x: m.w @ x, w=normal(heads, fan_out, fan_in))  # noqa: E731
    check(build, features(heads, fan_in, length), env)


@given(env=labels, sizes=st.tuples(small, small, small), data=st.data())
@quick
def test_einsum(env: Tensor, sizes: tuple[int, int, int], data: st.DataObject) -> None:
    """The activation is bij or bji; the weight has any of i, j and k, in any order."""
    extent = dict(zip("ijk", sizes, strict=True))
    mine = data.draw(st.permutations("ij").map("".join))
    weight = "".join(data.draw(st.permutations("ijk")))[: data.draw(st.integers(1, 3))]
    result = "".join(data.draw(st.permutations(sorted({*mine, *weight}))))
    # The weight is not summed over an index of its own: that is refused.
    result = "b" + result[: data.draw(st.integers(1, len(result)))]
    result += "".join(sorted({*weight} - {*mine, *result}))
    first = data.draw(st.booleans())

    def forward(m: Any, x: Tensor) -> Tensor:
        if first:
            return torch.einsum(f"{weight},b{mine}->{result}", m.w, x)
        return torch.einsum(f"b{mine},{weight}->{result}", x, m.w)

    build = lambda: Net(forward, w=normal(*[extent[c] for c in weight]))  # noqa: E731
    check(build, features(*[extent[c] for c in mine]), env)


@st.composite
def convolution(draw: st.DrawFn) -> tuple[Any, tuple[int, ...]]:
    """Draw the keywords of a convolution and the shape of an image that it can read."""
    dimension = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    per_axis = lambda s: tuple(draw(s) for _ in range(dimension))  # noqa: E731
    kernel = per_axis(st.integers(1, 3))
    dilation = per_axis(st.integers(1, 2))
    keywords: dict[str, Any] = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel_size": kernel,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"]))
    same = draw(st.booleans()) and all(r % 2 == 0 for r in reach)
    keywords["padding"] = "same" if same else per_axis(st.integers(0, 2))
    keywords["padding_mode"] = mode
    if not same:
        keywords["stride"] = per_axis(st.integers(1, 3))
    image = tuple(max(r + 1, 3) + draw(st.integers(0, 2)) for r in reach)
    return keywords, (keywords["in_channels"], *image)


@given(env=environments(least=2, most=4, most_rows=2), drawn=convolution())
@settings(quick, max_examples=60)
def test_convolution(env: Tensor, drawn: Any) -> None:
    keywords, shape = drawn
    module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 2]
    check(lambda: module(**keywords), features(*shape), env)


@given(env=environments(least=2, most=4, most_rows=2), data=st.data())
@settings(quick, max_examples=40)
def test_transposed_convolution(env: Tensor, data: st.DataObject) -> None:
    dimension = data.draw(st.integers(1, 3))
    per_axis = lambda s: tuple(data.draw(s) for _ in range(dimension))  # noqa: E731
    groups = data.draw(st.integers(1, 2))
    stride, dilation = per_axis(st.integers(1, 3)), per_axis(st.integers(1, 2))
    largest = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
    keywords = {
        "in_channels": 2 * groups,
        "out_channels": groups * data.draw(st.integers(1, 2)),
        "kernel_size": per_axis(st.integers(1, 3)),
        "stride": stride,
        "dilation": dilation,
        "padding": per_axis(st.integers(0, 1)),
        "output_padding": tuple(data.draw(st.integers(0, top)) for top in largest),
        "groups": groups,
        "bias": data.draw(st.booleans()),
    }
    module = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimension - 1]
    check(lambda: module(**keywords), features(2 * groups, *per_axis(st.integers(3, 4))), env)


@given(
    env=labels,
    length=st.none() | st.integers(1, 6),
    size=st.integers(1, 6),
    width=small,
    padding_idx=st.none() | st.integers(-1, 0),
)
@quick
def test_embedding(
    env: Tensor, length: int | None, size: int, width: int, padding_idx: int | None
) -> None:
    build = lambda: nn.Embedding(size, width, padding_idx=padding_idx)  # noqa: E731
    check(build, tokens(length, size), env)


@given(
    env=labels,
    length=st.integers(1, 6),
    size=st.integers(1, 5),
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding_idx=st.none() | st.just(0),
)
@quick
def test_embedding_bag(
    env: Tensor, length: int, size: int, mode: str, padding_idx: int | None
) -> None:
    build = lambda: nn.EmbeddingBag(size, 3, mode=mode, padding_idx=padding_idx)  # noqa: E731
    check(build, tokens(length, size), env)


@given(env=labels, shape=leading, normalized=st.integers(1, 2), affine=st.booleans())
@quick
def test_layer_norm(env: Tensor, shape: Any, normalized: int, affine: bool) -> None:
    own = (2, 3)[-normalized:]
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(3, 3), inexact_start(nn.LayerNorm(own, elementwise_affine=affine))
    )
    check(build, features(*shape, 2, 3), env)


@given(env=labels, space=leading, groups=st.integers(1, 3), each=st.integers(1, 2))
@quick
def test_group_and_instance_norm(env: Tensor, space: Any, groups: int, each: int) -> None:
    channels = groups * each
    shape = (channels, *space, 3)
    check(lambda: inexact_start(nn.GroupNorm(groups, channels)), features(*shape), env)
    if 1 <= len(space) <= 2:
        norm = (nn.InstanceNorm2d, nn.InstanceNorm3d)[len(space) - 1]
        check(lambda: inexact_start(norm(channels, affine=True)), features(*shape), env)


@given(
    env=labels,
    shape=st.lists(small, min_size=1, max_size=3),
    kept=st.lists(st.booleans(), min_size=3, max_size=3),
    drop=st.integers(0, 3),
    batch_axis=st.booleans(),
    operation=st.sampled_from(["add", "mul", "sub", "rsub", "div", "where", "maximum", "mul_"]),
)
@settings(quick, max_examples=80)
def test_broadcast_arithmetic(
    env: Tensor, shape: Any, kept: Any, drop: int, batch_axis: bool, operation: str
) -> None:
    """The parameter has any shape that broadcasts over rows: axes of 1, and fewer axes."""
    own = [n if keep else 1 for n, keep in zip(shape, kept, strict=False)][drop:]
    if batch_axis and len(own) == len(shape):
        own = [1, *own]
    functions: dict[str, Any] = {
        "add": lambda x, w: x + w,
        "mul": lambda x, w: w * x,
        "sub": lambda x, w: x - w,
        "rsub": lambda x, w: w - x,
        "div": lambda x, w: x / (w.abs() + 1),
        "where": lambda x, w: torch.where(x > 0, x, w),
        "maximum": torch.maximum,
        "mul_": lambda x, w: x.clone().mul_(w),
    }
    function = functions[operation]
    build = lambda: Net(lambda m, x: function(x, m.w).sin(), w=normal(*own))  # noqa: E731
    check(build, features(*shape), env)


@given(env=labels, cut=st.tuples(st.integers(0, 2), st.integers(3, 6), st.integers(1, 2)))
@quick
def test_slices_of_a_parameter(env: Tensor, cut: tuple[int, int, int]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w[slice(*cut)]
        return F.linear(x, w, m.b[slice(*cut)]) + F.linear(x, m.w).sum(1, keepdim=True).sin()

    check(lambda: Net(forward, w=normal(6, 3), b=normal(6)), features(3), env)


@given(
    env=environments(least=2, most=4, most_rows=2),
    kind=st.sampled_from([nn.LSTM, nn.GRU, nn.RNN]),
    layers=st.integers(1, 2),
    both=st.booleans(),
    bias=st.booleans(),
    first=st.booleans(),
    length=st.integers(1, 4),
)
@settings(quick, max_examples=25)
def test_recurrent(
    env: Tensor, kind: Any, layers: int, both: bool, bias: bool, first: bool, length: int
) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y, _ = m.r(x if first else x.transpose(0, 1))
        return y if first else y.transpose(0, 1)

    def build() -> nn.Module:
        network = kind(3, 2, layers, bias=bias, batch_first=first, bidirectional=both)
        return Net(forward, r=network)

    check(build, features(length, 3), env)


@given(
    env=environments(least=2, most=4, most_rows=2),
    heads=st.integers(1, 2),
    widths=st.tuples(st.sampled_from([None, 3]), st.sampled_from([None, 5])),
    bias=st.booleans(),
    extra=st.booleans(),
    first=st.booleans(),
    weights=st.booleans(),
    lengths=st.tuples(small, small),
)
@settings(quick, max_examples=40)
def test_multihead_attention(
    env: Tensor,
    heads: int,
    widths: Any,
    bias: bool,
    extra: bool,
    first: bool,
    weights: bool,
    lengths: tuple[int, int],
) -> None:
    kdim, vdim = widths

    def forward(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        y, _ = m.a(q, k, v, need_weights=weights)
        return y if first else y.transpose(0, 1)

    def build() -> nn.Module:
        attention = nn.MultiheadAttention(
            4, heads, bias=bias, add_bias_kv=extra, kdim=kdim, vdim=vdim, batch_first=first
        )
        return Net(forward, a=attention)

    target, source = lengths

    def batch(rows: int, g: torch.Generator) -> list[Tensor]:
        return [
            features(target, 4)(rows, g)[0],
            features(source, kdim or 4)(rows, g)[0],
            features(source, vdim or 4)(rows, g)[0],
        ]

    check(build, batch, env, strict_zeros=False)
