"""Run directories made by hand: a trained network and its curves, without the training."""

import torch

from consilience.lab import runs
from consilience.lab.settings import Settings
from consilience.lab.synthetic import make_method

TINY = Settings(
    environments=4,
    shortcut_dimensions=6,
    rows_per_environment=32,
    test_rows=40,
    hidden_units=8,
    hidden_layers=0,
    outputs=2,
    revolutions=0.0,
    epochs=5,
    batch_size=16,
)
"""No hidden layer, and spirals without a revolution: class 0 lies right and class 1 left."""


def make_run(
    folder,
    method="erm",
    label=None,
    seed=0,
    *,
    settings=TINY,
    epochs=None,
    done=True,
    weight=None,
    command="consilience run synthetic",
    last=None,
    **ends,
):
    """Write a run. Metrics go from 0.5 to the value given by name, `weight` is the network's.

    `last` changes the last line of metrics.
    """
    label = label or method
    settings = settings.resolve()
    directory = folder / "synthetic" / f"{label.replace(' ', '_')}_seed={seed}"
    runs.write_config(
        directory,
        {
            "experiment": "synthetic",
            "label": label,
            "seed": seed,
            "settings": {"method": method, **settings.read_by(method)},
            "command": command,
            "versions": {"consilience": "0", "torch": "2"},
            "commit": None,
        },
    )
    ends = {"train_accuracy": 1.0, "test_accuracy": 0.5, "kept": 1.0, **ends}
    count = settings.epochs if epochs is None else epochs
    for epoch in range(1, count + 1):
        part = epoch / settings.epochs
        entry = {key: 0.5 + part * (end - 0.5) for key, end in ends.items()}
        entry |= {"epoch": epoch, "train_loss": 1 / epoch, "seconds": 2.0}
        entry["null_keep_rate"] = None if method == "erm" else 2 ** (1.0 - settings.environments)
        runs.append_metrics(directory, entry | (last if last and epoch == count else {}))
    built = make_method(method, settings, seed)
    if weight is not None:
        with torch.no_grad():
            layer = built.model[-1]
            layer.weight.copy_(torch.stack([-weight, weight]))
            layer.bias.zero_()
    tensors = {
        f"{name}.{key}": value
        for name, module in built.modules().items()
        for key, value in module.state_dict().items()
    }
    runs.write_checkpoint(directory, tensors, {"epoch": count})
    if done:
        runs.mark_done(directory, {"epochs": count, "stopped": None, "last": {}})
    return runs.open_run(directory)
