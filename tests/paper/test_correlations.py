"""Gradient correlations, against the slow and obvious way."""

import csv
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr
from torch import nn

from consilience.data import SyntheticMemorization
from consilience.paper import correlations
from consilience.paper.correlations import (
    THRESHOLDS,
    Gradients,
    correlate,
    environment_gradients,
    measure,
    network,
    pearson,
)
from consilience.rules import AndMask, XorMask


@pytest.fixture(scope="module")
def gradients():
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(3000, generator=generator)
    each = signal + 2 * torch.randn(16, 3000, generator=generator)
    other = each.mean(0) - signal
    return Gradients(each, signal, other, torch.randn(3000, generator=generator))


def test_gradients_of_environments_are_those_of_their_own_loss():
    data = SyntheticMemorization(environments=3, rows_per_environment=10, shortcut_dimensions=4)
    rows = data.train()
    model = network(data.dimensions, 8, "torch", 0)
    found = environment_gradients(model, rows)
    for e in range(3):
        model.zero_grad()
        chosen = rows.env == e
        F.cross_entropy(model(rows.x[chosen]), rows.y[chosen]).backward()
        wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(found[e], wanted)


def test_the_average_is_the_gradient_of_the_pooled_data():
    data = SyntheticMemorization(environments=3, rows_per_environment=10, shortcut_dimensions=4)
    rows = data.train()
    model = network(data.dimensions, 8, "he", 0)
    F.cross_entropy(model(rows.x), rows.y).backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(environment_gradients(model, rows).mean(0), wanted)


def test_correlations_by_hand(gradients):
    found = {(c.mask, c.threshold): c for c in correlate(gradients, "text", "torch", "all", 0)}
    votes = gradients.each.sign().sum(0).abs().numpy()
    average = gradients.each.mean(0).double().numpy()
    for threshold in THRESHOLDS:
        agree = votes >= 16 * threshold
        for mask, kept in (("and", agree), ("xor", ~agree)):
            if mask == "xor" and threshold == 0:
                assert (mask, threshold) not in found
                continue
            one = found[mask, threshold]
            assert one.kept == pytest.approx(kept.mean())
            for name in ("mechanism", "shortcuts", "neither"):
                signal = getattr(gradients, name).double().numpy()
                if kept.sum() < 10:
                    assert getattr(one, name) is None
                else:
                    wanted = pearsonr(average[kept], signal[kept]).statistic
                    assert getattr(one, name) == pytest.approx(wanted, abs=1e-5)


def test_zero_components_are_left_out_and_masks_complement_each_other(gradients):
    kept = [gradients.masked(rule(0.5))[0].size for rule in (AndMask, XorMask)]
    assert sum(kept) == 3000
    assert min(kept) > 0


def test_too_few_components_have_no_correlation():
    line = np.arange(10.0)
    assert pearson(line, line) == pytest.approx(1.0)
    assert pearson(line[:9], line[:9]) is None


def test_interventions_isolate_the_two_signals():
    found, first = measure(0, "text", "torch", hidden_units=16)
    assert first == 16 * 34
    assert found.each.shape == (16, found.mechanism.numel())
    weights = {
        "average": found.each.mean(0),
        "mechanism": found.mechanism,
        "shortcuts": found.shortcuts,
        "neither": found.neither,
    }
    inputs = {name: v[:first].reshape(16, 34).norm(dim=0) for name, v in weights.items()}
    # The gradient on a feature's weights goes once the feature says nothing of the label: what is
    # left are chance and the bias of the labels.
    assert inputs["shortcuts"][:2].norm() < 0.2 * inputs["average"][:2].norm()
    assert inputs["mechanism"][2:].norm() < 0.2 * inputs["average"][2:].norm()
    assert inputs["neither"].norm() < 0.2 * inputs["average"].norm()
    assert inputs["shortcuts"][2:].norm() > 0.8 * inputs["average"][2:].norm()


@pytest.mark.parametrize("initialisation", ["torch", "he"])
def test_initialisations_have_their_spread_and_come_from_the_seed(initialisation):
    a, b, c = (network(34, 256, initialisation, seed) for seed in (0, 0, 1))
    layers = [layer for layer in a if isinstance(layer, nn.Linear)]
    for layer in layers:
        wanted = {"torch": (3 * layer.in_features) ** -0.5, "he": (2 / layer.in_features) ** 0.5}
        assert layer.weight.std().item() == pytest.approx(wanted[initialisation], rel=0.1)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a[0].weight, c[0].weight)


def test_the_figure_and_its_numbers(tmp_path, capsys):
    files = correlations.draw(tmp_path, quick=True)
    assert [path.name for path in files] == [
        "correlations.svg",
        "correlations.png",
        "correlations-scatter.svg",
        "correlations-scatter.png",
        "correlations.json",
        "correlations.csv",
    ]
    whole = json.loads(files[4].read_text())
    with files[5].open() as file:
        rows = list(csv.DictReader(file))
    # 4 combinations of scales and weights, 2 seeds, 2 parts, 9 thresholds of AND and 8 of XOR
    assert len(rows) == len(whole["rows"]) == 4 * 2 * 2 * 17
    assert whole["settings"]["seeds"] == 2
    for row, entry in zip(rows, whole["rows"], strict=True):
        assert float(row["kept"]) == entry["kept"]
        assert (row["mechanism"] == "") == (entry["mechanism"] is None)
    printed = capsys.readouterr().out
    lines = printed.splitlines()  # two tables, which eighty columns hold
    assert len(lines) == 2 * (1 + 4 * 8) + 1
    assert max(map(len, lines)) <= 80
