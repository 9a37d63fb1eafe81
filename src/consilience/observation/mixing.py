"""Which dimensions of an activation a function mixes: rows along them are no longer apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

ALL = None
"""As dimensions: every one."""

ALONG: dict[str, tuple[int, Any]] = {
    "_softmax": (1, ALL),
    "_safe_softmax": (1, ALL),
    "_log_softmax": (1, ALL),
    "cumsum": (1, ALL),
    "cumprod": (1, ALL),
    "cummax": (1, ALL),
    "cummin": (1, ALL),
    "logcumsumexp": (1, ALL),
    "diff": (2, -1),
    "glu": (1, -1),
    "gumbel_softmax": (4, -1),
    "normalize": (2, 1),
    "cross": (2, ALL),
    "linalg_cross": (2, -1),
    "trapz": (2, -1),
    "trapezoid": (2, -1),
    "cumulative_trapezoid": (2, -1),
    "cosine_similarity": (2, 1),
    **{f"fft_{inverse}{kind}fft": (2, -1) for inverse in ("", "i") for kind in ("", "r", "h")},
    **{
        f"fft_{inverse}{kind}fft2": (2, (-2, -1))
        for inverse in ("", "i")
        for kind in ("", "r", "h")
    },
    **{f"fft_{inverse}{kind}fftn": (2, ALL) for inverse in ("", "i") for kind in ("", "r", "h")},
}
"""Functions that work along some dimensions: where among the arguments these stand, and which they
are if they are not given."""

SOFTMAXES = frozenset({"softmax", "log_softmax", "softmin"})

SPATIAL = {
    **{f"conv{n}d": (n, 1) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": (n, 1) for n in (1, 2, 3)},
    **{
        f"{kind}_pool{n}d{suffix}": (n, 0)
        for kind in ("max", "avg", "lp", "adaptive_max", "adaptive_avg", "fractional_max")
        for n in (1, 2, 3)
        for suffix in ("", "_with_indices")
    },
    **{f"max_unpool{n}d": (n, 0) for n in (1, 2, 3)},
    "pixel_shuffle": (2, 1),
    "pixel_unshuffle": (2, 1),
    "unfold": (2, 1),
    "fold": (1, 1),
}
"""Functions of images: over how many dimensions at the end, and whether over the channels before
them too."""

BATCHED = frozenset(
    "interpolate upsample grid_sample affine_grid local_response_norm channel_shuffle "
    "native_group_norm native_channel_shuffle multi_head_attention_forward".split()
)
"""Functions that keep dimension 0 apart, and no other."""

LAST = frozenset({"linear", "bilinear"})

MATRICES = frozenset(
    "_lu_with_info cholesky cholesky_inverse cholesky_solve matrix_exp matrix_power inverse "
    "pinverse svd qr lu lu_solve geqrf ormqr orgqr triangular_solve logdet slogdet det trace "
    "scaled_dot_product_attention".split()
)
"""Functions of the matrices in the last two dimensions, as is all that begins with `linalg_`."""

OF_VECTORS = frozenset({"linalg_vecdot", "linalg_vander", "linalg_vector_norm", "linalg_norm"})

JOINED = frozenset(
    "block_diag cartesian_prod combinations cov corrcoef pdist unique unique_consecutive gradient "
    "kron outer ger msort nonzero put quantile nanquantile dist chain_matmul addr addbmm sspaddmm "
    "resize resize_as set as_strided linalg_multi_dot unbind_copy split_copy "
    "split_with_sizes_copy native_batch_norm".split()
)
"""Functions whose output has no rows at all, or rows that cannot be told from its shape."""


MIXERS = (
    JOINED
    | SOFTMAXES
    | ALONG.keys()
    | SPATIAL.keys()
    | BATCHED
    | LAST
    | MATRICES
    | {
        "diag_embed",
        "renorm",
        "layer_norm",
        "rms_norm",
        "native_layer_norm",
        "pad",
        "constant_pad_nd",
    }
)


def mixes(name: str) -> bool:
    """Whether a function of this name mixes along some dimensions."""
    return name in MIXERS or name.rstrip("_") in MIXERS or name[:7] == "linalg_"


def _given(args: Sequence[Any], kwargs: dict[str, Any], place: int) -> Any:
    for key in ("dim", "dims", "axis"):
        if key in kwargs:
            return kwargs[key]
    return args[place] if len(args) > place else "missing"


def mixed(name: str, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> set[int]:
    """Return the dimensions of its first argument along which a function mixes components."""
    rank = x.dim()
    every = set(range(rank))
    name = name if name in MIXERS else name.rstrip("_")

    def last(count: int) -> set[int]:
        return set(range(max(0, rank - count), rank))

    def these(dims: Any) -> set[int]:
        if dims is ALL:
            return every
        dims = [dims] if isinstance(dims, int) else dims
        return {dim % rank for dim in dims} if rank else set()

    if name in JOINED:
        return every
    if name in SOFTMAXES:
        dims = _given(args, kwargs, 1)
        if dims == "missing" or dims is None:
            dims = 0 if rank in (0, 1, 3) else 1
        return these(dims)
    if name in ALONG:
        place, default = ALONG[name]
        dims = _given(args, kwargs, place)
        return these(default if isinstance(dims, str) else dims)
    if name == "renorm":
        return every - these(_given(args, kwargs, 2))
    if name in ("layer_norm", "rms_norm", "native_layer_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return last(1 if isinstance(shape, int) else len(shape))
    if name in ("pad", "constant_pad_nd"):
        widths = kwargs.get("pad", args[1] if len(args) > 1 else ())
        return {rank - 1 - i // 2 for i in range(0, len(widths), 2) if widths[i] or widths[i + 1]}
    if name == "diag_embed":
        return last(1) if _given(args, kwargs, 2) == "missing" and not kwargs else every
    if name in SPATIAL:
        count, channels = SPATIAL[name]
        # Without a dimension for the batch, an image's channels come first.
        return last(count + channels)
    if name in BATCHED:
        return every - {0}
    if name in LAST:
        return last(1)
    if name in MATRICES or (name.startswith("linalg_") and name not in OF_VECTORS):
        return last(2)
    return set()
