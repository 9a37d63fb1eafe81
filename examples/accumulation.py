"""Several backward passes, one apply: environments that do not fit into memory together.

    python examples/accumulation.py

Votes add up over observations as gradients do over backward passes. Sixteen environments in
micro-batches of four give the gradient that one batch of sixteen gives, to rounding.

The one thing to see to: **an environment must not straddle two observations**. Each observation
counts the environments in it, so one that comes in two parts votes twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from consilience import Agreement, AndMask, environment_mean

ENVIRONMENTS, ROWS, AT_A_TIME = 16, 8, 4


def gradients(at_a_time: int) -> tuple[list[torch.Tensor], float]:
    """Return what the rule makes of all environments, and how many of them voted."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(ENVIRONMENTS * ROWS, 10, generator=random, dtype=torch.float64)
    y = torch.randint(3, (ENVIRONMENTS * ROWS,), generator=random)
    env = torch.arange(ENVIRONMENTS).repeat_interleave(ROWS)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)).double()
    agreement = Agreement(model, AndMask(threshold=0.5))

    parts = ENVIRONMENTS // at_a_time
    for part in range(parts):
        here = (env // at_a_time) == part  # whole environments
        with agreement.observe(env[here]):
            losses = F.cross_entropy(model(x[here]), y[here], reduction="none")
            loss = environment_mean(losses, env[here]) / parts
        loss.backward()
    report = agreement.apply()
    return [parameter.grad for parameter in model.parameters()], report.voters


def main() -> None:
    whole, voters = gradients(at_a_time=ENVIRONMENTS)
    parts, voters_in_parts = gradients(at_a_time=AT_A_TIME)
    apart = max((a - b).abs().max().item() for a, b in zip(whole, parts, strict=True))
    print(f"one batch: {voters:g} voters; in parts of {AT_A_TIME}: {voters_in_parts:g} voters")
    print(f"largest difference of any component of the gradient: {apart:.1e}")


if __name__ == "__main__":
    main()
