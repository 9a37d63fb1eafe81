"""The harness of the benchmarks: that it measures what it says, and that it runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.harness import Spread, in_turns, peak_bytes
from benchmarks.ways import FLOOR, OURS, WAYS, verify
from benchmarks.workloads import WORKLOADS

from consilience import Agreement, AndMask

MEGABYTE = 2**20
ROOT = Path(__file__).parents[1]


def test_a_peak_counts_what_lives_at_once_and_not_what_came_before() -> None:
    held = torch.zeros(MEGABYTE)

    def one_after_the_other() -> None:
        for _ in range(3):
            torch.ones(MEGABYTE)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(MEGABYTE), torch.ones(MEGABYTE)

    assert peak_bytes(one_after_the_other) == 4 * MEGABYTE
    assert peak_bytes(both) == 8 * MEGABYTE
    assert len(held) == MEGABYTE


def test_ratios_are_taken_within_rounds_and_slow_steps_sit_out() -> None:
    steps = {"floor": lambda: time.sleep(0.001), "slow": lambda: time.sleep(0.01)}
    found = in_turns(steps, "floor", seconds=0.2, burst=0.001)
    assert found["floor"].ratio == (1.0, 1.0, 1.0)
    assert 3.0 < found["slow"].ratio.median < 12.0
    assert 3 <= found["slow"].samples <= found["floor"].samples


def test_a_spread_is_a_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == (3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)


def test_a_way_that_gives_another_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: object) -> object:
        step = WAYS[OURS].make(problem)

        def and_wrong() -> None:
            step()
            problem.parameters[0].grad.add_(1e-3)

        return and_wrong

    monkeypatch.setitem(WAYS, "wrong", type(WAYS[OURS])(wrong))
    with pytest.raises(AssertionError, match=r"wrong: \d+ components of 0.weight differ"):
        verify(WORKLOADS["mlp-128x1"], [OURS, "wrong"])


def test_the_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ways = [OURS, "forward and backward per environment", "Opacus"]
    command.main(["--quick", "--workloads", "mlp-128x1", "--ways", *ways, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "performance.json").read_text())
    (line,) = found["lines"]
    assert {FLOOR, OURS} <= line["ways"].keys()
    assert line["ways"].keys() | line["left_out"].keys() == {FLOOR, *ways}
    assert found["machine"]["versions"]["torch"] == torch.__version__
    assert (tmp_path / "performance.svg").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert report.table(found, 1) in printed


def wide() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10)), torch.randn(
        256, 1024
    )


def convolution() -> tuple[nn.Module, torch.Tensor]:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return nn.Sequential(nn.Conv2d(256, 512, 3), *head), torch.randn(256, 256, 3, 3)


@pytest.mark.parametrize("make", [wide, convolution])
def test_memory_does_not_depend_on_the_number_of_environments(make) -> None:
    """2.5 floats per parameter and 64 MB above an ordinary step, the first step included."""
    torch.manual_seed(0)
    model, x = make()
    parameters = sum(p.numel() for p in model.parameters())

    def ordinary() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def steps(environments: int) -> list[int]:
        agreement = Agreement(model, AndMask(0.5))
        env = torch.arange(environments).repeat_interleave(len(x) // environments)

        def step() -> None:
            model.zero_grad()
            with agreement.observe(env):
                loss = model(x).square().mean()
            loss.backward()
            agreement.apply()

        model.zero_grad()
        first = peak_bytes(step)
        model.zero_grad()
        agreement.clear()
        return [first, peak_bytes(step)]

    floor = peak_bytes(ordinary)
    few, many = steps(4), steps(256)
    for peak in (*few, *many):
        assert peak - floor <= 2.5 * 4 * parameters + 64 * MEGABYTE
    assert abs(few[1] - many[1]) <= 25 * MEGABYTE


def test_the_page_shows_what_was_measured() -> None:
    result = json.loads((ROOT / "docs/results/performance/performance.json").read_text())
    page = (ROOT / "docs/performance.md").read_text()
    assert report.table(result, 1) in page
    assert report.memory_table(result) in page
    both = json.loads((ROOT / "docs/results/performance/two-threads.json").read_text())
    assert report.table(both, 2) in page
    for line in (*result["lines"], *both["lines"]):
        assert line["ways"].keys() >= {FLOOR, OURS}
