"""Hypothesis strategies for environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st


@st.composite
def environments(
    draw: st.DrawFn,
    *,
    least: int = 1,
    most: int = 40,
    most_rows: int = 6,
    unknown: bool = True,
) -> torch.Tensor:
    """Draw one label per row: `least` to `most` environments, unequal and shuffled.

    Labels are any integers but -1, which stands for unknown and joins some batches.
    """
    # Few environments are as interesting as many, and cheaper.
    count = draw(st.integers(least, most) | st.integers(least, min(most, 4)))
    sizes = draw(st.lists(st.integers(1, most_rows), min_size=count, max_size=count))
    labels = draw(
        st.lists(
            st.integers(-50, 10**6).filter(lambda label: label != -1),
            min_size=count,
            max_size=count,
            unique=True,
        )
    )
    env = [label for label, size in zip(labels, sizes, strict=True) for _ in range(size)]
    if unknown:
        env += [-1] * draw(st.sampled_from([0, 0, 1, 3]))
    order = draw(st.sampled_from(["sorted", "shuffled", "shuffled", "interleaved"]))
    if order == "shuffled":
        seed = draw(st.integers(0, 2**16))
        env = np.random.default_rng(seed).permutation(env).tolist()
    elif order == "interleaved":
        env = [label for start in range(most_rows) for label in env[start::most_rows]]
    return torch.tensor(env)


def label_spellings(env: torch.Tensor) -> dict[str, Any]:
    """Return the same environments in every form that `observe` takes."""
    values = env.tolist()
    spellings: dict[str, Any] = {
        "int64": env,
        "int32": env.to(torch.int32),
        "list": values,
        "tuple": tuple(values),
        "numpy": np.array(values),
        "numpy int32": np.array(values, dtype=np.int32),
    }
    if -1 not in values:
        spellings["strings"] = [f"site {value}" for value in values]
        spellings["numpy strings"] = np.array([f"site {value}" for value in values])
    return spellings
