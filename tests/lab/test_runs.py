import errno
import json
from pathlib import Path

import pytest
import torch

from consilience.lab import runs
from consilience.lab.errors import LabError, nearest

CONFIG = {
    "experiment": "synthetic",
    "label": "erm",
    "seed": 3,
    "settings": {"method": "erm", "drops": (0.5, 0.75), "l2": 0.1},
    "command": "consilience run synthetic",
    "versions": {},
    "commit": None,
}


def entry(epoch, **changes):
    numbers = {
        "train_accuracy": 0.9,
        "test_accuracy": 0.5,
        "train_loss": 0.1,
        "kept": 1.0,
        "null_keep_rate": None,
        "seconds": 0.2,
    }
    return {"epoch": epoch, **numbers, **changes}


@pytest.fixture
def run(tmp_path):
    return runs.write_config(tmp_path / "synthetic" / "erm_seed=3", CONFIG)


def test_what_is_written_is_read(run, tmp_path):
    for epoch in (1, 2):
        runs.append_metrics(run.path, entry(epoch))
    weights = {"model.w": torch.arange(3.0), "random": torch.get_rng_state()}
    runs.write_checkpoint(run.path, weights, {"epoch": 2})
    runs.mark_done(run.path, {"epochs": 2, "stopped": None, "last": entry(2)})
    (found,) = runs.find_runs(tmp_path)
    assert (found.experiment, found.label, found.seed, found.done) == ("synthetic", "erm", 3, True)
    assert found.settings == {"method": "erm", "drops": [0.5, 0.75], "l2": 0.1}
    assert found.metrics() == [entry(1), entry(2)]
    assert found.summary()["epochs"] == 2
    tensors, notes = found.checkpoint()
    assert notes == {"epoch": 2}
    assert torch.equal(tensors["random"], weights["random"])
    assert torch.equal(found.model_state()["w"], torch.arange(3.0))
    assert {path.name for path in run.path.iterdir()} == {
        runs.CONFIG,
        runs.METRICS,
        runs.CHECKPOINT,
        runs.DONE,
    }


def test_a_fresh_run_has_nothing_yet(run):
    assert (run.metrics(), run.checkpoint(), run.model_state(), run.summary()) == (
        [],
        None,
        None,
        None,
    )
    assert not run.done


def test_numbers_that_are_not_finite_become_null(run):
    runs.append_metrics(run.path, entry(1, train_loss=float("nan")))
    assert run.metrics()[0]["train_loss"] is None


def test_the_same_configuration_opens_the_same_run(run):
    again = runs.write_config(run.path, {**CONFIG, "command": "another", "commit": "abc"})
    assert again.config["command"] == "consilience run synthetic"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, "`seed` is 3 there and 4 here"),
        ({"experiment": "cifar"}, "`experiment` is 'synthetic' there"),
        ({"settings": {**CONFIG["settings"], "l2": 0.2}}, "`l2` is 0.1 there and 0.2 here"),
        ({"settings": {"method": "erm"}}, "`drops` is .* there and None here"),
    ],
)
def test_another_configuration_is_refused(run, change, words):
    before = (run.path / runs.CONFIG).read_bytes()
    with pytest.raises(LabError, match=words):
        runs.write_config(run.path, {**CONFIG, **change})
    assert (run.path / runs.CONFIG).read_bytes() == before


def test_half_a_last_line_is_left_out_and_trimmed(run):
    runs.append_metrics(run.path, entry(1))
    with (run.path / runs.METRICS).open("a") as file:
        file.write('{"epoch": 2, "train_acc')
    assert run.metrics() == [entry(1)]
    runs.trim_metrics(run.path, 1)
    runs.append_metrics(run.path, entry(2))
    assert run.metrics() == [entry(1), entry(2)]


