"""What the report reads from runs, and what it says of them."""

import base64
import errno
import io
import math
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from consilience.lab import runs
from consilience.lab.errors import LabError
from consilience.lab.report import _page, _svg, write_report
from consilience.lab.report._planes import PIXELS, learned, planes
from consilience.lab.report.readings import Curves, Spread, flat, groups, read
from consilience.lab.synthetic import make_data
from made_runs import TINY, make_run

MECHANISM = torch.tensor([-1.0, 0, 0, 0, 0, 0, 0, 0])
"""Weights of a network that reads the mechanism: class 1 lies at the left."""


def shortcut(seed=0):
    """Weights of a network that reads the signatures of all four environments, and not the rest."""
    signatures = torch.from_numpy(make_data(TINY, seed).signatures()).float()
    return torch.cat([torch.zeros(2), torch.linalg.pinv(signatures).sum(1)])


@pytest.fixture
def mixed(tmp_path):
    """Two methods of two seeds, and one run of each kind of trouble."""
    for seed in (0, 1):
        make_run(tmp_path, "and-mask", seed=seed, weight=MECHANISM, test_accuracy=0.99 + seed / 100)
        make_run(tmp_path, "erm", seed=seed, weight=shortcut(seed), test_accuracy=0.5)
    make_run(tmp_path, "erm", seed=2, epochs=2, done=False)
    make_run(tmp_path, "erm", seed=3, last={"train_loss": math.nan})
    (make_run(tmp_path, "erm", seed=4).path / runs.METRICS).write_text("no metrics\n")
    (make_run(tmp_path, "erm", seed=5).path / runs.CONFIG).write_text("{")
    (make_run(tmp_path, "erm", seed=6).path / runs.DONE).write_text("[]")
    (make_run(tmp_path, "erm", seed=7).path / runs.CHECKPOINT).unlink()
    (make_run(tmp_path, "erm", seed=8).path / runs.CONFIG).unlink()
    (make_run(tmp_path, "erm", seed=9).path / runs.CHECKPOINT).write_bytes(b"no tensors")
    (make_run(tmp_path, "erm", seed=10).path / runs.METRICS).unlink()
    return tmp_path


def test_each_kind_of_trouble_has_its_name(mixed):
    found = {r.path.name: (r.status, r.why) for r in read(mixed)}
    status = {name: status for name, (status, _) in found.items()}
    assert status == {
        "and-mask_seed=0": "finished",
        "and-mask_seed=1": "finished",
        "erm_seed=0": "finished",
        "erm_seed=1": "finished",
        "erm_seed=2": "unfinished",
        "erm_seed=3": "failed",
        "erm_seed=4": "damaged",
        "erm_seed=5": "damaged",
        "erm_seed=6": "damaged",
        "erm_seed=7": "damaged",
        "erm_seed=8": "damaged",
        "erm_seed=9": "finished",  # its curves are whole; only its network is lost
        "erm_seed=10": "damaged",
    }
    assert "2 of 5 epochs" in found["erm_seed=2"][1]
    assert "not finite: from epoch 5" in found["erm_seed=3"][1]
    assert all(why for state, why in found.values() if state != "finished")


def test_a_run_that_stopped_early_says_why(tmp_path):
    run = make_run(tmp_path, epochs=3)
    runs.mark_done(run.path, {"epochs": 3, "stopped": "it memorized", "last": {}})
    (reading,) = read(tmp_path)
    assert (reading.status, reading.why) == ("finished", "Stopped early: it memorized.")


def test_reads_all_runs_an_experiment_or_one(tmp_path):
    runs_made = [make_run(tmp_path, seed=seed) for seed in (0, 1)]
    assert len(read(tmp_path)) == len(read(tmp_path / "synthetic")) == 2
    assert [r.run.seed for r in read(runs_made[1].path)] == [1]


def test_nothing_to_read_says_what_to_do(tmp_path):
    with pytest.raises(LabError, match=r"no run below .*`consilience run synthetic"):
        read(tmp_path)
    with pytest.raises(LabError, match="no directory"):
        write_report(tmp_path / "nowhere")


def test_runs_of_one_label_are_one_group_in_the_order_of_seeds(tmp_path):
    for seed in (10, 2, 1):
        make_run(tmp_path, seed=seed)
    make_run(tmp_path, label="erm l2=0")
    found = groups(read(tmp_path))
    assert [(g.label, [r.run.seed for r in g.readings]) for g in found] == [
        ("erm", [1, 2, 10]),
        ("erm l2=0", [0]),
    ]
    assert "seed" not in found[0].settings


