"""Figures that show trained networks: which runs they choose, and what they ask for."""

import csv
import json
import shlex
from dataclasses import replace

import pytest
import tyro

from consilience import cli
from consilience.lab import settings as lab
from consilience.lab.errors import LabError
from consilience.lab.report.readings import groups, read
from consilience.paper import (
    _families,
    _numbers,
    consistency,
    environments,
    learning_curves,
    results,
)
from made_runs import make_run

PAPER = replace(lab.preset("paper"), epochs=3, hidden_units=4, hidden_layers=1)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def asked(command):
    """Return method names and settings that a command of `consilience run synthetic` stands for."""
    words = shlex.split(command)
    assert words[:3] == ["consilience", "run", "synthetic"]
    found = tyro.cli(
        cli.RunSynthetic,
        args=words[3:],
        default=cli.RunSynthetic(settings=lab.preset("paper")),
    )
    lab.check_methods(found.method, found.settings, lab.preset("paper"))
    return found


@pytest.mark.parametrize("name", _families.FAMILIES)
def test_the_command_of_a_family_makes_runs_of_that_family(name, tmp_path):
    found = asked(_families.command(_families.FAMILIES[name], tmp_path))
    assert found.seeds == 10
    assert found.runs == tmp_path
    small = replace(found.settings, epochs=2, hidden_units=4)
    make_run(tmp_path, *found.method, settings=small)
    assert list(_families.choose(tmp_path)) == [name]


def test_the_longest_of_a_family_stands_for_it_and_the_best_among_equals(tmp_path, capsys):
    make_run(tmp_path, "erm", "erm short", settings=PAPER, test_accuracy=0.9)
    for seed in (0, 1):
        make_run(tmp_path, "erm", "erm worse", seed=seed, settings=PAPER, test_accuracy=0.5)
        make_run(tmp_path, "erm", "erm better", seed=seed, settings=PAPER, test_accuracy=0.6)
        make_run(tmp_path, "erm", "search erm", seed=seed, settings=PAPER, test_accuracy=1.0)
        make_run(tmp_path, "erm", "erm late", seed=seed, settings=PAPER, epochs=2, done=False)
    chosen = _families.choose(tmp_path)
    assert {name: group.label for name, group in chosen.items()} == {"ERM, L2": "erm better"}
    missing = capsys.readouterr().out
    assert missing.count("consilience run synthetic") == len(_families.FAMILIES) - 1


@pytest.mark.parametrize(
    "changes",
    [{"environments": 4}, {"revolutions": 3.0}, {"shortcut_scale": 0.1}, {"l1": 1e-5}],
)
def test_other_data_and_two_regularizers_belong_to_no_family(changes, tmp_path):
    make_run(tmp_path, "erm", settings=replace(PAPER, **changes))
    (group,) = groups(read(tmp_path))
    assert _families.family(group) is None