def test_trim_drops_what_the_checkpoint_does_not_know(run):
    for epoch in (1, 2, 3):
        runs.append_metrics(run.path, entry(epoch))
    runs.trim_metrics(run.path, 2)
    assert run.metrics() == [entry(1), entry(2)]
    with pytest.raises(LabError, match="has 2 lines and the checkpoint knows 5 epochs"):
        runs.trim_metrics(run.path, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"nonsense\n", "line 1 is no JSON"),
        (b"[1]\n", "line 1 is no object"),
        (json.dumps({"epoch": 1}).encode() + b"\n", "line 1: it has no `train_accuracy`"),
        (json.dumps(entry(1, seconds="2")).encode() + b"\n", 'line 1: `seconds` is "2"'),
        (json.dumps(entry(1, kept=None)).encode() + b"\n", "line 1: `kept` is null"),
        (json.dumps(entry(2)).encode() + b"\n", "line 1 is of epoch 2"),
        (b"\xff\xfe\n", "it is no text"),
    ],
)
def test_damaged_metrics_are_named(run, content, words):
    (run.path / runs.METRICS).write_bytes(content)
    with pytest.raises(LabError, match=f"metrics.jsonl` is damaged: {words}.*Nothing was changed"):
        run.metrics()
    assert (run.path / runs.METRICS).read_bytes() == content


def test_a_damaged_checkpoint_is_named(run):
    runs.write_checkpoint(run.path, {"model.w": torch.ones(10)}, {"epoch": 1})
    path = run.path / runs.CHECKPOINT
    whole = path.read_bytes()
    for damaged in (b"", b"x" * 100, whole[:-4], whole.replace(b"notes", b"nates")):
        path.write_bytes(damaged)
        with pytest.raises(LabError, match=r"checkpoint\.safetensors` is damaged"):
            run.checkpoint()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"format": 1}', "\x00\x01"])
def test_a_damaged_configuration_is_named(run, content):
    (run.path / runs.CONFIG).write_text(content)
    with pytest.raises(LabError, match=r"config\.json` is damaged"):
        runs.open_run(run.path)


@pytest.mark.parametrize("key", runs.CONFIG_KEYS)
def test_a_configuration_with_a_wrong_value_is_damaged(run, key):
    whole = json.loads((run.path / runs.CONFIG).read_text())
    (run.path / runs.CONFIG).write_text(json.dumps({**whole, key: [1]}))
    with pytest.raises(LabError, match="has format" if key == "format" else rf"`{key}` is \[1\]"):
        runs.open_run(run.path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "it has no `epochs`"),
        ('{"epochs": 1, "stopped": 0, "last": {}}', "`stopped` is 0"),
        ('{"epochs": 1, "stopped": null}', "it has no `last`"),
    ],
)
def test_a_damaged_done_mark_is_named(run, content, words):
    (run.path / runs.DONE).write_text(content)
    with pytest.raises(LabError, match=rf"done\.json` is damaged: {words}"):
        run.summary()


@pytest.mark.parametrize("name", [runs.METRICS, runs.DONE])
def test_a_folder_in_place_of_a_file_is_named(run, name):
    (run.path / name).mkdir()
    with pytest.raises(LabError, match=rf"{name}` is damaged: .*directory"):
        run.metrics(), run.summary()


def test_other_formats_and_other_directories_are_refused(run, tmp_path):
    config = json.loads((run.path / runs.CONFIG).read_text())
    (run.path / runs.CONFIG).write_text(json.dumps({**config, "format": 99}))
    with pytest.raises(LabError, match="has format 99"):
        runs.open_run(run.path)
    with pytest.raises(LabError, match="no run directory"):
        runs.open_run(tmp_path)
    with pytest.raises(LabError, match="There is no directory"):
        runs.find_runs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "disk is full.*Make room"), (errno.EACCES, "could not be written.*--runs DIR")],
)
def test_a_full_disk_keeps_what_was_there(run, monkeypatch, code, words):
    runs.write_checkpoint(run.path, {"model.w": torch.ones(2)}, {"epoch": 1})
    before = {p.name: p.read_bytes() for p in run.path.iterdir()}

    def refuse(self, target):
        raise OSError(code, "refused")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(LabError, match=words):
        runs.write_checkpoint(run.path, {"model.w": torch.zeros(2)}, {"epoch": 2})
    assert {p.name: p.read_bytes() for p in run.path.iterdir()} == before


def test_nearest_names():
    assert nearest("xor", ["erm"]) == ""
    assert nearest("and_mask", ["and-mask", "erm"]) == " Did you mean `and-mask`?"