def test_unfinished_runs_are_drawn_and_not_counted(tmp_path):
    make_run(tmp_path, seed=0, test_accuracy=0.6)
    make_run(tmp_path, seed=1, test_accuracy=1.0, epochs=4, done=False)
    (group,) = groups(read(tmp_path))
    assert group.spread("test_accuracy") == Spread(0.6, None, 0.6, 0.6, 1)
    assert group.curves("test_accuracy").each.shape == (2, 5)
    assert np.isnan(group.curves("test_accuracy").each[1]).tolist() == [False] * 4 + [True]


@pytest.mark.parametrize(("tests", "median"), [([0.9, 0.1, 0.5], 2), ([0.1, 0.2, 0.3, 0.4], 1)])
def test_the_median_run(tmp_path, tests, median):
    for seed, test in enumerate(tests):
        make_run(tmp_path, seed=seed, test_accuracy=test)
    (group,) = groups(read(tmp_path))
    assert group.median().run.seed == median


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=9))
def test_spread(values):
    found = [v for v in values if v is not None]
    spread = Spread.of(values)
    if not found:
        assert spread is None
        return
    assert (spread.low, spread.high, spread.count) == (min(found), max(found), len(found))
    assert spread.mean == pytest.approx(statistics.fmean(found), abs=1e-12)
    if len(found) == 1:
        assert spread.deviation is None
    else:
        assert spread.deviation == pytest.approx(statistics.stdev(found), abs=1e-12)


@given(st.lists(st.lists(st.one_of(st.just(math.nan), st.floats(0, 1)), min_size=4, max_size=4)))
def test_curves_over_seeds(rows):
    each = np.array(rows).reshape(-1, 4)
    means, lows, highs = Curves(np.arange(1, 5), each).over_seeds()
    for column, mean, low, high in zip(each.T, means, lows, highs, strict=True):
        there = [v for v in column.tolist() if not math.isnan(v)]
        if there:
            assert mean == pytest.approx(statistics.fmean(there), abs=1e-12)
            assert (low, high) == (min(there), max(there))
        else:
            assert math.isnan(mean)
            assert math.isnan(low)
            assert math.isnan(high)


def test_settings_within_settings_are_flattened():
    assert flat({"a": {"b": {"c": 1}}, "d": {}, "e": [2]}) == {"a.b.c": 1, "d": {}, "e": [2]}


def test_what_a_network_listens_to(tmp_path):
    found = learned(make_run(tmp_path, weight=MECHANISM))
    assert found.mechanism == 1.0
    assert abs(found.shortcuts - 0.5) < 0.15
    found = learned(make_run(tmp_path, seed=1, weight=shortcut(1)))
    assert found.shortcuts == 1.0
    assert abs(found.mechanism - 0.5) < 0.15


def at(plane, x, y):
    """What a plane shows at a point."""
    row = round((1 - y / plane.extent) / 2 * (PIXELS - 1))
    column = round((1 + x / plane.extent) / 2 * (PIXELS - 1))
    return plane.chance_of_one[row, column]


def test_planes_of_a_network_that_reads_the_mechanism(tmp_path):
    bare, carrying, *signatures = planes(make_run(tmp_path, weight=5 * MECHANISM))
    for plane in (bare, carrying):
        assert at(plane, -1, 0) > 0.99
        assert at(plane, 1, 0) < 0.01
        wrong = [(x, y) for x, y, label in plane.marks if (at(plane, x, y) > 0.5) != label]
        assert not wrong
    assert len(signatures) == 2
    assert (signatures[0].chance_of_one < 0.5).all()  # the mechanism is of class 0
    assert (signatures[1].chance_of_one > 0.5).all()


def test_planes_of_a_network_that_reads_shortcuts(tmp_path):
    bare, carrying, *signatures = planes(make_run(tmp_path, weight=5 * shortcut()))
    assert np.allclose(bare.chance_of_one, 0.5)
    assert (carrying.chance_of_one > 0.5).all()  # the shortcut is of class 1
    for plane in signatures:
        assert [label for _, _, label in plane.marks] == [1, 0, 1, 0]
        for x, y, label in plane.marks:
            assert (at(plane, x, y) > 0.5) == label


def test_up_is_up_on_a_plane(tmp_path):
    weight = torch.zeros(8)
    weight[1] = 5.0
    bare, *_ = planes(make_run(tmp_path, weight=weight))
    assert at(bare, 0, 1) > 0.99
    assert at(bare, 0, -1) < 0.01


