import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from consilience.lab import jobs, runs, training
from consilience.lab.errors import LabError
from consilience.lab.settings import Settings
from consilience.lab.synthetic import load, settings_of
from consilience.lab.training import accuracy, train

TINY = Settings(
    environments=4,
    shortcut_dimensions=6,
    rows_per_environment=32,
    test_rows=50,
    hidden_units=8,
    epochs=6,
    batch_size=16,
    dropout=0.25,
)
CHANGING = ("seconds", "train_seconds")


def start(folder, method="erm", settings=TINY, seed=0):
    job = jobs.make_job(folder, method, method, settings, seed)
    jobs.prepare([job], "consilience run synthetic")
    return job


def go(job, **kwargs):
    return train(job.directory, job.method, job.settings, job.seed, **kwargs)


def numbers(directory):
    """Metrics without durations, and the checkpoint."""
    run = runs.open_run(directory)
    metrics = [{k: v for k, v in e.items() if k not in CHANGING} for e in run.metrics()]
    return metrics, *run.checkpoint()


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for name, tensor in a[1].items():
        assert torch.equal(tensor, b[1][name]), name
    assert a[2] == b[2]


@pytest.mark.parametrize("method", ["erm", "and-mask", "geometric-mean", "irm", "dann"])
def test_same_seed_same_numbers_and_an_interruption_does_not_show(method, tmp_path):
    for settings in (TINY, replace(TINY, optimizer="sgd")):
        folder = tmp_path / settings.optimizer
        whole = start(folder / "whole", method, settings)
        go(whole)

        class Killed(BaseException):
            pass

        def stop_after(epochs):
            def on_epoch(entry):
                if entry["epoch"] == epochs:
                    raise Killed

            return on_epoch

        parts = start(folder / "parts", method, settings)
        for epochs in (2, 3):
            with pytest.raises(Killed):
                go(parts, on_epoch=stop_after(epochs))
        seen = []
        go(parts, on_epoch=lambda entry, seen=seen: seen.append(entry["epoch"]))
        assert seen == [1, 2, 3, 4, 5, 6]
        assert_same(numbers(whole.directory), numbers(parts.directory))
        other = start(folder / "other", method, settings, seed=1)
        go(other)
        assert numbers(other.directory)[0] != numbers(whole.directory)[0]


def test_a_kill_between_metrics_and_checkpoint_does_not_show(tmp_path, monkeypatch):
    whole, cut = start(tmp_path / "whole"), start(tmp_path / "cut")
    go(whole)
    write = runs.write_checkpoint
    calls = []

    def fail_at_third(*args):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        write(*args)

    monkeypatch.setattr(runs, "write_checkpoint", fail_at_third)
    with pytest.raises(MemoryError):
        go(cut)
    assert len(runs.open_run(cut.directory).metrics()) == 3
    assert runs.open_run(cut.directory).checkpoint()[1]["epoch"] == 2
    go(cut)
    assert_same(numbers(whole.directory), numbers(cut.directory))


SCRIPT = """
import sys
from pathlib import Path
from consilience.lab import runs
from consilience.lab.synthetic import settings_of
from consilience.lab.training import train
directory = Path(sys.argv[1])
run = runs.open_run(directory)
settings, method = settings_of(run)
train(directory, method, settings, run.seed)
"""


def test_a_run_killed_by_the_system_goes_on_bit_for_bit(tmp_path):
    long = replace(TINY, epochs=400)
    killed = start(tmp_path / "killed", "and-mask", long)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(killed.directory)])  # noqa: S603
    deadline = time.monotonic() + 60
    while not (killed.directory / runs.CHECKPOINT).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    run = runs.open_run(killed.directory)
    lines, known = len(run.metrics()), run.checkpoint()[1]["epoch"]
    assert 1 <= known <= lines <= known + 1 < 400
    # Compare the epochs after the kill with those of a run that was left alone.
    epochs = known + 3
    whole = start(tmp_path / "whole", "and-mask", long)

    class Enough(BaseException):
        pass

    def on_epoch(entry):
        if entry["epoch"] == epochs:
            raise Enough

    for job in (killed, whole):
        with pytest.raises(Enough):
            go(job, on_epoch=on_epoch)
    assert_same(numbers(whole.directory), numbers(killed.directory))


