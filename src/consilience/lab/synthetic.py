"""From settings to the data, the network and the method of a synthetic experiment."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from consilience.data import SyntheticMemorization
from consilience.lab.runs import Run
from consilience.lab.settings import Settings
from consilience.methods import DANN, ERM, IRM, Agreeing, Method, Penalty
from consilience.models import MLP
from consilience.rules import (
    AndMask,
    GeometricMean,
    MajoritySign,
    Mean,
    Rule,
    SandMask,
    SoftMask,
    XorMask,
)


def make_data(settings: Settings, seed: int) -> SyntheticMemorization:
    """Return the data of a run."""
    return SyntheticMemorization(
        environments=settings.environments,
        shortcut_dimensions=settings.shortcut_dimensions,
        rows_per_environment=settings.rows_per_environment,
        revolutions=settings.revolutions,
        shortcut_scale=settings.shortcut_scale,
        spiral_scale=settings.spiral_scale or None,
        seed=seed,
    )


def make_rule(name: str, settings: Settings) -> Rule:
    """Return a rule by the name of its method."""
    rescaling: dict[str, Any] = {
        "rescale": settings.rescale,
        "max_rescale": settings.max_rescale or None,
    }
    if name == "and-mask":
        return AndMask(settings.threshold, **rescaling)
    if name == "geometric-mean":
        return GeometricMean(settings.threshold, **rescaling)
    if name == "sand-mask":
        return SandMask(settings.threshold)
    if name == "soft-mask":
        return SoftMask(settings.threshold)
    if name == "xor-mask":
        return XorMask(settings.threshold)
    return {"majority-sign": MajoritySign, "mean": Mean}[name]()


def make_method(name: str, settings: Settings, seed: int) -> Method:
    """Return a method with a freshly drawn network and its optimizer."""
    generator = torch.Generator().manual_seed(seed)
    inputs = SyntheticMemorization.mechanism_dimensions + settings.shortcut_dimensions

    def network(inputs: int, outputs: int, hidden_layers: int) -> MLP:
        return MLP(
            inputs,
            outputs,
            hidden_units=settings.hidden_units,
            hidden_layers=hidden_layers,
            dropout=settings.dropout,
            batch_norm=settings.batch_norm,
            initial_bias=settings.initial_bias,
            generator=generator,
        )

    penalty = Penalty(settings.l1, settings.l2, settings.decay)
    if name == "dann":
        width = settings.hidden_units
        embedding = nn.Sequential(network(inputs, width, 1), nn.LeakyReLU())
        label = network(width, settings.outputs, 1)
        domain = network(width, settings.environments, 1)
        parameters = [p for part in (embedding, label, domain) for p in part.parameters()]
        return DANN(
            embedding,
            label,
            domain,
            make_optimizer(settings, parameters),
            penalty,
            domain_weight=settings.domain_weight,
        )
    model = network(inputs, settings.outputs, settings.hidden_layers)
    optimizer = make_optimizer(settings, list(model.parameters()))
    if name == "erm":
        return ERM(model, optimizer, penalty)
    if name == "irm":
        return IRM(
            model,
            optimizer,
            penalty,
            penalty_weight=settings.penalty_weight,
            annealing_steps=settings.annealing_steps,
        )
    return Agreeing(model, optimizer, make_rule(name, settings), penalty)


def make_optimizer(settings: Settings, parameters: list[nn.Parameter]) -> Optimizer:
    """Return the optimizer. Penalties on weights are the method's, not its own."""
    if settings.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=settings.learning_rate)
    return torch.optim.SGD(parameters, lr=settings.learning_rate, momentum=0.9)


def load(run: Run) -> tuple[Method, SyntheticMemorization]:
    """Return the method and the data of a run, its modules as of the last finished epoch.

    Example:
        >>> run = open_run(Path("runs/synthetic/and-mask seed=0"))  # doctest: +SKIP
        >>> method, data = load(run)  # doctest: +SKIP
        >>> method.model(data.test().x).argmax(1)  # doctest: +SKIP
    """
    settings, method_name = settings_of(run)
    method = make_method(method_name, settings, run.seed)
    found = run.checkpoint()
    if found is not None:
        tensors, _ = found
        for name, module in method.modules().items():
            module.load_state_dict(
                {k[len(name) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{name}.")}
            )
    method.model.eval()
    return method, make_data(settings, run.seed)


def settings_of(run: Run) -> tuple[Settings, str]:
    """Return the settings of a run and its method; what the method does not read is at default."""
    given = run.settings
    method = str(given.pop("method"))
    known = {field.name for field in fields(Settings)}
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in known
    }
    return Settings(**values), method
