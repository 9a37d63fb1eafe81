import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from consilience import cli
from consilience.lab import jobs, runs
from consilience.lab.errors import LabError
from consilience.lab.settings import PRESETS

TINY = (
    "--environments 4 --shortcut-dimensions 6 --rows-per-environment 32 --test-rows 50 "
    "--hidden-units 8 --epochs 3 --batch-size 16 --name tiny"
).split()


def fails(capsys, *words):
    """Run in this process, and return what is said where the exit status is 2."""
    with pytest.raises(SystemExit) as caught:
        cli.main([*map(str, words)])
    assert caught.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["run", "synthetic", "--help"],
        ["search", "synthetic", "--help"],
        ["list", "--help"],
        ["report", "--help"],
        ["figure", "--help"],
        ["figure", "list"],
    ],
    ids=" ".join,
)
def test_help_does_not_import_torch(words):
    code = (
        "import sys\nfrom consilience.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    found = subprocess.run(  # noqa: S603
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("name", PRESETS)
def test_help_shows_the_defaults_of_the_preset(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "synthetic", "--preset", name, "--help"])
    assert caught.value.code == 0
    text = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for flag, value in (
        ("--environments", PRESETS[name].environments),
        ("--learning-rate", PRESETS[name].learning_rate),
        ("--revolutions", PRESETS[name].revolutions),
        ("--rescale", PRESETS[name].rescale),
    ):
        assert re.search(rf"{flag} [^()]*(\([^d][^()]*\)[^()]*)*\(default: {value}\)", text), flag


def test_runs_list_and_leaves_finished_runs_alone(tmp_path, capsys, monkeypatch):
    words = ["run", "synthetic", *TINY, "--method", "erm", "and-mask", "--seeds", "2"]
    words += ["--runs", str(tmp_path), "--workers", "1"]
    monkeypatch.setattr(cli, "console", Console(width=120))
    cli.main(words)
    said = capsys.readouterr().out
    for label in ("tiny erm", "tiny and-mask"):
        assert label in said
    assert f"Next: consilience report {tmp_path}\n" in said
    found = runs.find_runs(tmp_path)
    assert [(run.label, run.seed) for run in found] == [
        ("tiny and-mask", 0),
        ("tiny and-mask", 1),
        ("tiny erm", 0),
        ("tiny erm", 1),
    ]
    run = found[0]
    assert run.config["command"].startswith("consilience run synthetic --environments 4")
    assert {"python", "torch", "numpy", "consilience"} <= run.config["versions"].keys()
    assert [entry["epoch"] for entry in run.metrics()] == [1, 2, 3]
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    cli.main(words)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    cli.main(["list", str(tmp_path)])
    assert "3/3" in capsys.readouterr().out
    monkeypatch.setattr(cli, "console", Console(width=80))
    cli.main(["list", str(tmp_path)])
    said = capsys.readouterr().out
    for column in ("state", "epoch", "seeds", "lowest", "seconds"):
        assert column in said  # eighty columns are enough for all
    cli.main(["list", str(tmp_path), "--markdown"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:]] == [["| tiny and-mask", "2"], ["| tiny erm", "2"]]
    assert rows[0][5:8] == ["lowest", "highest", "at 99%"]
    assert all(row[7].endswith("%)") and float(row[5]) <= float(row[6]) for row in rows[2:])


def test_processes_give_the_numbers_of_one_process(tmp_path):
    words = ["run", "synthetic", *TINY, "--method", "and-mask", "--seeds", "2"]
    words += ["--threshold", "0.5", "--runs"]
    for workers in ("1", "2"):
        cli.main([*words, str(tmp_path / workers), "--workers", workers])
    one, two = ([r.checkpoint() for r in runs.find_runs(tmp_path / w)] for w in "12")
    for (a, _), (b, _) in zip(one, two, strict=True):
        assert all(bool((a[name] == b[name]).all()) for name in a)