def test_a_finished_run_is_left_alone(tmp_path):
    job = start(tmp_path)
    summary = go(job)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in job.directory.iterdir()}
    assert go(job) == summary
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in job.directory.iterdir()} == before


def test_metrics_and_the_model_say_the_same(tmp_path):
    job = start(tmp_path, "and-mask", replace(TINY, threshold=0.5))
    summary = go(job)
    run = runs.open_run(job.directory)
    assert settings_of(run) == (job.settings, "and-mask")
    method, data = load(run)
    last = run.metrics()[-1]
    assert summary == {"epochs": 6, "stopped": None, "last": last}
    assert accuracy(method.model, data.train()) == last["train_accuracy"]
    assert accuracy(method.model, data.test(50)) == last["test_accuracy"]
    assert last["null_keep_rate"] == pytest.approx(10 / 16)
    assert 0 < last["kept"] < 1


def test_the_learning_rate_drops_where_it_should(tmp_path):
    job = start(tmp_path, settings=replace(TINY, epochs=8, drops=(0.5, 0.75)))
    go(job)
    rates = [entry["learning_rate"] for entry in runs.open_run(job.directory).metrics()]
    assert rates == pytest.approx([1e-2] * 4 + [1e-3] * 2 + [1e-4] * 2)


def test_the_stopping_rule_of_the_paper(tmp_path):
    easy = replace(TINY, dropout=0.0, rows_per_environment=256, epochs=40, revolutions=3)
    stopped = start(tmp_path / "stopped", settings=replace(easy, stop_memorizing=True))
    summary = go(stopped)
    metrics = runs.open_run(stopped.directory).metrics()
    held = [e["train_accuracy"] > 0.97 and e["test_accuracy"] < 0.6 for e in metrics]
    assert held == [False] * (len(metrics) - 1) + [True]
    assert "97%" in summary["stopped"]
    assert summary["epochs"] == len(metrics) < 40


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    wild = replace(TINY, optimizer="sgd", learning_rate=1e30)
    job = start(tmp_path, settings=wild)
    summary = go(job)
    assert summary["stopped"] == "the loss is not finite"
    assert summary["last"]["train_loss"] is None
    json.loads((job.directory / runs.DONE).read_text(), parse_constant=pytest.fail)
    assert go(job) == summary


def test_two_processes_do_not_share_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PATIENCE", 0.2)
    job = start(tmp_path)

    def on_epoch(entry):
        with pytest.raises(LabError, match="Another process is running"):
            go(job)

    go(job, on_epoch=on_epoch)


def test_waits_for_a_process_that_is_about_to_end(tmp_path):
    job = start(tmp_path)
    (job.directory / ".metrics.jsonl.1.part").write_text("half")
    with (job.directory / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        go(job)
    assert not list(job.directory.glob(".*.part"))


def test_a_run_that_another_process_finished_meanwhile_is_left_alone(tmp_path, monkeypatch):
    job = start(tmp_path)
    summary = go(job)
    before = {p: p.stat().st_mtime_ns for p in job.directory.iterdir()}
    answers = iter([None, summary])
    monkeypatch.setattr(runs.Run, "summary", lambda self: next(answers))
    assert go(job) == summary
    after = {p: p.stat().st_mtime_ns for p in job.directory.iterdir()}
    assert {p.name for p in before if before[p] != after[p]} <= {".lock"}


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    job = start(tmp_path)
    go(job)
    (job.directory / runs.DONE).unlink()
    wider = replace(job.settings, hidden_units=9)
    before = (job.directory / runs.METRICS).read_bytes()
    with pytest.raises(LabError, match=r"does not fit.*size mismatch.*Nothing was changed"):
        train(job.directory, job.method, wider, job.seed)
    assert (job.directory / runs.METRICS).read_bytes() == before


def test_the_random_state_of_the_caller_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    go(start(tmp_path))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
