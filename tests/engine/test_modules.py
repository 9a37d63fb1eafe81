"""Each awkward module is counted exactly, or refused; never counted wrongly in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.modules import CASES, Case, Raises
from oracle import SINGLE, check, observe_once


def layouts(case: Case) -> dict[str, tuple[Any, int]]:
    """Return labels and numbers of rows to try a case with."""
    each_row = {f"{rows} rows, each its own": (None, rows) for rows in case.rows}
    labelled = {
        f"{len(env)} rows of {len(set(env) - {-1})}": (env, len(env)) for env in case.labels
    }
    return {**each_row, **labelled}


RUNS = [
    pytest.param(case, env, rows, id=f"{case.name} | {text}")
    for case in CASES
    for text, (env, rows) in layouts(case).items()
]


@pytest.mark.parametrize(("case", "env", "rows"), RUNS)
def test_module(case: Case, env: Any, rows: int) -> None:
    how: dict[str, Any] = {"dims": case.dims, "observe": case.observe, **case.options}
    if isinstance(case.outcome, Raises):
        torch.manual_seed(0)
        model = case.build().double()
        batch = case.batch(rows, torch.Generator().manual_seed(1))
        with pytest.raises(RuntimeError, match=case.outcome.match):
            observe_once(lambda: model, case.loss, batch, env, **how)
    else:
        check(
            case.build,
            case.batch,
            env,
            rows=rows,
            loss=case.loss,
            oracle=case.oracle,
            strict_zeros=case.strict_zeros,
            coarser=SINGLE if case.single else 1.0,
            **how,
        )


def test_there_are_enough_cases_and_their_names_differ() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 60
