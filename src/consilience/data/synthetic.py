"""The synthetic memorization dataset: one mechanism, and a shortcut for every environment."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

SPIRAL_DEVIATION = 0.4255
"""Standard deviation of each coordinate of the raw spirals, for whole revolutions and many rows."""

# What a random stream is for: the first number of its spawn key. The second is the environment.
_SIGNATURE, _ROWS, _TEST, _MECHANISM_ORDER, _SHORTCUT_ORDER = range(5)


@dataclass(frozen=True)
class Rows:
    """Rows with their labels and environments; a map-style dataset for `DataLoader`.

    Attributes:
        x: Inputs ``[rows, features]``, float32.
        y: Labels ``[rows]``, int64, 0 or 1.
        env: Environment of each row ``[rows]``, int64.
    """

    x: Tensor
    y: Tensor
    env: Tensor

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.y)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(x, y, env)` of a row, or of rows when given a slice, list or tensor."""
        return self.x[index], self.y[index], self.env[index]


@dataclass(frozen=True)
class SyntheticMemorization:
    r"""Spirals that all environments share, and a Gaussian signature of each environment's own.

    A row is ``[mechanism, shortcut]``, its label :math:`y` is 0 or 1 with equal chance.

    * **Mechanism** (first two features). Draw :math:`r \sim U(0.08, 1)`; the angle is
      :math:`2 \pi n r + \pi y` for :math:`n` revolutions; then uniform jitter in
      :math:`[-0.02, 0.02]` is added to the radius. The point is divided by ``spiral_scale``.
    * **Shortcut** (the remaining features). Environment :math:`e` has one signature
      :math:`s_e \sim N(0, \sigma^2 I)`. Rows of label 1 carry :math:`s_e`, rows of label 0 carry
      :math:`-s_e`. In test data every row draws a shortcut of its own, whatever its label.

    Everything comes from `seed`: environment `e` draws from streams of its own, keyed by
    ``(seed, purpose, e)``, so that its rows depend neither on how many environments there are
    nor on those of another seed.

    What the paper leaves open is stated here: its text gives no number of revolutions, and
    "N(0, 0.1)" without a unit for the spirals. The defaults (preset ``paper``) are the authors'
    released scales, that is a deviation of 1 for every feature, and two revolutions.

    Args:
        environments: How many environments train (:math:`D`).
        shortcut_dimensions: Length of a signature (:math:`d_S`); 0 leaves the mechanism alone.
        rows_per_environment: Rows of each environment.
        revolutions: Revolutions of each spiral.
        shortcut_scale: Standard deviation :math:`\sigma` of signatures.
        spiral_scale: What spirals are divided by. None: each coordinate by its own deviation in
            the sample of that environment, as the authors' code does.
        inner_radius: Least radius of the spirals.
        jitter: Largest noise on the radius.
        seed: Where all randomness comes from.

    Example:
        >>> from consilience.data import SyntheticMemorization
        >>> data = SyntheticMemorization.preset("paper", seed=7)
        >>> train, test = data.train(), data.test(rows=2000)
        >>> train.x.shape, int(train.env.max()) + 1
        (torch.Size([40960, 34]), 32)
    """

    environments: int = 32
    shortcut_dimensions: int = 32
    rows_per_environment: int = 1280
    revolutions: float = 2.0
    shortcut_scale: float = 1.0
    spiral_scale: float | None = SPIRAL_DEVIATION
    inner_radius: float = 0.08
    jitter: float = 0.02
    seed: int = 0

    mechanism_dimensions: ClassVar[int] = 2
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "authors-code": {
            "environments": 16,
            "shortcut_dimensions": 16,
            "rows_per_environment": 1024,
            "revolutions": 3.0,
            "spiral_scale": None,
        },
    }
    """`paper`: the paper's text, gaps closed by the defaults. `authors-code`: what the README of
    the authors' code runs (its own defaults have 8 shortcut dimensions)."""

    def __post_init__(self) -> None:
        for name in ("revolutions", "shortcut_scale", "spiral_scale", "inner_radius", "jitter"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(
                    f"Parameter `{name}` should be a finite number. Found `{name} = {value}`."
                )
        if self.environments < 1:
            raise ValueError(
                "Parameter `environments` should be 1 or more: without an environment there is "
                f"nothing to train on. Found `environments = {self.environments}`."
            )
        for name, least in (("rows_per_environment", 1), ("shortcut_dimensions", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"Parameter `{name}` should be {least} or more. "
                    f"Found `{name} = {getattr(self, name)}`."
                )
        for name in ("shortcut_scale", "jitter"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"Parameter `{name}` should not be negative. "
                    f"Found `{name} = {getattr(self, name)}`."
                )
        if self.spiral_scale is not None and self.spiral_scale <= 0:
            raise ValueError(
                "Parameter `spiral_scale` should be above 0, or None for each sample's own "
                f"deviation. Found `spiral_scale = {self.spiral_scale}`."
            )
        if not 0 <= self.inner_radius < 1:
            raise ValueError(
                "Parameter `inner_radius` should lie in [0, 1). "
                f"Found `inner_radius = {self.inner_radius}`."
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> SyntheticMemorization:
        """Return a named configuration, `paper` or `authors-code`, with changes applied."""
        if name not in cls.presets:
            near = difflib.get_close_matches(name, cls.presets, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(
                f"Parameter `name` should be one of {', '.join(cls.presets)}. "
                f"Found `name = {name!r}`.{hint}"
            )
        return replace(cls(**cls.presets[name]), **changes)

    @property
    def dimensions(self) -> int:
        """Number of features of a row."""
        return self.mechanism_dimensions + self.shortcut_dimensions

    def signatures(self) -> np.ndarray:
        """Return the signature of every environment, ``[environments, shortcut_dimensions]``."""
        drawn = [
            self._stream(_SIGNATURE, e).standard_normal(self.shortcut_dimensions)
            for e in range(self.environments)
        ]
        return self.shortcut_scale * np.stack(drawn)

    def train(self) -> Rows:
        """Return the training rows of all environments, one environment after the other."""
        n = self.rows_per_environment
        mechanisms, labels = zip(
            *(self._spirals(self._stream(_ROWS, e), n) for e in range(self.environments)),
            strict=True,
        )
        y = np.concatenate(labels)
        env = np.repeat(np.arange(self.environments), n)
        sign = (2 * y - 1)[:, None]
        return _rows(np.concatenate(mechanisms), sign * self.signatures()[env], y, env)

    def test(self, rows: int = 2000) -> Rows:
        """Return test rows: the same mechanism, shortcuts independent of the label.

        Each row has a shortcut of its own and is thus an environment of its own.
        """
        if rows < 1:
            raise ValueError(f"Parameter `rows` should be 1 or more. Found `rows = {rows}`.")
        stream = self._stream(_TEST, 0)
        mechanism, y = self._spirals(stream, rows)
        shortcut = self.shortcut_scale * stream.standard_normal((rows, self.shortcut_dimensions))
        return _rows(mechanism, shortcut, y, np.arange(rows))

    def permute_mechanism(self, rows: Rows, *, across_environments: bool = False) -> Rows:
        """Give each row the mechanism of another: what its shortcut says of the label remains.

        The paper's second intervention of its correlation study. By default rows swap within
        their environment; with `across_environments` over the whole dataset.
        """
        return self._permute(rows, _MECHANISM_ORDER, slice(0, 2), across_environments)

    def permute_shortcuts(self, rows: Rows, *, across_environments: bool = False) -> Rows:
        """Give each row the shortcut of another: what its mechanism says of the label remains.

        The paper's third intervention of its correlation study. By default rows swap within
        their environment, which leaves each environment its signature at random sign; with
        `across_environments` over the whole dataset.
        """
        return self._permute(rows, _SHORTCUT_ORDER, slice(2, None), across_environments)

    def _permute(self, rows: Rows, purpose: int, columns: slice, across: bool) -> Rows:
        import torch  # noqa: PLC0415 (the command line's help must not wait for torch)

        order = np.arange(len(rows))
        env = np.zeros_like(order) if across else rows.env.numpy()
        for e in np.unique(env):
            where = np.flatnonzero(env == e)
            order[where] = self._stream(purpose, int(e)).permutation(where)
        x = rows.x.clone()
        x[:, columns] = rows.x[torch.from_numpy(order)][:, columns]
        return Rows(x, rows.y, rows.env)

    def _spirals(self, stream: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
        y = stream.integers(0, 2, rows)
        radius = stream.uniform(self.inner_radius, 1.0, rows)
        angle = 2 * np.pi * self.revolutions * radius + np.pi * y
        radius = radius + stream.uniform(-self.jitter, self.jitter, rows)
        point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        if self.spiral_scale is not None:
            return point / self.spiral_scale, y
        deviation = point.std(axis=0)
        if deviation.min() < 1e-9:
            raise ValueError(
                f"Parameter `spiral_scale` should be a number here: the {rows} row(s) of a sample "
                "lie on a line, so they cannot be divided by their own deviation. Found "
                "`spiral_scale = None`."
            )
        return point / deviation, y

    def _stream(self, purpose: int, environment: int) -> np.random.Generator:
        key = np.random.SeedSequence(self.seed, spawn_key=(purpose, environment))
        return np.random.default_rng(key)


def _rows(mechanism: np.ndarray, shortcut: np.ndarray, y: np.ndarray, env: np.ndarray) -> Rows:
    import torch  # noqa: PLC0415 (the command line's help must not wait for torch)

    x = np.concatenate([mechanism, shortcut], axis=1).astype(np.float32)
    return Rows(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(env))