@pytest.mark.parametrize("module", [results, learning_curves, environments])
@pytest.mark.parametrize("unfinished", [False, True])
def test_without_runs_the_commands_that_make_them_are_named(module, unfinished, tmp_path):
    if unfinished:
        make_run(tmp_path, settings=PAPER, epochs=1, done=False)
    with pytest.raises(LabError) as caught:
        module.draw(tmp_path / "figures", runs=tmp_path)
    commands = [line for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert len(commands) >= 9
    for command in commands:
        assert asked(command).runs == tmp_path
    assert not (tmp_path / "figures").exists()


@pytest.fixture
def some(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path, "and-mask", seed=seed, settings=PAPER, test_accuracy=0.9 + seed / 100)
        make_run(tmp_path, "erm", seed=seed, settings=PAPER, test_accuracy=0.5)
    return tmp_path


def test_results_by_method(some, tmp_path, capsys):
    files = results.draw(tmp_path / "figures", runs=some)
    assert [path.name for path in files] == [
        "results.svg",
        "results.png",
        "results.json",
        "results.csv",
    ]
    rows = rows_of(files[3])
    assert [(row["method"], row["seed"], row["test_accuracy"]) for row in rows] == [
        ("AND-mask", "0", "0.9"),
        ("AND-mask", "1", "0.91"),
        ("AND-mask", "2", "0.92"),
        *(("ERM, L2", str(seed), "0.5") for seed in range(3)),
    ]
    assert json.loads(files[2].read_text())["settings"]["AND-mask"]["threshold"] == 1.0
    said = capsys.readouterr().out.splitlines()
    assert "ERM, L2: erm" in said  # which of the configurations stands for the method
    line = next(x for x in said if x.startswith("AND-mask"))
    assert line.split() == [
        "AND-mask",
        "3",
        "100.00%",
        "±",
        "0.00",
        "91.00%",
        "±",
        "1.00",
        "90.00%",
    ]


def test_learning_curves(some, tmp_path):
    files = learning_curves.draw(tmp_path / "figures", runs=some)
    assert [path.name for path in files] == ["learning-curves.svg", "learning-curves.png"]
    assert all(path.stat().st_size > 1000 for path in files)


def test_numbers_of_environments(tmp_path, capsys):
    base = lab.preset("paper")
    for d, batch in ((2, 0), (32, 0), (64, 32)):
        for seed in range(5 if d == 2 else 1):
            make_run(
                tmp_path,
                "erm",
                f"erm environments={d}",
                seed=seed,
                settings=replace(base, environments=d, environments_per_batch=batch, epochs=3),
                test_accuracy=0.5 + seed / 100,
            )
    # Not of this sweep: batches of another size, another setting, another method.
    other = replace(base, environments=128, epochs=3)
    make_run(tmp_path, "erm", "all at once", settings=other)
    make_run(tmp_path, "erm", "no decay", settings=replace(base, l2=0.0, epochs=3))
    make_run(tmp_path, "irm", settings=replace(base, epochs=3))
    assert list(environments.choose(tmp_path)) == [("erm", 2), ("erm", 32), ("erm", 64)]

    files = environments.draw(tmp_path / "figures", runs=tmp_path)
    rows = rows_of(files[3])
    assert [row["environments"] for row in rows] == ["2"] * 5 + ["32", "64"]
    assert rows[0]["seconds"] == "6.0"
    printed = capsys.readouterr().out
    commands = [line for line in printed.splitlines() if line.startswith("  consilience")]
    found = [asked(command) for command in commands]
    assert [f.settings.environments for f in found] == list(environments.ENVIRONMENTS)
    assert found[0].method == ("and-mask",)  # ERM has its five seeds of two environments
    assert found[1].method == ("and-mask", "erm")
    for one in found:
        settings = one.settings.resolve()
        assert settings.environments_per_batch == min(32, settings.environments)
    row = next(line for line in printed.splitlines() if line.startswith("ERM  "))
    assert row.split() == ["ERM", "2", "3", "5", "54.0%", "52.0%", "±", "1.6", "100.0%", "0.1"]


def test_what_is_missing_is_priced_by_the_runs_that_are_there(tmp_path, capsys):
    base = replace(lab.preset("paper"), epochs=3)
    make_run(tmp_path, "erm", settings=base)
    make_run(tmp_path, "and-mask", settings=base)
    environments.draw(tmp_path / "figures", runs=tmp_path)
    # 98 runs of 3 epochs of 2 seconds
    assert f"about {98 * 6 / 3600:.1f} hours" in capsys.readouterr().out


def test_numbers_are_written_as_json_and_csv(tmp_path):
    rows = [{"a": 1, "b": None}, {"a": 0.5, "b": "x"}]
    first, second = _numbers.write(tmp_path / "new", "it", {"seeds": 2}, rows)
    assert json.loads(first.read_text()) == {"settings": {"seeds": 2}, "rows": rows}
    assert second.read_text() == "a,b\n1,\n0.5,x\n"


def test_scores_of_trained_networks(tmp_path, capsys):
    """Of a network whose layers after the first see every environment alike, and of one not so."""
    settings = replace(PAPER, outputs=1)
    for method in ("and-mask", "geometric-mean"):
        make_run(tmp_path, method, settings=settings, train_accuracy=1.0, kept=0.5)
    make_run(tmp_path, "erm", settings=settings, train_accuracy=1.0, test_accuracy=0.4)
    files = consistency.draw(tmp_path / "figures", quick=True, runs=tmp_path)
    assert sorted(path.suffix for path in files) == [".csv", ".json", ".png", ".svg"]
    rows = rows_of(tmp_path / "figures" / "consistency.csv")
    assert len(rows) == 6
    for row in rows:
        assert float(row["score"]) >= 1
        assert float(row["control"]) >= 1
        assert row["holds"] == "True"
        assert 0 <= float(row["felt"]) <= 1
    printed = capsys.readouterr().out
    assert "ERM, L2" in printed
    assert "1 of 1" in printed  # witnesses


def test_the_table_of_scores_fits_a_terminal():
    numbers = {"loss": 1.6e-4, "gradient": 0.0313, "curvature": 100.5, "score": 2039.0}
    rest = {"found": 324.0, "found_control": 2.7, "holds": True, "seen": 0.98, "felt": 0.031}
    one = consistency.Score(
        "", 0, "", 1.0, worst_loss=1e-3, norm=30.0, control=283.0, seconds=6.0, **numbers, **rest
    )
    scores = [
        replace(one, method=method, part=part, loss=loss, gradient=loss, holds=loss < 1e-3)
        for method in consistency.METHODS
        for part in consistency.PARTS
        for loss in (8.1e-5, 1.6e-4, 7.3e-3)
    ]
    table = consistency.summary(scores)
    assert max(map(len, table.splitlines())) <= 100
    assert table.count("0.00016 (8.1e-05-0.0073)") == 2 * 6
    assert table.count("2 of 3") == 6


def test_networks_that_do_not_fit_are_left_out(tmp_path, capsys):
    for seed, accuracy in ((0, 0.7), (1, 0.6)):
        make_run(tmp_path, "erm", seed=seed, settings=PAPER, train_accuracy=accuracy)
    with pytest.raises(LabError, match="no network that fits"):
        consistency.draw(tmp_path / "figures", runs=tmp_path)
    said = capsys.readouterr().out
    assert "seed 0: left out, no minimum (70.0%)" in said
    assert "--method and-mask" in said
    assert "--method dann" not in said
    assert "--stop-memorizing" not in said


def test_runs_that_stopped_memorizing_are_not_scored(tmp_path):
    make_run(tmp_path, "erm", settings=replace(PAPER, stop_memorizing=True), train_accuracy=1.0)
    with pytest.raises(LabError, match="no finished run"):
        consistency.draw(tmp_path / "figures", runs=tmp_path)
