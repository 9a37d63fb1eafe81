"""What one sees while runs go on."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from consilience.lab.errors import LabError
from consilience.lab.jobs import make_job
from consilience.lab.progress import Progress
from consilience.lab.settings import Settings, label

LONG = replace(Settings(), dropout=0.5, l2=0.0, learning_rate=1e-3, stop_memorizing=True)


def entry(epoch, null_keep_rate=None):
    return {
        "epoch": epoch,
        "train_accuracy": 0.9,
        "test_accuracy": 0.5,
        "kept": 0.25,
        "null_keep_rate": null_keep_rate,
        "seconds": 2.0,
    }


@pytest.fixture
def jobs(tmp_path):
    return [
        make_job(tmp_path, label(method, "paper", settings), method, settings, 0)
        for method, settings in (("and-mask", Settings()), ("erm", LONG))
    ]


def shown(progress):
    progress.console.print(progress.view())
    return progress.console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_every_column_is_seen_whole(jobs, width):
    progress = Progress(jobs, Console(width=width, file=io.StringIO()))
    progress.epoch(jobs[0], entry(31, 1e-9))
    progress.epoch(jobs[1], entry(3))
    text = shown(progress)
    assert max(map(len, text.splitlines())) <= width
    first = next(line for line in text.splitlines() if "and-mask" in line)
    assert first.split()[-6:] == ["31/93", "90.0%", "50.0%", "25.0%", "4", "s"]
    # ERM has no vote: nothing is kept or left out.
    assert "–" in next(line for line in text.splitlines() if "3/93" in line and "31" not in line)
    assert "stop-memorizing=yes" in text  # long labels fold between words
    assert "0 of 2 runs finished" in text


def test_without_a_terminal_every_tenth_is_a_line(jobs):
    progress = Progress(jobs, Console(width=80, file=io.StringIO()))
    for epoch in range(1, 94):
        progress.epoch(jobs[0], entry(epoch, 1e-9))
    progress.end(jobs[1], LabError("it failed"))
    last = {"epochs": 93, "stopped": "it memorized", "last": entry(93, 1e-9)}
    progress.end(jobs[0], last)
    lines = progress.console.file.getvalue().splitlines()
    assert len(lines) == 12
    assert lines[0] == "and-mask, seed 0: epoch 9/93, train 90.0%, test 50.0%, kept 25.0%"
    assert lines[10].endswith("seed 0: failed")
    assert "done after 93 epochs, stopped: it memorized" in lines[11]
