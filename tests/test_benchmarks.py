"""The harness of the benchmarks: that it measures what it says, and that it runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.harness import Spread, in_turns, peak_bytes
from benchmarks.ways import FLOOR, OURS, WAYS, verify
from benchmarks.workloads import WORKLOADS

MEGABYTE = 2**20


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
