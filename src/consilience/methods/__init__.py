"""What can be compared: ERM and its regularizers, AND-mask, IRM, DANN."""

from consilience.methods._method import Method, Penalty, Step, losses, predictions
from consilience.methods.agreeing import Agreeing
from consilience.methods.dann import DANN
from consilience.methods.erm import ERM
from consilience.methods.irm import IRM, irm_penalty

__all__ = [
    "DANN",
    "ERM",
    "IRM",
    "Agreeing",
    "Method",
    "Penalty",
    "Step",
    "irm_penalty",
    "losses",
    "predictions",
]