def test_a_killed_command_goes_on_and_leaves_no_worker(tmp_path):
    long = [*TINY, "--epochs", 3000, "--method", "erm", "--seeds", 2, "--workers", 2]
    words = ["run", "synthetic", *long, "--runs", tmp_path]
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "consilience.cli", *map(str, words)], stdout=subprocess.DEVNULL
    )
    folders = [tmp_path / "synthetic" / f"tiny_seed={seed}" for seed in (0, 1)]
    deadline = time.monotonic() + 120
    while not all((f / runs.CHECKPOINT).exists() for f in folders):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    # Workers notice at their next epoch, and let go of their runs.
    counts = [-1, -1]
    while (now := [len(runs.open_run(f).metrics()) for f in folders]) != counts:
        counts = now
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert all(0 < count < 3000 for count in counts)
    for folder in folders:
        run = runs.open_run(folder)
        assert len(run.metrics()) - run.checkpoint()[1]["epoch"] in (0, 1)
    # Ctrl-C says how to go on, with the status of an interrupted command.
    # (Where the tests themselves run in the background, SIGINT is ignored, and inherited so.)
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    process = subprocess.Popen(  # noqa: S603
        [
            sys.executable,
            "-c",
            f"{listening}from consilience.cli import main; main()",
            *map(str, words),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    while sum(len(runs.open_run(f).metrics()) for f in folders) < sum(counts) + 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "goes on from the last finished epoch" in said


def test_dry_run_trains_nothing(tmp_path, capsys):
    cli.main(["run", "synthetic", *TINY, "--runs", str(tmp_path), "--dry-run", "--seeds", "3"])
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert re.search(r"epochs +3\n", said)
    assert re.search(r"--environments-per-batch +4\n", said)
    # What all methods share stands once, and what differs with each.
    everyone, *each = re.split(r"\n(?=tiny)", said)
    assert everyone.count("--environments ") == 1
    assert [("--threshold" in one) for one in each] == [True, False]
    assert re.search(r"6 runs, \d+ at a time: about", said)


def test_search_draws_runs_and_ranks(tmp_path, capsys, monkeypatch):
    preset = replace(PRESETS["paper"], environments=3, rows_per_environment=256, hidden_units=8)
    monkeypatch.setitem(PRESETS, "tiny", preset)
    words = ["search", "synthetic", "--preset", "tiny", "--method", "irm", "--trials", "2"]
    words += ["--epochs", "1", "--runs", str(tmp_path), "--workers", "1"]
    cli.main([*words, "--dry-run"])
    assert "search tiny irm trial=001" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    cli.main(words)
    said = capsys.readouterr().out
    assert "Best by test accuracy" in said
    assert "--penalty-weight" in said
    assert len(runs.find_runs(tmp_path)) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "synthetic", "--method", "andmask"], "Did you mean `and-mask`"),
        (["run", "synthetic", "--method", "AND_MASK"], "Did you mean `and-mask`"),
        (["run", "synthetic", "--method"], "`--method` should name one or more"),
        (["run", "synthetic", "--preset", "papr"], "Did you mean `paper`"),
        (["run", "synthetic", "--environments", "0"], "`--environments` should be 1 or more"),
        (["run", "synthetic", "--batch-size", "2000"], "Too few rows for the batch asked for"),
        (["run", "synthetic", "--seeds", "0"], "`--seeds` should be 1 or more"),
        (["run", "synthetic", "--first-seed", "-3"], "seed should be 0 or more"),
        (
            ["run", "synthetic", "--first-seed", str(2**63)],
            "less than 2^63. Found 9223372036854775",
        ),
        (["run", "synthetic", "--name", "x" * 250], "Choose a short one with `--name`"),
        (["list", __file__], "is no directory"),
        (["report", __file__], "is no directory"),
        (["--verson"], "Did you mean `--version`"),
        (
            ["search", "synthetic", "--method", "irm", "--seed", "-3"],
            "`--seed` should be 0 or more",
        ),
        (["run", "synthetic", "--workers", "-1"], "`--workers` should be 0 or more"),
        (["run", "synthetic", "--learning-rat", "1"], "--learning-rate"),
        (["run", "synthetic", "--method", "erm", "--threshold", "0.5"], "does nothing for erm"),
        (["run", "sinthetic"], "Did you mean `run synthetic`"),
        (["run"], "Say what to run"),
        (["lst"], "Did you mean `list`"),
        (["figure", "nothing-like-this"], "There is no figure"),
        (["list", "/nowhere/at/all"], "There is no directory"),
        (
            "run synthetic --dry-run --revolutions 0 --spiral-scale 0".split(),
            "`spiral_scale` should be a number here",
        ),
        (["list", "x" * 300], "File name too long"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_a_sentence_and_status_2(words, expected, capsys):
    assert expected in fails(capsys, *words)


def finished(tmp_path):
    words = ["run", "synthetic", *TINY, "--method", "erm", "--runs", str(tmp_path)]
    cli.main(words)
    return words, tmp_path / "synthetic" / "tiny_seed=0"


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_another_configuration_touches_nothing(tmp_path, capsys):
    words, folder = finished(tmp_path)
    before = content(folder)
    said = fails(capsys, *words, "--l2", "0.5")
    assert "holds a run of another configuration: `l2` is 0.0001 there and 0.5 here" in said
    assert content(folder) == before


@pytest.mark.parametrize("name", [runs.CONFIG, runs.METRICS, runs.CHECKPOINT, runs.DONE])
def test_damaged_files_are_named_and_left_alone(tmp_path, name, capsys):
    words, folder = finished(tmp_path)
    if name == runs.CHECKPOINT:
        (folder / runs.DONE).unlink()
    path = folder / name
    path.write_bytes(b"{damaged\n" + path.read_bytes())
    before = content(folder)
    said = fails(capsys, *words)
    assert f"{name}` is damaged" in said
    assert "Move the run directory away" in said
    after = content(folder)
    after.pop(".lock", None)
    before.pop(".lock", None)
    assert after == before


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a small file system of its own")
def test_a_full_disk_is_a_sentence_and_the_run_goes_on_later(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    python = [sys.executable, "-m", "consilience.cli", "run", "synthetic", *TINY, "--method", "erm"]
    words = " ".join([*python, "--hidden-units", "64", "--runs", str(small)])
    script = (
        f"mount -t tmpfs -o size=200k none {small} || exit 77\n"
        f"{words}; echo status $?\n"
        f"mount -o remount,size=10m {small}\n"
        f"{words}; echo status $?\n"
    )
    found = subprocess.run(  # noqa: S603
        ["unshare", "-rm", "sh", "-c", script],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    if found.returncode == 77 or "status" not in found.stdout:
        pytest.skip("no file systems may be mounted here")
    assert re.findall(r"status (\d+)", found.stdout) == ["2", "0"]
    assert "The disk is full" in found.stderr
    assert "epoch 3/3" in found.stdout


def test_a_full_disk_in_one_run_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    append = runs.append_metrics

    def refuse(directory, entry):
        if directory.name.endswith("seed=0"):
            raise LabError("The disk is full")
        append(directory, entry)

    monkeypatch.setattr(runs, "append_metrics", refuse)
    words = ["run", "synthetic", *TINY, "--method", "erm", "--seeds", "2", "--workers", "1"]
    assert "The disk is full" in fails(capsys, *words, "--runs", str(tmp_path))
    assert [run.done for run in runs.find_runs(tmp_path)] == [False, True]


def test_a_worker_that_vanishes_is_reported(tmp_path):
    job = jobs.make_job(tmp_path, "x", "erm", PRESETS["paper"], 0)
    message = jobs._vanished(job, -9)
    assert "exit code -9" in message
    assert "--workers" in message


def test_figures_are_drawn_by_their_module(tmp_path, monkeypatch, capsys):
    drawn = []

    def draw(folder, *, quick=False):
        drawn.append(quick)
        (folder / "it.png").write_text("")
        return [folder / "it.png"]

    def draw_runs(folder, *, quick=False, runs=None):
        raise LabError(f"There are no runs in `{runs}`.")

    names = {"results": draw_runs, "it": draw}
    for name, function in names.items():
        monkeypatch.setitem(sys.modules, f"figure_{name}", SimpleNamespace(draw=function))
    entries = [
        SimpleNamespace(
            name=name,
            module=f"figure_{name}",
            title="A",
            source="",
            cost="",
            runs=name == "results",
        )
        for name in names
    ]
    monkeypatch.setattr(cli, "FIGURES", tuple(entries))
    cli.main(["figure", "it", "--out", str(tmp_path), "--quick"])
    assert "it.png" in capsys.readouterr().out
    # One that cannot be drawn does not keep the others from being drawn.
    said = fails(capsys, "figure", "all", "--out", tmp_path, "--runs", "elsewhere")
    assert said == "results: There are no runs in `elsewhere`."
    assert drawn == [True, False]
    assert "Did you mean `it`" in fails(capsys, "figure", "itt")


def test_a_list_shows_the_others_beside_damaged_runs(tmp_path, capsys):
    _, folder = finished(tmp_path)
    for seed in (1, 2):
        shutil.copytree(folder, folder.with_name(f"tiny_seed={seed}"))
    (folder.with_name("tiny_seed=1") / runs.CONFIG).write_text("{}")
    (folder.with_name("tiny_seed=2") / runs.METRICS).write_text("{}\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["list", str(tmp_path)])
    said = capsys.readouterr()
    assert caught.value.code == 2
    assert "synthetic/tiny_seed=0" in said.out.replace("\n", "")
    assert said.err.count("is damaged") == 2
    # ERM has no vote, and so keeps nothing in particular.
    assert "100.0" not in said.out.split("tiny_seed=0")[1].split("\n")[0]


def test_a_reader_that_has_enough_is_no_error():
    command = [sys.executable, "-m", "consilience.cli", "run", "synthetic", "--help"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:  # noqa: S603
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (141, "")


def test_going_on_with_other_versions_is_said(tmp_path, capsys):
    words, folder = finished(tmp_path)
    config = json.loads((folder / runs.CONFIG).read_text())
    versions = {**config["versions"], "torch": "1.0"}
    runs.write_json(folder / runs.CONFIG, {**config, "versions": versions, "commit": "abc"})
    cli.main(words)
    assert "begun with" not in capsys.readouterr().out  # it is finished
    (folder / runs.DONE).unlink()
    cli.main(words)
    said = capsys.readouterr().out
    assert "One run was begun with torch 1.0, now 2." in said
    assert "One run was begun with commit abc, now" in said


def test_config_is_json_that_anyone_can_read(tmp_path):
    _, folder = finished(tmp_path)
    config = json.loads((folder / runs.CONFIG).read_text())
    assert config.keys() >= set(runs.CONFIG_KEYS)
    assert config["settings"]["method"] == "erm"
