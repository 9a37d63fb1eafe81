"""Batches of n rows from each of k environments."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class EnvironmentBatchSampler:
    r"""Batches of `rows_per_environment` rows from each of `environments_per_batch` environments.

    Give it to any `DataLoader` as `batch_sampler`; it yields lists of row indices, the rows of
    one environment next to each other. Every batch has distinct environments, chosen at random
    so that all are seen equally often.

    Environments of unequal size are a choice, and never a silent one:

    ========== ====================================================================================
    `"spread"` Every row exactly once in an epoch, and always `environments_per_batch` environments
               in a batch: the rows of a smaller environment are spread over as many batches as
               needed, so that it gives *fewer* than `rows_per_environment` to each.
    `"repeat"` Always exactly `rows_per_environment` rows; every row at least once. Smaller
               environments are shuffled again and repeated (:attr:`repeated` says how many rows
               are given again).
    `"drop"`   Always exactly `rows_per_environment` rows; no row twice. What does not fill a whole
               batch is left out for this epoch (:attr:`dropped` says how many rows are).
    ========== ====================================================================================

    For environments of one size, divisible by `rows_per_environment`, the three are the same
    (but for a number of environments that does not go evenly into batches).

    Rows are shuffled anew in every epoch. Passing over the sampler once is an epoch, and a pass
    that is broken off is one, too: the next is whole. The order of epoch `t` depends on `seed` and
    `t` alone. :meth:`state_dict` between two batches and :meth:`load_state_dict` continue in the
    middle of an epoch. A `DataLoader` with workers asks for batches ahead of time; tell
    :meth:`state_dict` how many your loop has `consumed`.

    Args:
        env: Environment of every row: a tensor, array or list of whole numbers, not
            negative, or of strings.
        environments_per_batch: How many environments are in a batch (:math:`k`).
        rows_per_environment: How many rows of each (:math:`n`).
        seed: Where the order comes from.
        uneven: What to do about environments of unequal size.

    Example:
        >>> from consilience.data import EnvironmentBatchSampler
        >>> sampler = EnvironmentBatchSampler([0, 0, 0, 0, 1, 1], 2, 2)
        >>> [len(batch) for batch in sampler]
        [3, 3]
        >>> sampler = EnvironmentBatchSampler([0, 0, 0, 0, 1, 1], 2, 2, uneven="repeat")
        >>> [len(batch) for batch in sampler], sampler.repeated
        ([4, 4], 2)
    """

    def __init__(
        self,
        env: Tensor | np.ndarray | Sequence[int],
        environments_per_batch: int,
        rows_per_environment: int,
        *,
        seed: int = 0,
        uneven: Literal["spread", "repeat", "drop"] = "spread",
    ) -> None:
        self.environments_per_batch = environments_per_batch
        self.rows_per_environment = rows_per_environment
        self.seed = seed
        self.uneven = uneven
        self._rows = _rows_by_environment(env)
        self._check()
        self._batches = int(self._plan(self._stream(0)).sum()) // environments_per_batch
        self.epoch = 0
        self._position = self._start = 0
        self._resumed = self._finished = False

    @property
    def sizes(self) -> list[int]:
        """How many rows each environment has."""
        return [len(rows) for rows in self._rows]

    @property
    def dropped(self) -> int:
        """How many rows are left out of an epoch."""
        if self.uneven != "drop":
            return 0
        return sum(self.sizes) - self._given

    @property
    def repeated(self) -> int:
        """How many rows of an epoch have been given before in that epoch."""
        if self.uneven != "repeat":
            return 0
        return self._given - sum(self.sizes)

    @property
    def _given(self) -> int:
        return self._batches * self.environments_per_batch * self.rows_per_environment

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Pass over an epoch, or over what is left of it after `load_state_dict`."""
        if self._position and not self._resumed:  # the pass before was broken off
            self.epoch += 1
            self._position = 0
        self._resumed = self._finished = False
        self._start = self._position
        batches = self._shuffle(self.epoch)
        for number in range(self._position, len(batches)):
            self._position = number + 1
            yield batches[number]
        self.epoch += 1
        self._position = 0
        self._finished = True

    def __repr__(self) -> str:
        """Return how the sampler was made."""
        return (
            f"EnvironmentBatchSampler(<{sum(self.sizes)} rows of {len(self.sizes)} environments>, "
            f"{self.environments_per_batch}, {self.rows_per_environment}, "
            f"seed={self.seed}, uneven={self.uneven!r})"
        )

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return where the sampler stands, as whole numbers that JSON can hold.

        Args:
            consumed: How many batches of this epoch were used, those before a resumption
                included, where that may be less than were asked for (a `DataLoader` with workers
                prefetches). Between two epochs, leave it out.
        """
        epoch, position = self.epoch, self._position
        if consumed is not None:
            if self._finished:  # every batch was asked for; the loop is still in that epoch
                epoch, position = epoch - 1, self._batches
            if not self._start <= consumed <= position:
                raise ValueError(
                    f"Parameter `consumed` should lie between {self._start}, where this pass "
                    f"began, and {position}, up to where batches were asked for. Found "
                    f"`consumed = {consumed}`. Count the batches of the epoch, from its beginning."
                )
            position = consumed
        return {
            "seed": self.seed,
            "epoch": epoch,
            "position": position,
            "batches": self._batches,
            "rows": sum(self.sizes),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. Rows and sizes of batches must be the same."""
        for key, here in (("batches", self._batches), ("rows", sum(self.sizes))):
            if state[key] != here:
                raise ValueError(
                    f"This state is of a sampler with `{key} = {state[key]}`; this one has "
                    f"`{key} = {here}`. Make the sampler over the same rows with the same "
                    "sizes of batches."
                )
        self.seed, self.epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._start = self._position
        self._resumed, self._finished = True, False

    def _check(self) -> None:
        k, n, sizes = self.environments_per_batch, self.rows_per_environment, self.sizes
        for name in ("environments_per_batch", "rows_per_environment", "seed"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or (name == "seed" and value < 0):
                least = " that is not negative" if name == "seed" else ""
                raise ValueError(
                    f"Parameter `{name}` should be a whole number{least}. "
                    f"Found `{name} = {value!r}`."
                )
        if self.uneven not in ("spread", "repeat", "drop"):
            raise ValueError(
                "Parameter `uneven` should be 'spread', 'repeat' or 'drop'. "
                f"Found `uneven = {self.uneven!r}`."
            )
        if not 1 <= k <= len(sizes):
            raise ValueError(
                "Parameter `environments_per_batch` should be between 1 and the number of "
                f"environments, {len(sizes)}. Found `environments_per_batch = {k}`."
            )
        if n < 1:
            raise ValueError(
                "Parameter `rows_per_environment` should be 1 or more. "
                f"Found `rows_per_environment = {n}`."
            )
        smallest = int(np.argmin(sizes))
        if sizes[smallest] < n and self.uneven != "spread":
            raise ValueError(
                f"Parameter `rows_per_environment` should be at most {sizes[smallest]}, the size "
                f"of the smallest environment (environment {smallest}). Found "
                f"`rows_per_environment = {n}`. Ask for fewer rows, or use `uneven='spread'`."
            )

    def _stream(self, epoch: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))

    def _plan(self, stream: np.random.Generator) -> np.ndarray:
        """Return in how many batches of an epoch each environment takes part.

        The visits sum to a multiple of `environments_per_batch`, and none exceeds the number of
        batches: then batches of distinct environments exist, and the greedy choice of
        :meth:`_shuffle` finds them.
        """
        k, n = self.environments_per_batch, self.rows_per_environment
        sizes = np.array(self.sizes)
        if self.uneven == "drop":
            visits = sizes // n
            # The largest number of batches of k distinct environments: the largest B with
            # sum(min(visits, B)) >= k B. (Visits beyond B cannot be placed.)
            batches = int(visits.sum()) // k
            while int(np.minimum(visits, batches).sum()) < k * batches:
                batches = int(np.minimum(visits, batches).sum()) // k
            return _lower(np.minimum(visits, batches), k * batches, stream)
        visits = -(-sizes // n)
        batches = max(int(visits.max()), math.ceil(int(visits.sum()) / k))
        most = (
            np.full_like(sizes, batches) if self.uneven == "repeat" else np.minimum(sizes, batches)
        )
        if int(most.sum()) < k * batches:
            smallest = int(np.argmin(sizes))
            raise ValueError(
                f"Environment {smallest} has {sizes[smallest]} rows, too few to take part in each "
                f"of {batches} batches of {k} environments with at most {n} rows of each. Leave "
                "small environments out, raise `rows_per_environment`, lower "
                "`environments_per_batch`, or choose `uneven='repeat'` or `uneven='drop'`."
            )
        return _raise(visits, most, k * batches, stream)

    def _shuffle(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch."""
        stream = self._stream(epoch)
        plan = self._plan(stream)
        parts = [self._cut(stream, e, int(visits)) for e, visits in enumerate(plan)]
        # The k environments with the most visits left go next, ties at random.
        ties = iter(stream.random(int(plan.sum()) + len(parts)).tolist())
        waiting = [(-len(p), next(ties), e) for e, p in enumerate(parts) if p]
        heapq.heapify(waiting)
        batches = []
        for _ in range(self._batches):
            chosen = [heapq.heappop(waiting) for _ in range(self.environments_per_batch)]
            batches.append([row for _, _, e in sorted(chosen, key=_last) for row in parts[e].pop()])
            for left, _, e in chosen:
                if left < -1:
                    heapq.heappush(waiting, (left + 1, next(ties), e))
        order = stream.permutation(len(batches))
        return [batches[i] for i in order]

    def _cut(self, stream: np.random.Generator, e: int, visits: int) -> list[list[int]]:
        """Shuffle the rows of an environment and cut them into parts, one for each visit."""
        if visits == 0:
            return []
        rows, n = self._rows[e], self.rows_per_environment
        if self.uneven == "spread":
            parts = np.array_split(stream.permutation(rows), visits)
            return [parts[i].tolist() for i in stream.permutation(visits)]
        # Rounds: between two repetitions of a row, every other row of its environment is given.
        rounds = math.ceil(visits * n / len(rows))
        shuffled = np.concatenate([stream.permutation(rows) for _ in range(rounds)])
        return _without_twins(shuffled, visits, n)


def _last(entry: tuple[int, float, int]) -> int:
    return entry[2]


def _without_twins(shuffled: np.ndarray, visits: int, n: int) -> list[list[int]]:
    """Cut into parts of n rows, none of which has a row twice.

    A part may reach over the end of a round. A row that it has already is then put off, to
    the part after.
    """
    parts: list[list[int]] = []
    ahead = shuffled.tolist()
    start = 0
    for _ in range(visits):
        part = ahead[start : start + n]
        if len(set(part)) < n:
            seen: dict[int, None] = {}
            later: list[int] = []
            stop = start
            while len(seen) < n:
                row = ahead[stop]
                stop += 1
                if row in seen:
                    later.append(row)
                else:
                    seen[row] = None
            part = list(seen)
            ahead[start:stop] = part + later
        parts.append(part)
        start += n
    return parts


def _rows_by_environment(env: Tensor | np.ndarray | Sequence[int]) -> list[np.ndarray]:
    given = np.asarray(env.cpu() if hasattr(env, "cpu") else env)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iuU"):
        raise ValueError(
            "Parameter `env` should be a vector of whole numbers or strings, a label for each row. "
            f"Found shape {list(given.shape)} and dtype {given.dtype}."
        )
    if given.size == 0:
        raise ValueError(
            "Parameter `env` should name the environment of one row or more. Found no row: "
            "there are zero environments."
        )
    if given.dtype.kind != "U" and given.min() < 0:
        raise ValueError(
            "Parameter `env` should not be negative: a batch is made of rows whose environment "
            f"is known. Found `{given.min()}`. Leave those rows out (`env[env >= 0]`)."
        )
    order = np.argsort(given, kind="stable")
    _, starts = np.unique(given[order], return_index=True)
    return np.split(order, starts[1:])


def _raise(
    visits: np.ndarray, most: np.ndarray, total: int, stream: np.random.Generator
) -> np.ndarray:
    """Add visits, one at a time and to the environment with the fewest, up to a total.

    Found by the level at which all environments below it are lifted to it; which of them stay
    one short of the level is drawn.
    """
    low, high = 0, int(most.max())
    while low < high:  # the least level that reaches the total
        level = (low + high) // 2
        if int(np.clip(level, visits, most).sum()) >= total:
            high = level
        else:
            low = level + 1
    lifted: np.ndarray = np.clip(low, visits, most)
    over = np.flatnonzero(lifted > np.clip(low - 1, visits, most))
    lifted[stream.permutation(over)[: int(lifted.sum()) - total]] -= 1
    return lifted


def _lower(visits: np.ndarray, total: int, stream: np.random.Generator) -> np.ndarray:
    """Take visits away from the environments with the most, down to a total.

    Found by the level that all are cut to; which of them are cut once more is drawn.
    """
    low, high = 0, int(visits.max())
    while low < high:  # the least level that keeps the total
        level = (low + high) // 2
        if int(np.minimum(visits, level).sum()) >= total:
            high = level
        else:
            low = level + 1
    cut: np.ndarray = np.minimum(visits, low)
    over = np.flatnonzero(cut == low)
    cut[stream.permutation(over)[: int(cut.sum()) - total]] -= 1
    return cut
