"""Rules: pure functions from a tally to the gradient that the optimizer sees."""

from consilience.rules._and_mask import AndMask
from consilience.rules._geometric_mean import GeometricMean
from consilience.rules._majority_sign import MajoritySign
from consilience.rules._mean import Mean
from consilience.rules._rule import Rule
from consilience.rules._sand_mask import SandMask
from consilience.rules._soft_mask import SoftMask
from consilience.rules._tally import Statistic, Tally
from consilience.rules._threshold import null_keep_rate, quorum
from consilience.rules._xor_mask import XorMask

__all__ = [
    "AndMask",
    "GeometricMean",
    "MajoritySign",
    "Mean",
    "Rule",
    "SandMask",
    "SoftMask",
    "Statistic",
    "Tally",
    "XorMask",
    "null_keep_rate",
    "quorum",
]
