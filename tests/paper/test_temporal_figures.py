"""Runs of masks over time: cycles of environments, going on after a kill, the figure; and the
picture of masked weights."""

import json

import numpy as np
import pytest
import torch

from consilience.lab import runs as run_files
from consilience.lab.errors import LabError
from consilience.optim import TemporalAndAdam, TemporalAndMask
from consilience.paper import masked_not_frozen, temporal
from consilience.paper.temporal import CASES, Setting, _Training

TINY = Setting(
    environments=3, rows_per_environment=20, batch_size=5, epochs=3, drops=(0.7,), hidden_units=8
)


def training(tmp_path, case="adam", setting=TINY):
    return _Training(tmp_path, CASES[case], 0, setting)


def test_each_cycle_visits_each_environment_and_each_epoch_each_row(tmp_path):
    made = training(tmp_path)
    first, second = made._batches(), made._batches()
    assert len(first) == 12
    env = torch.stack([made.rows.env[batch] for batch in first])
    assert (env == env[:, :1]).all()  # a step has one environment
    assert all(sorted(cycle) == [0, 1, 2] for cycle in env[:, 0].view(4, 3).tolist())
    for epoch in (first, second):
        assert torch.equal(torch.cat(epoch).sort().values, torch.arange(60))
    assert not torch.equal(torch.cat(first), torch.cat(second))


@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_and_goes_on_after_a_kill(name, tmp_path, monkeypatch):
    monkeypatch.setattr(temporal, "_why_stop", lambda entry: None)
    whole = temporal.train(tmp_path / "whole", name, 1, TINY)
    save, saved = _Training._save, []

    def killed(self, epoch):
        save(self, epoch)
        saved.append(epoch)
        if epoch == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Training, "_save", killed)
    with pytest.raises(KeyboardInterrupt):
        temporal.train(tmp_path / "cut", name, 1, TINY)
    monkeypatch.setattr(_Training, "_save", save)
    # A line more than the checkpoint knows of, as a kill between the two leaves it.
    directory = tmp_path / "cut" / "temporal" / f"{name}_seed=1"
    run_files.append_metrics(
        directory, {**run_files.read_metrics(directory / run_files.METRICS)[-1], "epoch": 3}
    )
    resumed = temporal.train(tmp_path / "cut", name, 1, TINY)
    for entry in (whole["last"], resumed["last"]):
        entry.pop("seconds")
    assert resumed == whole
    assert saved == [1, 2]
    assert len(run_files.open_run(directory).metrics()) == 3
    assert temporal.train(tmp_path / "cut", name, 1, TINY)["epochs"] == 3  # nothing left to do


def test_cases_are_what_their_names_say():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    for name, case in CASES.items():
        optimizer = case.make(parameters)
        if case.optimizer == "gradient":
            assert isinstance(optimizer, TemporalAndMask)
            assert optimizer.threshold == float(name.split("-")[1])
            assert (optimizer.rescale == "none") == name.endswith("plain")
        else:
            assert isinstance(optimizer, TemporalAndAdam) == (case.optimizer == "algorithm")
    assert CASES["algorithm-0"].settings["threshold"] == 0
    assert len({case.title for case in CASES.values()}) == len(CASES)
    assert set(temporal.SHOWN) <= set(CASES)


@pytest.mark.parametrize("name", ["gradient-0.5", "algorithm-0.5"])
def test_the_share_kept_is_what_the_mask_lets_move(name, tmp_path):
    made = training(tmp_path, name)
    for batch in made._batches() * 4:
        before = [p.detach().clone() for p in made.model.parameters()]
        x, y, _ = made.rows[batch]
        made.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(made.model(x), y).backward()
        made.optimizer.step()
    parameters = list(made.model.parameters())
    if name.startswith("gradient"):
        moved = sum(int((p.grad != 0).sum()) for p in parameters)
    else:
        shrunk = [p * (1 - 1e-3) for p in before]
        changed = zip(parameters, shrunk, strict=True)
        moved = sum(int((~torch.isclose(p, b, rtol=1e-6, atol=0)).sum()) for p, b in changed)
    total = sum(p.numel() for p in parameters)
    share = temporal._share_kept(made.optimizer)
    assert 0 < share < 1
    assert share == pytest.approx(moved / total, abs=0.02)  # a gradient may be 0 where kept


def test_runs_that_learn_the_shortcuts_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(temporal, "_accuracy", lambda model, rows: float(len(rows) == 60))
    summary = temporal.train(tmp_path, "adam", 0, TINY)
    assert summary["epochs"] == 1
    assert "above 97%" in summary["stopped"]


def test_the_figure_and_its_numbers(tmp_path, capsys):
    runs = tmp_path / "runs"
    with pytest.raises(LabError, match=r"python -m consilience\.paper\.temporal"):
        temporal.draw(tmp_path, runs=runs)
    for name in ("adam", "gradient-0.6", "algorithm-0.6"):
        for seed in range(2):
            temporal.train(runs, name, seed, TINY)
    files = temporal.draw(tmp_path / "out", runs=runs)
    names = ["temporal.svg", "temporal.png", "temporal.json", "temporal.csv"]
    assert [path.name for path in files] == names
    rows = json.loads(files[2].read_text())["rows"]
    assert [(row["case"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("adam", "gradient-0.6", "algorithm-0.6") for seed in range(2)
    ]
    table = capsys.readouterr().out
    tests = np.array([row["test_accuracy"] for row in rows if row["case"] == "adam"])
    assert f"{tests.mean():.1%} ± {100 * tests.std(ddof=1):.1f}" in table


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(temporal, "Setting", lambda: TINY)
    temporal.Setting.epochs = 1
    temporal.main(["--seeds", "1", "--cases", "adam", "--runs", str(tmp_path), "--epochs", "1"])
    assert "adam, seed 0: train" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"There is no case `adma`\. Did you mean `adam`\?"):
        temporal.main(["--cases", "adma", "--runs", str(tmp_path)])
    assert len(list((tmp_path / "temporal").iterdir())) == 1


def test_the_picture_of_masked_weights(tmp_path):
    files = masked_not_frozen.draw(tmp_path)
    assert [path.suffix for path in files] == [".svg", ".png", ".json", ".csv"]
    found = {}
    for row in json.loads(files[2].read_text())["rows"]:
        key = row["optimizer"], row["decay"], row["masked"]
        found.setdefault(key, []).append(row["weight"])
    start, steps = masked_not_frozen.AGREED, masked_not_frozen.MASKED
    held = {key: np.array(path)[start : start + steps + 1] for key, path in found.items()}
    for name in masked_not_frozen.OPTIMIZERS:
        for decay in ("before", "after", "none"):
            update, frozen = (held[name, decay, masked] for masked in ("update", "frozen"))
            assert np.array_equal(update, frozen)
            assert (np.ptp(frozen) == 0) == (decay != "after")
            still = np.ptp(held[name, decay, "gradient"]) == 0
            assert still == (decay == "none" and name in ("SGD", "RMSprop", "Adagrad"))