@pytest.mark.parametrize(
    ("changes", "count"),
    [({"shortcut_dimensions": 0}, 1), ({"shortcut_dimensions": 1}, 2), ({"environments": 2}, 3)],
)
def test_planes_that_the_data_has_no_room_for_are_left_out(tmp_path, changes, count):
    assert len(planes(make_run(tmp_path, settings=replace(TINY, **changes)))) == count


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("method", ["erm", "and-mask", "irm", "dann"])
def test_networks_of_every_method_are_read(tmp_path, method, outputs):
    run = make_run(tmp_path, method, settings=replace(TINY, outputs=outputs, hidden_layers=1))
    assert 0 <= learned(run).mechanism <= 1
    assert all(np.isfinite(plane.chance_of_one).all() for plane in planes(run))


def test_the_image_of_a_decision_is_a_png():
    chance = np.array([[0.0, 0.5], [0.75, 1.0]])
    address = _svg.decision(chance)
    head, _, body = address.partition(",")
    assert head == "data:image/png;base64"
    image = (255 * imread(io.BytesIO(base64.b64decode(body)), format="png")).round().astype(int)
    assert image.shape == (2, 2, 4)
    assert image[0, 0].tolist() == [*_svg.COOL, 235]
    assert image[0, 1, 3] == 0
    assert image[1, 1].tolist() == [*_svg.WARM, 235]
    assert image[1, 0].tolist()[:3] == list(_svg.WARM)
    assert 0 < image[1, 0, 3] < 235


