"""How hard to vary a solution is: scores, Hessian geometry and propositions."""

from consilience.consistency._ilc import ILC, Difference, ilc
from consilience.consistency._landscape import EnvironmentLoss, environment_losses
from consilience.consistency._means import (
    arithmetic_mean,
    determinant_bound,
    geometric_mean,
    log_determinant_ratio,
)
from consilience.consistency._quadratic import quadratic_inconsistency
from consilience.consistency._random_gradients import (
    MonteCarlo,
    decay_rate,
    expected_norm,
    norm_bound,
    simulate_norm,
)
from consilience.consistency._result import Inconsistency, Witness
from consilience.consistency._score import WitnessCheck, check_witness, inconsistency

__all__ = [
    "ILC",
    "Difference",
    "EnvironmentLoss",
    "Inconsistency",
    "MonteCarlo",
    "Witness",
    "WitnessCheck",
    "arithmetic_mean",
    "check_witness",
    "decay_rate",
    "determinant_bound",
    "environment_losses",
    "expected_norm",
    "geometric_mean",
    "ilc",
    "inconsistency",
    "log_determinant_ratio",
    "norm_bound",
    "quadratic_inconsistency",
    "simulate_norm",
]
