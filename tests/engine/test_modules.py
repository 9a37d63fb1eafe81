"""Each awkward module is counted exactly, or refused; never counted wrongly in silence."""

from __future__ import annotations

from typing import Any

import pytest

from engine.modules import CASES, Case, Raises
from oracle import SINGLE, check


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
    def observed_step() -> None:
        check(
            case.build,
            case.batch,
            env,
            rows=rows,
            loss=case.loss,
            oracle=case.oracle,
            dims=case.dims,
            strict_zeros=case.strict_zeros,
            coarser=SINGLE if case.single else 1.0,
            observe=case.observe,
            **case.options,
        )

    if isinstance(case.outcome, Raises):
        with pytest.raises(RuntimeError, match=case.outcome.match):
            observed_step()
    else:
        observed_step()


def test_there_are_enough_cases_and_their_names_differ() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 60