@given(st.floats(1e-12, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_axis_of_shares_keeps_order_and_has_a_place_for_zero(lowest, a, b):
    axis = _svg.share_axis(lowest)
    assert axis.place(0.0) == 0.0
    assert axis.place(1.0) == 1.0
    assert axis.place(lowest) > 0
    assert a > b or axis.place(a) <= axis.place(b)
    places = [axis.place(value) for value, _ in axis.ticks]
    assert all(0 <= place <= 1 for place in places)


def test_a_curve_of_one_epoch_and_one_without_values_can_be_drawn():
    axis = _svg.accuracy_axis(0.5)
    one = _svg.Series("test", "test", Curves(np.array([1]), np.array([[0.7], [0.9]])))
    none = _svg.Series("train", "train", Curves(np.array([1]), np.array([[math.nan]])))
    drawn = _svg.curves([one, none], axis, level=None, what="it")
    assert 'd="M' in drawn
    assert "nan" not in drawn
    empty = Curves(np.arange(0), np.zeros((0, 0)))
    assert "No epoch" in _svg.curves([_svg.Series("a", "b", empty)], axis, level=None, what="it")


def test_long_curves_are_thinned_and_keep_both_ends():
    picked = _svg._thin(5000)
    assert len(picked) == _svg.MOST_POINTS
    assert (picked[0], picked[-1]) == (0, 4999)


@pytest.mark.parametrize(
    ("train", "test", "word"),
    [
        (1.0, 0.99, "the mechanism"),
        (1.0, 0.7, "part of the mechanism"),
        (1.0, 0.5, "shortcuts"),
        (0.5, 0.5, "nothing"),
    ],
)
def test_what_was_found_in_a_word(train, test, word):
    one = Spread.of([train]), Spread.of([test])
    assert _page.found(*one, 0.5)[0] == word


def test_the_page_tells_what_came_out_and_what_went_wrong(mixed):
    path = write_report(mixed)
    assert path == mixed / "report.html"
    text = path.read_text()
    words = re.sub(r"<[^>]+>", "", text.split("</header>")[1])
    assert (
        "and-mask is right on 100% of its training rows and on 99.5% of test rows (mean of 2 "
        "seeds), whose shortcuts tell nothing: it learned the mechanism."
    ) in words
    assert "it learned shortcuts" in words
    damaged = text.split("Damaged and failed runs")[1].split("</div>")[0]
    for seed in (3, 4, 5, 6, 7, 8, 9, 10):
        assert f"erm_seed={seed}" in damaged
    assert "<ul><li>erm: seed 2 (2 of 5 epochs)</li></ul>" in text.split("Not finished")[1]
    # ERM counts seeds 0, 1, 3 and 9 of the nine whose configuration can be read.
    row = text.split('<th scope="row">erm</th>')[1].split("</tr>")[0]
    assert "<td>4/9</td>" in row


def test_the_page_needs_nothing_but_itself(mixed):
    text = write_report(mixed).read_text()
    assert not re.findall(r"https?://", text)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', text)) == {"", "data:,", *images(text)}
    assert images(text)
    assert "@import" not in text
    assert "url(" not in text
    assert f'content="{_page.POLICY}"' in text


def images(text):
    return set(re.findall(r'href="(data:image/png;base64,[^"]+)"', text))


def test_the_same_runs_give_the_same_page(mixed):
    first = write_report(mixed).read_bytes()
    assert write_report(mixed).read_bytes() == first


def test_names_that_look_like_markup_are_shown_as_text(tmp_path):
    make_run(tmp_path, label="<script>alert(1)<|script>", command='run --name "<b>&"')
    text = write_report(tmp_path).read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<pre>run --name &quot;&lt;b&gt;&amp;&quot;</pre>" in text


def test_a_large_search_shows_the_best_and_lists_all(tmp_path):
    for i in range(30):
        make_run(tmp_path, label=f"search erm {i:02}", test_accuracy=0.5 + i / 100)
    text = write_report(tmp_path).read_text()
    assert text.count('<figure class="panel">') == _page.MOST_PANELS
    assert text.count('<div class="learned">') == _page.MOST_PLANES
    assert "Shown: 24 of 30 configurations" in text
    table = text.split('<table class="results">')[1].split("</table>")[0]
    names = re.findall(r"search erm (\d+)", table)
    assert names == [f"{i:02}" for i in reversed(range(30))]  # the best first, and all of them


def test_only_unfinished_runs_make_a_page_too(tmp_path):
    make_run(tmp_path, epochs=0, done=False)
    text = write_report(tmp_path, tmp_path / "there" / "page.html").read_text()
    assert "No run is finished yet" in text
    assert not (tmp_path / "report.html").exists()


def test_what_is_not_finished_comes_last(tmp_path):
    make_run(tmp_path, label="a late one", epochs=2, done=False)
    make_run(tmp_path, label="chance", test_accuracy=0.5)
    make_run(tmp_path, label="the best", test_accuracy=0.9)
    table = write_report(tmp_path).read_text().split('<table class="results">')[1]
    assert re.findall(r'<th scope="row">([^<]+)', table)[:3] == ["the best", "chance", "a late one"]


def test_unfinished_runs_are_named_by_label(tmp_path):
    for seed, epochs in enumerate([0, 3, 2, 1]):
        make_run(tmp_path, seed=seed, epochs=epochs, done=False)
    for seed in (4, 7):
        make_run(tmp_path, label="two", seed=seed, epochs=1, done=False)
    text = write_report(tmp_path).read_text()
    assert "<li>erm: seeds 0 to 3 (0 to 3 of 5 epochs)</li>" in text
    assert "<li>two: seeds 4, 7 (1 of 5 epochs)</li>" in text


def test_where_nothing_beats_guessing_the_headline_says_so(tmp_path):
    make_run(tmp_path, test_accuracy=0.51)
    text = re.sub(r"<[^>]+>", "", write_report(tmp_path).read_text().split("</header>")[1])
    assert "At best, by erm, a network is right on 51.0% of test rows (one seed); guessing" in text
    assert "whose shortcuts tell nothing" not in text


def test_runs_of_another_experiment_have_curves_and_no_planes(tmp_path):
    run = make_run(tmp_path)
    config = {**run.config, "experiment": "other"}
    runs.write_json(run.path / runs.CONFIG, config)
    text = write_report(tmp_path).read_text()
    assert 'class="chart"' in text
    assert 'class="learned"' not in text


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path, monkeypatch):
    make_run(tmp_path)
    before = write_report(tmp_path).read_bytes()
    make_run(tmp_path, seed=1)

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("consilience.lab.runs.os.fsync", full)
    with pytest.raises(LabError, match="disk is full"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert not list(tmp_path.glob(".*part"))


def test_settings_in_a_label_are_set_apart(tmp_path):
    make_run(tmp_path, label="erm l2=0 drops=<b>")
    text = write_report(tmp_path).read_text()
    assert '<th scope="row">erm <span class="changed">l2=0 drops=&lt;b&gt;</span></th>' in text
    assert _page._name("search erm trial=003").startswith("search erm <span")
    assert _page._name("mine") == "mine"


@given(st.floats(0, 1))
def test_what_is_not_all_does_not_look_like_all(share):
    assert _svg.percent(share).startswith("100") == (share == 1)
