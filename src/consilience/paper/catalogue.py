"""Every figure and table that `consilience figure` can make, by name. Imports nothing heavy.

`python -m consilience.paper.catalogue` prints docs/figures.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A figure or table of the paper (or beyond it) and where it is made.

    Attributes:
        name: What one types after `consilience figure`.
        module: The module that has `draw(folder: Path, *, quick: bool = False) -> list[Path]`,
            which returns the files that it wrote.
        title: What it shows, in a line.
        source: Where it stands in the paper.
        cost: What it takes on two cores, in words.
        runs: The command that trains what it draws, or nothing. Where there is one, `draw` also
            takes `runs: Path`, the folder of `--runs`.
    """

    name: str
    module: str
    title: str
    source: str
    cost: str
    runs: str = ""


THEORY: tuple[Entry, ...] = (
    Entry(
        name="landscapes",
        module="consilience.paper.landscapes",
        title="Two landscapes, their means, and where descent ends on each",
        source="figure 1",
        cost="seconds",
    ),
    Entry(
        name="gradient-directions",
        module="consilience.paper.gradient_directions",
        title="Inconsistent gradient directions, and consistent ones",
        source="figure 2",
        cost="seconds",
    ),
    Entry(
        name="region",
        module="consilience.paper.region",
        title="The region that an environment holds for as good as a minimum, and the score",
        source="section 2.1",
        cost="seconds",
    ),
    Entry(
        name="hessian-ellipses",
        module="consilience.paper.hessian_ellipses",
        title="Contours of the arithmetic and the geometric mean of two Hessians",
        source="figures 3 and 12",
        cost="seconds",
    ),
    Entry(
        name="random-gradients",
        module="consilience.paper.random_gradients",
        title="Averaged and masked gradients where there is nothing to learn",
        source="figure 4, proposition 2",
        cost="half a minute",
    ),
    Entry(
        name="patchwork",
        module="consilience.paper.patchwork",
        title="A patchwork network, its parameters varied, and its score",
        source="figure 10",
        cost="half a minute",
    ),
    Entry(
        name="hessian-means",
        module="consilience.paper.hessian_means",
        title="Arithmetic and geometric mean of ever less consistent surfaces",
        source="figure 11",
        cost="seconds",
    ),
    Entry(
        name="convergence",
        module="consilience.paper.convergence",
        title="The smallest masked gradient met, against the bound of 1/k",
        source="proposition 1",
        cost="half a minute",
    ),
    Entry(
        name="linear-regression",
        module="consilience.paper.linear_regression",
        title="Linear regression: how every weight evolves, rule by rule",
        source="the authors' notebook",
        cost="seconds",
    ),
)
SYNTHETIC: tuple[Entry, ...] = (
    Entry(
        name="dataset",
        module="consilience.paper.dataset",
        title="The synthetic dataset in four dimensions, with the oracles' boundaries",
        source="figure 5",
        cost="seconds",
    ),
    Entry(
        name="results",
        module="consilience.paper.results",
        title="Train and test accuracy by method, every seed",
        source="figure 6",
        cost="seconds, once the runs are there",
        runs="consilience run synthetic --method and-mask erm --seeds 10",
    ),
    Entry(
        name="correlations",
        module="consilience.paper.correlations",
        title="What AND- and XOR-masks keep of mechanism and shortcuts, against the threshold",
        source="figure 7",
        cost="half a minute",
    ),
    Entry(
        name="spirals",
        module="consilience.paper.spirals",
        title="The spirals of both presets",
        source="figure 13",
        cost="seconds",
    ),
    Entry(
        name="learning-curves",
        module="consilience.paper.learning_curves",
        title="Learning curves of all methods",
        source="figure 14",
        cost="seconds, once the runs are there",
        runs="consilience run synthetic --method and-mask erm --seeds 10",
    ),
    Entry(
        name="environments",
        module="consilience.paper.environments",
        title="Number of training environments against test accuracy",
        source="figure 15",
        cost="seconds, once the runs are there",
        runs=(
            "consilience run synthetic --method and-mask erm --environments 64 "
            "--environments-per-batch 32 --stop-memorizing --seeds 5"
        ),
    ),
)
CONSISTENCY: tuple[Entry, ...] = (
    Entry(
        name="consistency",
        module="consilience.paper.consistency",
        title="Inconsistency scores of trained networks, with witnesses, every seed",
        source="equation 1, on the synthetic dataset",
        cost="eleven minutes for 21 runs, once they are there",
        runs="consilience run synthetic --method and-mask geometric-mean erm --seeds 10",
    ),
)

TEMPORAL: tuple[Entry, ...] = (
    Entry(
        name="temporal",
        module="consilience.paper.temporal",
        title="One environment a step: masks over time against Adam, every seed",
        source="algorithm 1, on the synthetic dataset",
        cost="seconds, once the runs are there",
        runs="python -m consilience.paper.temporal --seeds 3",
    ),
    Entry(
        name="masked-not-frozen",
        module="consilience.paper.masked_not_frozen",
        title="Where a masked weight goes, under each optimizer and each choice",
        source="beyond it",
        cost="seconds",
    ),
)

FIGURES: tuple[Entry, ...] = THEORY + SYNTHETIC + CONSISTENCY + TEMPORAL


def listing() -> str:
    """Return the page that lists every figure by its command."""
    lines = [
        "# Figures and tables",
        "",
        "Each is made by a command. `--out FOLDER` says where to, `--runs FOLDER` where trained",
        "runs are, `--quick` asks for a coarser version in less time; `consilience figure all`",
        "makes every one. Figures come as SVG and PNG, those that measure something with their",
        "numbers as JSON and CSV. In the paper means *Learning explanations that are hard to",
        "vary*; [the paper map](paper-map.md) goes the other way.",
        "",
        "| command | what it shows | in the paper | takes |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `consilience figure {e.name}` | {e.title} | {e.source} | {e.cost} |" for e in FIGURES
    ]
    trained = [entry for entry in FIGURES if entry.runs]
    if trained:
        lines += [
            "",
            "## Runs that figures show",
            "Where runs are missing, the figure leaves them out and prints the commands that make",
            "them, all of them; these make the first.",
            "",
            "| figure | command |",
            "| --- | --- |",
            *(f"| `{e.name}` | `{e.runs}` |" for e in trained),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(listing(), end="")
