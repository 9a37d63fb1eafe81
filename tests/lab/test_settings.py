import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from consilience.data import SyntheticMemorization
from consilience.lab.errors import LabError
from consilience.lab.search import RANGES, trials
from consilience.lab.settings import (
    METHODS,
    PRESETS,
    Settings,
    brief,
    changes,
    check_methods,
    flags,
    label,
    preset,
)
from consilience.lab.synthetic import make_data, make_method


def test_the_paper_trains_3000_over_d_epochs_on_all_environments():
    found = preset("paper").resolve()
    assert (found.epochs, found.environments_per_batch) == (93, 32)
    assert replace(preset("paper"), environments=16).resolve().epochs == 187
    assert preset("authors-code").resolve().epochs == 150


@pytest.mark.parametrize("bias", [0.01, 0.0])
def test_biases_start_where_they_are_asked_to(bias):
    model = make_method("erm", Settings() if bias else Settings(initial_bias=bias), 0).model
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    assert len(biases) == 4
    assert all((p == bias).all() for p in biases)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_agree_with_those_of_the_data(name):
    assert make_data(preset(name), 5) == SyntheticMemorization.preset(name, seed=5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environments": 0}, "--environments` should be 1 or more"),
        ({"batch_size": 0}, "--batch-size"),
        ({"learning_rate": -1.0}, "--learning-rate"),
        ({"learning_rate": 0.0}, "--learning-rate` should be above 0"),
        ({"initial_bias": float("nan")}, "--initial-bias` should be a number. Found nan"),
        ({"dropout": 1.0}, r"--dropout` should lie in \[0, 1\)"),
        ({"threshold": 1.5}, r"--threshold` should lie in \[0, 1\]. Found 1.5"),
        ({"drops": (1.5,)}, "--drops"),
        ({"environments_per_batch": 40}, "more than there are"),
        ({"rows_per_environment": 100}, "Too few rows for the batch asked for"),
        ({"environments": 4000}, "leaves no epoch"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"shortcut_scale": float("inf")}, "--shortcut-scale"),
        ({"max_rescale": 0.5}, "`--max-rescale` should be 1 or more, or 0 for no limit"),
        ({"max_rescale": 5.0, "rescale": "none"}, "leaves none to limit"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(LabError, match=words):
        replace(Settings(), **change).resolve()


def test_unknown_names_bring_the_nearest():
    with pytest.raises(LabError, match="Did you mean `paper`"):
        preset("papper")
    with pytest.raises(LabError, match="Did you mean `and-mask`"):
        check_methods(("andmask",), Settings(), Settings())


def test_a_setting_that_no_method_reads_is_refused():
    changed = Settings(threshold=0.5)
    check_methods(("erm", "and-mask"), changed, Settings())
    with pytest.raises(LabError, match="`--threshold` does nothing for erm and irm"):
        check_methods(("erm", "irm"), changed, Settings())
    with pytest.raises(LabError, match="`--hidden-layers` does nothing for dann"):
        check_methods(("dann",), Settings(hidden_layers=5), Settings())


def test_methods_store_what_they_read():
    assert "threshold" in Settings().read_by("and-mask")
    assert "threshold" not in Settings().read_by("erm")
    assert "penalty_weight" in Settings().read_by("irm")
    every = {name for method in METHODS for name in Settings().read_by(method)}
    assert every == {field.name for field in fields(Settings)}


def test_labels_tell_configurations_apart_and_seeds_together():
    assert label("erm", "paper", Settings()) == "erm"
    assert label("erm", "paper", Settings(threshold=0.3)) == "erm"
    assert label("and-mask", "paper", Settings(threshold=0.3)) == "and-mask threshold=0.3"
    assert label("erm", "authors-code", preset("authors-code")) == "erm authors-code"
    assert label("erm", "paper", Settings(drops=())) == "erm drops=none"
    assert flags(changes(Settings(batch_norm=True, l2=0.0), Settings())) == "--batch-norm --l2 0"


@pytest.mark.parametrize("method", RANGES)
def test_trials_lie_in_the_ranges_and_depend_on_the_seed_alone(method):
    found = trials(method, Settings(), 40, seed=1)
    assert found[:10] == trials(method, Settings(), 10, seed=1)
    assert found != trials(method, Settings(), 40, seed=2)
    for name, options in RANGES[method].items():
        assert {getattr(tried, name) for tried in found} == set(options)
    assert not any(tried.l1 and tried.l2 for tried in found)
    assert all(tried.stop_memorizing for tried in found)
    for tried in found[:3]:
        tried.resolve()


def test_nothing_is_searched_without_ranges():
    with pytest.raises(LabError, match="Did you mean `and-mask`"):
        trials("andmask", Settings(), 1, seed=0)
    with pytest.raises(LabError, match="--trials"):
        trials("erm", Settings(), 0, seed=0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_made(method):
    tiny = replace(Settings(), hidden_units=4, shortcut_dimensions=3)
    made, again, other = (make_method(method, tiny, seed).model.state_dict() for seed in (0, 0, 1))
    for name, weight in made.items():
        assert bool((weight == again[name]).all())
    assert any(bool((weight != other[name]).any()) for name, weight in made.items())


def test_the_page_says_what_the_presets_are():
    page = (Path(__file__).parents[2] / "docs" / "synthetic.md").read_text()
    section = page.split("### What the paper leaves open")[1].split("\n## ")[0]
    told = {}
    for row in re.findall(r"^\| .+ \|$", section, re.MULTILINE):
        *_, paper, code, flag = (cell.strip() for cell in row.strip("|").split("|"))
        if flag.startswith("`--"):
            told[flag.strip("`-").replace("-", "_")] = paper, code
    presets = [preset(name).resolve() for name in ("paper", "authors-code")]
    for name, cells in told.items():
        assert cells == tuple(brief(getattr(one, name)) for one in presets), name
    # All in which they differ is there (that all environments are in a batch is a sentence).
    assert changes(*presets).keys() - told.keys() == {"environments_per_batch"}
