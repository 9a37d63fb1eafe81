"""The examples run, and show what they say."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def load(name):
    return runpy.run_path(str(EXAMPLES / name))


def test_every_example_is_tested():
    text = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text, path.name


def test_linear_regression_draws_and_tells(run, tmp_path):
    told = run("linear_regression.py", "--folder", tmp_path, "--steps", 3)
    assert "GeometricMean" in told
    for path in tmp_path.iterdir():
        assert str(path) in told
        assert path.stat().st_size > 10_000
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".png"}


@pytest.fixture(scope="module")
def regression():
    example = load("linear_regression.py")
    weights = {name: example["train"](rule)[-1] for name, rule in example["RULES"].items()}
    return example, weights


def test_mean_lands_on_the_patchwork(regression):
    example, weights = regression
    # The numbers that the authors' notebook prints for 1000 iterations, but for its seed.
    assert torch.allclose(
        weights["Mean"], torch.tensor([0.319, 0.319, 0.319, 0.319, 0.126]), atol=5e-3
    )
    assert example["loss_in"](example["X"], weights["Mean"]) < 1e-4
    assert example["loss_in"](example["UNSEEN"][None], weights["Mean"]) > 0.4


@pytest.mark.parametrize("name", ["AndMask", "GeometricMean"])
def test_masks_land_on_the_shared_feature(regression, name):
    example, weights = regression
    assert (weights[name][:-1].abs() < 0.01).all()
    assert weights[name][-1] > 2.9
    assert example["loss_in"](example["UNSEEN"][None], weights[name]) < 0.01


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_they_land_is_no_matter_of_the_seed(seed):
    example = load("linear_regression.py")
    for name, rule in example["RULES"].items():
        path = example["train"](rule, steps=200 if name == "Mean" else 1000, seed=seed)
        contributions = path[-1] * example["X"].amax(0)
        if name == "Mean":
            assert (contributions[:-1] > 0.9).all()
            assert contributions[-1].abs() < 0.1
        else:
            # What the private features began with decays, and no step brings it back.
            assert contributions[-1] > 0.8
            assert (contributions[:-1].abs() <= contributions[-1] / 5).all()
            assert (path[1:, :-1].abs() <= path[:-1, :-1].abs()).all()


@pytest.mark.parametrize("name", ["AndMask", "GeometricMean"])
def test_masks_learn_the_same_from_either_half(regression, name):
    example, _ = regression
    rule = example["RULES"][name]
    first, last = (example["train"](rule, half)[-1] for half in (slice(0, 2), slice(2, 4)))
    assert torch.allclose(first, last, atol=0.01)
    mean = [
        example["train"](example["RULES"]["Mean"], half, 100)[-1]
        for half in (slice(0, 2), slice(2, 4))
    ]
    assert (mean[0] - mean[1]).abs().max() > 0.2


def test_own_training_loop_runs(run):
    told = run("own_training_loop.py", "--epochs", 1)
    assert "AndMask(threshold=0.6)" in told


def test_own_training_loop_learns_the_rings(capsys):
    example = load("own_training_loop.py")
    seen, new = example["score"](rule=example["Mean"](), epochs=12, seed=0)
    assert seen > 0.99
    assert new < 0.8
    seen, new = example["score"](rule=example["AndMask"](0.6), epochs=12, seed=0)
    assert new > 0.93


def test_accumulation_in_parts_is_the_whole(run):
    example = load("accumulation.py")
    whole, voters = example["gradients"](at_a_time=16)
    parts, voters_in_parts = example["gradients"](at_a_time=4)
    assert voters == voters_in_parts == 16
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a == 0, b == 0)
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)
    assert any((a == 0).any() for a in whole)
    assert "16 voters" in run("accumulation.py")


def test_chance_prints_three_tables(run):
    told = run("chance.py", "--size", 1000, "--seeds", 2)
    assert len(re.findall(r"^\| --- ", told, re.MULTILINE)) == 3
