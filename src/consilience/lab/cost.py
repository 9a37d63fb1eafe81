"""What a run of one method costs, as a multiple of another's, measured in turns.

``python -m consilience.lab.cost`` trains ERM and the AND-mask epoch by epoch in turns, evaluation
included as in a run, and prints the ratio of their times: by the wall clock, and by the processor
time of the process, which other work on the machine disturbs less.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from consilience.data import EnvironmentBatchSampler
from consilience.lab.settings import PRESETS
from consilience.lab.synthetic import make_data, make_method
from consilience.lab.training import accuracy

METHODS = ("erm", "and-mask")


def measure(preset: str, epochs: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and processor seconds of each epoch of each method, the first epoch left out."""
    settings = PRESETS[preset].resolve()
    data = make_data(settings, 0)
    rows, test = data.train(), data.test(settings.test_rows)
    methods = {name: make_method(name, settings, 0) for name in METHODS}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    sampler = EnvironmentBatchSampler(
        rows.env, settings.environments_per_batch, settings.batch_size
    )
    for epoch in range(epochs + 1):
        batches = list(sampler)
        for name in METHODS if epoch % 2 else reversed(METHODS):
            method = methods[name]
            wall, process = time.perf_counter(), time.process_time()
            method.model.train()
            for batch in batches:
                method.step(*rows[torch.tensor(batch)])
            accuracy(method.model, rows)
            accuracy(method.model, test)
            if epoch:
                found[name].append((time.perf_counter() - wall, time.process_time() - process))
    return found


def main() -> None:
    """Print medians and ratios for both presets."""
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    torch.set_num_threads(1)
    for preset in PRESETS:
        found = measure(preset, epochs)
        for index, clock in enumerate(("wall", "processor")):
            erm, mask = ([pair[index] for pair in found[name]] for name in METHODS)
            ratios = sorted(b / a for a, b in zip(erm, mask, strict=True))
            sys.stdout.write(
                f"{preset:14}{clock:10} seconds an epoch: erm {statistics.median(erm):.3f}, "
                f"and-mask {statistics.median(mask):.3f}, ratio {statistics.median(ratios):.2f} "
                f"({ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f})\n"
            )


if __name__ == "__main__":
    main()
