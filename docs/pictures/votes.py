"""Draw docs/pictures/votes.svg: how votes come out of one backward pass. The numbers are real."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from consilience import Agreement, Rule, Statistic, Tally

ENVIRONMENTS = {"lima": "#4c72b0", "oslo": "#dd8452", "pune": "#55a868"}
INK, FAINT = "#222222", "#9a9a9a"
QUORUM = 3


class Keep(Rule):
    """Keeps a weight's gradient where all vote alike, and the tally for the picture."""

    statistics = frozenset({Statistic.VOTES})

    def __call__(self, tally: Tally) -> Tensor:
        """Return the gradient where the quorum is reached."""
        self.votes, self.gradient = tally.get(Statistic.VOTES).clone(), tally.gradient.clone()
        return tally.gradient.where(self.votes.abs() >= QUORUM, 0.0)


def measure() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return each environment's share, their sum, the votes and what is kept."""
    torch.manual_seed(5)
    model, rule = nn.Linear(3, 2, bias=False).double(), Keep()
    x, y = torch.randn(6, 3).double() + 0.6, torch.randn(6, 2).double()
    env = torch.tensor([0, 1, 0, 2, 1, 2])
    losses = (model(x) - y).square().sum(1) / 6
    shares = [
        torch.autograd.grad(losses[env == e].sum(), model.weight, retain_graph=True)[0]
        for e in range(3)
    ]
    agreement = Agreement(model, rule)
    with agreement.observe(env):
        loss = (model(x) - y).square().sum() / 6
    loss.backward()
    agreement.apply()
    assert torch.equal(sum(share.sign() for share in shares), rule.votes)
    return shares, rule.gradient, rule.votes, model.weight.grad


def text(x: float, y: float, words: str, *, size: int = 13, fill: str = INK, more: str = "") -> str:
    """Return a text, centred."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="middle" {more}>'
        f"{words}</text>"
    )


def grid(x: float, y: float, values: Tensor, form: str, colour: str, *, grey: bool = True) -> str:
    """Return a small table of numbers."""
    out = []
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            left, top = x + 44 * j, y + 26 * i
            zero = grey and value == 0
            out.append(
                f'<rect x="{left:g}" y="{top:g}" width="44" height="26" fill="{colour}" '
                f'fill-opacity="{0.04 if zero else 0.16}" stroke="{colour}" stroke-width="0.8"/>'
            )
            shown = "0" if value == 0 else format(value, form).replace("-", "\u2212")
            out.append(text(left + 22, top + 17.5, shown, size=12, fill=FAINT if zero else INK))
    return "".join(out)


def arrow(x: float, y: float, x2: float, y2: float, colour: str = INK) -> str:
    """Return an arrow."""
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" '
        'stroke-width="1.4" marker-end="url(#head)"/>'
    )


HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" width="800" height="450" viewBox="0 0 800 450"
 font-family="Helvetica, Arial, sans-serif">
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
 orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#222222"/></marker></defs>"""


def draw() -> str:
    """Return the picture."""
    shares, gradient, votes, kept = measure()
    out = [
        HEAD,
        '<rect width="800" height="450" fill="#ffffff"/>',
        text(70, 24, "forward", fill=FAINT, more='font-style="italic"'),
        text(70, 144, "backward", fill=FAINT, more='font-style="italic"'),
    ]
    for i, e in enumerate((0, 1, 0, 2, 1, 2)):
        colour = list(ENVIRONMENTS.values())[e]
        out.append(f'<rect x="34" y="{34 + 12 * i}" width="72" height="10" fill="{colour}"/>')
    out.append(text(70, 122, "x: rows of three environments", size=12, more='dx="28"'))
    boxes = [(180, 120, "x W\u1d40"), (350, 70, "tap"), (470, 160, "the rest of the model")]
    for left, width, label in boxes:
        dash = 'stroke-dasharray="4 3"' if label == "tap" else ""
        out.append(
            f'<rect x="{left}" y="50" width="{width}" height="40" rx="6" fill="#f5f5f5" '
            f'stroke="{INK}" {dash}/>'
        )
        out.append(text(left + width / 2, 75, label))
    out += [arrow(112, 70, 176, 70), arrow(302, 70, 346, 70), arrow(422, 70, 466, 70)]
    out += [arrow(632, 70, 690, 70), text(716, 75, "loss")]
    out.append(text(385, 144, "the gradient of the output meets x", size=12))
    out.append(arrow(385, 96, 385, 128))
    for i, (name, colour) in enumerate(ENVIRONMENTS.items()):
        left = 60 + 160 * i
        out.append(text(left + 66, 174, name, fill=colour, more='font-weight="bold"'))
        out.append(grid(left, 182, shares[i], "+.2f", colour, grey=False))
        out.append(text(left + 66, 255, "sign", size=11, fill=FAINT))
        out.append(grid(left, 262, shares[i].sign(), "+.0f", colour, grey=False))
    for left, top, sign in ((206, 213, "+"), (366, 213, "+"), (206, 293, "+"), (366, 293, "+")):
        out.append(text(left, top, sign, size=16))
    out += [text(536, 213, "=", size=18), text(536, 293, "=", size=18)]
    out.append(grid(570, 182, gradient, "+.2f", "#666666", grey=False))
    out.append(text(716, 206, "p.grad,", more='dx="30"'))
    out.append(text(716, 222, "as ever", more='dx="30"'))
    out.append(grid(570, 262, votes, "+.0f", "#8172b3", grey=False))
    out.append(text(716, 293, "votes", more='dx="30"'))
    out.append(arrow(636, 320, 636, 352))
    out.append(text(470, 341, f"apply(): keep where |votes| \u2265 {QUORUM}", size=13))
    out.append(grid(570, 358, kept, "+.2f", "#666666"))
    out.append(text(724, 375, "what the", more='dx="30"'))
    out.append(text(724, 391, "optimizer", more='dx="30"'))
    out.append(text(724, 407, "sees", more='dx="30"'))
    shown = "An environment's gradients live only inside of one operation's backward pass."
    out.append(text(400, 438, shown, size=12, fill=FAINT))
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
