"""The page: one HTML document with everything inside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from consilience._version import __version__
from consilience.lab.report import _svg
from consilience.lab.report._planes import Learned, Plane
from consilience.lab.report._svg import Series, percent
from consilience.lab.report.readings import Group, Reading, Spread, flat

MOST_PANELS = 24
"""Small pictures per section: the best of a large search; the table has all."""
MOST_PLANES = 12
"""Methods whose decisions are drawn."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What a browser may load for the page: nothing that is not in it."""
BADGES = {"finished": "good", "unfinished": "half", "failed": "bad", "damaged": "bad"}
_KEY_LINE = '<svg viewBox="0 0 30 12" aria-hidden="true"><path class="{}" d="M1 6H29"/></svg>'


def page(
    folder: Path,
    readings: Sequence[Reading],
    groups: Sequence[Group],
    *,
    learned: dict[Path, Learned],
    planes: dict[Path, list[Plane]],
    troubles: Sequence[str],
) -> str:
    """Return the page.

    Args:
        folder: What was asked for; it names the page.
        readings: All runs.
        groups: The readable ones by label, in the order of the page.
        learned: What networks listen to, by run directory.
        planes: What networks decide on planes, by run directory.
        troubles: Sentences about checkpoints that cannot be used.
    """
    sections = [
        _results(groups, learned),
        _curves(groups),
        _decisions(groups, learned, planes),
        _shares(groups),
        _configuration(groups),
        _commands(readings),
        _runs(readings),
    ]
    there = [(name, title, body) for name, title, body in sections if body]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in there)
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{content}</section>'
        for name, title, content in there
    )
    assets = files("consilience.lab.report")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="consilience {escape(__version__)}">
<link rel="icon" href="data:,">
<title>{escape(_title(folder))}</title>
<style>
{(assets / "style.css").read_text()}</style>
</head>
<body>
<header>
<h1>{escape(_title(folder))}</h1>
<button id="theme" type="button" hidden>Dark</button>
<p class="about">{_about(readings, groups)}</p>
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{_notice(readings, troubles)}{_headline(groups)}{body}
</main>
<footer>{_footer(folder, readings)}</footer>
<script>
{(assets / "script.js").read_text()}</script>
</body>
</html>
"""


def found(train: Spread | None, test: Spread | None, chance: float | None) -> tuple[str, str]:
    """Return in a word what a method found, and how good that is: good, half, bad or plain.

    Example:
        >>> spread = lambda value: Spread(value, None, value, value, 1)
        >>> found(spread(1.0), spread(0.51), 0.5), found(spread(1.0), spread(0.99), 0.5)
        (('shortcuts', 'bad'), ('the mechanism', 'good'))
    """
    if train is None or test is None or chance is None:
        return "", "plain"
    if test.mean >= 0.95:
        return "the mechanism", "good"
    if test.mean > chance + 0.1:
        return "part of the mechanism", "half"
    if train.mean > chance + 0.1:
        return "shortcuts", "bad"
    return "nothing", "plain"


def _title(folder: Path) -> str:
    return f"Consilience: {folder.resolve().name}"


def _about(readings: Sequence[Reading], groups: Sequence[Group]) -> str:
    counts = {status: sum(r.status == status for r in readings) for status in BADGES}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    seeds = {r.run.seed for r in readings if r.run is not None}
    methods = _plural(len(groups), "configuration")
    return (
        f"{_plural(len(readings), 'run')} ({', '.join(parts)}) of {methods}, "
        f"{_plural(len(seeds), 'seed')}. Accuracies are those of the last epoch, never of the best."
    )


def _headline(groups: Sequence[Group]) -> str:
    """Say in two sentences what came out: the best, and the one that memorises most."""
    told = [
        (g, train, test)
        for g in groups
        if (train := g.spread("train_accuracy")) and (test := g.spread("test_accuracy"))
    ]
    if not told:
        return '<div class="headline"><p>No run is finished yet.</p></div>'
    best, fit, score = max(told, key=lambda one: one[2].mean)
    word, kind = found(fit, score, best.chance)
    if kind in ("good", "half"):
        first = (
            f"<b>{_name(best.label)}</b> is right on {percent(fit.mean)} of its training rows and "
            f"on <b>{percent(score.mean)}</b> of test rows{_over(score.count)}, whose shortcuts "
            f"tell nothing: it learned {word}."
        )
    else:
        guess = "" if best.chance is None else f"; guessing gives {best.chance:.0%}"
        first = (
            f"At best, by <b>{_name(best.label)}</b>, a network is right on "
            f"<b>{percent(score.mean)}</b> of test rows{_over(score.count)}{guess}."
        )
    lines = [first]
    caught = [
        one
        for one in told
        if one[0] is not best and found(one[1], one[2], one[0].chance)[0] == "shortcuts"
    ]
    if caught:
        worst, train, test = max(caught, key=lambda one: one[1].mean - one[2].mean)
        lines.append(
            f"<b>{_name(worst.label)}</b> is right on {percent(train.mean)} of its training rows "
            f"and on <b>{percent(test.mean)}</b> of test rows{_over(test.count)}, where guessing "
            f"gives {worst.chance or 0.0:.0%}: it learned shortcuts."
        )
    return f'<div class="headline">{"".join(f"<p>{line}</p>" for line in lines)}</div>'


def _over(count: int) -> str:
    return f" (mean of {count} seeds)" if count > 1 else " (one seed)"


def _notice(readings: Sequence[Reading], troubles: Sequence[str]) -> str:
    boxes = []
    bad = [(r.path, r.why) for r in readings if r.status in ("damaged", "failed")]
    if bad or troubles:
        items = [f"<li><code>{escape(path.name)}</code>: {escape(why)}</li>" for path, why in bad]
        items += [f"<li>{escape(trouble)}</li>" for trouble in troubles]
        boxes.append(_box("Damaged and failed runs", items, ""))
    late: dict[str, list[Reading]] = {}
    for reading in readings:
        if reading.status == "unfinished" and reading.run is not None:
            late.setdefault(reading.run.label, []).append(reading)
    if late:
        items = [f"<li>{escape(label)}: {_progress(runs)}</li>" for label, runs in late.items()]
        title = "Not finished, and left out of tables: running, or interrupted and to be taken up"
        boxes.append(_box(title, items, " mild"))
    return "".join(boxes)


def _progress(late: Sequence[Reading]) -> str:
    """Say which seeds of a label are not finished, and how far they went."""
    seeds = sorted(r.run.seed for r in late if r.run is not None)
    went = sorted(len(r.metrics) for r in late)
    span = str(went[0]) if went[0] == went[-1] else f"{went[0]} to {went[-1]}"
    epochs = {flat(r.run.settings).get("epochs") for r in late if r.run is not None}
    whole = f" of {epochs.pop()}" if len(epochs) == 1 and None not in epochs else ""
    return f"{_seeds(seeds)} ({span}{whole} epochs)"


def _box(title: str, items: list[str], style: str) -> str:
    shown = items[:12]
    more = f"<li>and {len(items) - 12} more, listed below</li>" if len(items) > 12 else ""
    return f'<div class="notice{style}"><p>{title}</p><ul>{"".join(shown)}{more}</ul></div>'


def _results(groups: Sequence[Group], learned: dict[Path, Learned]) -> tuple[str, str, str]:
    read = (
        '<p class="read">Mean and sample standard deviation over seeds at the last epoch; below '
        "them the least and the largest. The last two columns shuffle one half of the inputs among "
        "rows of the training environments: what is left is what the network can tell from the "
        "other half alone.</p>"
    )
    rows = []
    for group in groups:
        train, test = group.spread("train_accuracy"), group.spread("test_accuracy")
        word, kind = found(train, test, group.chance)
        badge = f'<span class="badge {kind}">{escape(word)}</span>' if word else ""
        each = [learned[r.path] for r in group.counted if r.path in learned]
        seconds = Spread.of(
            sum(entry["seconds"] for entry in r.metrics) for r in group.counted if r.metrics
        )
        kept, null = group.spread("kept"), group.spread("null_keep_rate")
        cells = [
            _cell(train),
            _cell(test),
            _share(kept, null),
            _cell(Spread.of(one.mechanism for one in each)),
            _cell(Spread.of(one.shortcuts for one in each)),
            _time(seconds),
        ]
        done = f"{len(group.counted)}/{len(group.readings)}"
        rows.append(
            f'<tr><th scope="row">{_name(group.label)}</th><td class="text">{badge}</td>'
            f"<td>{done}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    head = (
        '<th scope="col">configuration</th><th scope="col" class="text">found</th>'
        '<th scope="col">seeds</th><th scope="col">train</th><th scope="col">test</th>'
        '<th scope="col">weights kept<br>(by chance)</th>'
        '<th scope="col">from the<br>mechanism</th><th scope="col">from<br>shortcuts</th>'
        '<th scope="col">time</th>'
    )
    table = (
        f'<div class="scroll"><table class="results"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    return "results", "Results", _strips(groups) + read + table


def _strips(groups: Sequence[Group]) -> str:
    """Draw train and test accuracy of every seed on one line per method."""
    shown = [g for g in groups if g.counted][:MOST_PANELS]
    if not shown:
        return ""
    values = [
        value
        for g in shown
        for r in g.counted
        for key in ("train_accuracy", "test_accuracy")
        if (value := r.last(key)) is not None
    ]
    start = 0.4 if min(values, default=0.0) >= 0.4 else 0.0

    def place(value: float) -> str:
        return f"left:{100 * (value - start) / (1 - start):.2f}%"

    lines = []
    for group in shown:
        chance = (
            "" if group.chance is None else f'<i class="chance" style="{place(group.chance)}"></i>'
        )
        dots = "".join(
            f'<i class="{name}" style="{place(value)}" '
            f'title="seed {r.run.seed if r.run else "?"}: {name} {percent(value)}"></i>'
            for name in ("test", "train")
            for r in group.counted
            if (value := r.last(f"{name}_accuracy")) is not None
        )
        lines.append(
            f'<div class="strip"><span class="name">{_name(group.label)}</span>'
            f'<div class="track">{chance}{dots}</div></div>'
        )
    ticks = [0.4, 0.6, 0.8, 1.0] if start else [0.0, 0.25, 0.5, 0.75, 1.0]
    axis = "".join(f'<span class="at" style="{place(t)}">{t:.0%}</span>' for t in ticks)
    key = (
        '<div class="key"><span><svg viewBox="0 0 30 12" aria-hidden="true"><rect x="11" y="2" '
        'width="8" height="8" fill="none" stroke="var(--train)" stroke-width="2" '
        'transform="rotate(45 15 6)"/></svg>train, each seed</span>'
        '<span><svg viewBox="0 0 30 12" aria-hidden="true"><circle cx="15" cy="6" r="5" '
        'fill="var(--test)"/></svg>test, each seed</span>'
        f"<span>{_KEY_LINE.format('level')}guessing</span></div>"
    )
    return (
        f'<div class="strips">{"".join(lines)}<div class="strip axis"><span class="name"></span>'
        f'<div class="track axis">{axis}</div></div>{key}</div>'
        f"{_left_out([g for g in groups if g.counted], shown)}"
    )


def _curves(groups: Sequence[Group]) -> tuple[str, str, str]:
    shown = [g for g in groups if any(r.metrics for r in g.readings)][:MOST_PANELS]
    if not shown:
        return "curves", "Learning curves", ""
    pairs = [(g.curves("train_accuracy"), g.curves("test_accuracy")) for g in shown]
    lowest = min(float(c.each[~np.isnan(c.each)].min(initial=1.0)) for pair in pairs for c in pair)
    axis = _svg.accuracy_axis(lowest)
    panels = []
    for group, (train, test) in zip(shown, pairs, strict=True):
        series = [Series("train", "train", train), Series("test", "test", test)]
        level = None if group.chance is None else (group.chance, "guessing")
        what = f"Train and test accuracy of {group.label} over epochs."
        chart = _svg.curves(series, axis, level=level, what=what)
        panels.append(_panel(group.label, chart, _plural(len(train.each), "seed")))
    key = (
        f'<div class="key"><span>{_KEY_LINE.format("line train mean")}train</span>'
        f"<span>{_KEY_LINE.format('line test mean')}test</span>"
        f"<span>{_KEY_LINE.format('level')}guessing</span></div>"
    )
    read = (
        '<p class="read">Thick lines are means over seeds, bands reach from the worst seed to the '
        "best, thin lines are the seeds. Unfinished runs are drawn as far as they went.</p>"
    )
    body = f'{read}<div class="panels">{"".join(panels)}</div>{key}{_left_out(groups, shown)}'
    return "curves", "Learning curves", body


def _decisions(
    groups: Sequence[Group], learned: dict[Path, Learned], planes: dict[Path, list[Plane]]
) -> tuple[str, str, str]:
    blocks = []
    shown = []
    for group in groups:
        reading = group.median()
        if reading is None or reading.path not in planes:
            continue
        shown.append(group)
        pictures = "".join(
            f"<figure>{_svg.plane(p.chance_of_one, p.extent, p.marks, f'{p.title}: {p.caption}')}"
            f"<figcaption><b>{escape(p.title)}</b><span>{escape(p.caption)}</span></figcaption>"
            "</figure>"
            for p in planes[reading.path]
        )
        test = reading.last("test_accuracy")
        words = [f"seed {reading.run.seed if reading.run else '?'}"]
        words += [f"test {percent(test)}"] if test is not None else []
        if reading.path in learned:
            one = learned[reading.path]
            words.append(f"from the mechanism alone {percent(one.mechanism)}")
            words.append(f"from shortcuts alone {percent(one.shortcuts)}")
        blocks.append(
            f'<div class="method"><h3>{_name(group.label)}<span>{escape(", ".join(words))}</span>'
            f'</h3><div class="learned">{pictures}</div></div>'
        )
    if not blocks:
        return "learned", "What the networks learned", ""
    read = (
        '<p class="read">What the network of the seed with the median test accuracy says on planes '
        "through its inputs: the stronger the colour, the surer it is. A network that found the "
        "mechanism draws the spirals and does not care which shortcut it is given; one that found "
        "shortcuts does the reverse.</p>"
        '<div class="key" style="margin:-6px 0 12px"><span><i class="swatch one"></i>says class 1'
        '</span><span><i class="swatch zero"></i>says class 0</span>'
        '<span><svg viewBox="0 0 30 12" class="plane" style="border:0;background:none" '
        'aria-hidden="true"><circle class="class1" cx="8" cy="6" r="4"/><circle class="class0" '
        'cx="22" cy="6" r="4"/></svg>rows of class 1 and of class 0</span></div>'
    )
    return (
        "learned",
        "What the networks learned",
        read + "".join(blocks) + _left_out([g for g in groups if g.counted], shown),
    )


def _shares(groups: Sequence[Group]) -> tuple[str, str, str]:
    voting = [
        g
        for g in groups
        if any(entry["null_keep_rate"] is not None for r in g.readings for entry in r.metrics)
    ]
    shown = voting[:MOST_PANELS]
    if not shown:
        return "kept", "Kept against chance", ""
    kept = [g.curves("kept") for g in shown]
    rates = [g.curves("null_keep_rate").each for g in shown]
    levels = [float(rate[~np.isnan(rate)][-1]) for rate in rates]
    positive = [float(c.each[c.each > 0].min(initial=1.0)) for c in kept]
    axis = _svg.share_axis(min(positive + [level for level in levels if level > 0]))
    panels = []
    for group, curve, level in zip(shown, kept, levels, strict=True):
        what = f"Share of gradient components that {group.label} keeps, over epochs."
        chart = _svg.curves(
            [Series("kept", "kept", curve)],
            axis,
            level=(level, f"chance {percent(level)}"),
            what=what,
        )
        panels.append(_panel(group.label, chart, _plural(len(curve.each), "seed")))
    read = (
        '<p class="read">The share of gradient components that the rule let through, averaged over '
        "the steps of an epoch, against the share that coin flips in place of signs would get "
        "through. Near the dashed line, the environments agree on nothing. The scale is "
        "logarithmic, with 0 at the bottom.</p>"
    )
    body = f'{read}<div class="panels">{"".join(panels)}</div>{_left_out(voting, shown)}'
    return "kept", "Kept against chance", body


def _configuration(groups: Sequence[Group]) -> tuple[str, str, str]:
    if not groups:
        return "configuration", "Configuration", ""
    all_settings = [g.settings for g in groups]
    keys = list(dict.fromkeys(key for settings in all_settings for key in settings))
    texts = {key: [_value(s[key]) if key in s else "–" for s in all_settings] for key in keys}
    same = [key for key in keys if len(set(texts[key])) == 1]
    named = all(str(g.settings.get("method")) in g.label for g in groups)
    differ = [key for key in keys if key not in same and not (key == "method" and named)]
    listed = "".join(
        f"<div><dt>{escape(key)}</dt><dd>{escape(texts[key][0])}</dd></div>" for key in same
    )
    body = f'<dl class="settings">{listed}</dl>'
    if len(groups) > 1:
        body = f"<h3>The same for all</h3>{body}"
    if differ:
        head = "".join(f'<th scope="col">{escape(key)}</th>' for key in differ)
        rows = "".join(
            f'<tr><th scope="row">{_name(group.label)}</th>'
            + "".join(f"<td>{escape(texts[key][i])}</td>" for key in differ)
            + "</tr>"
            for i, group in enumerate(groups)
        )
        body += (
            "<h3>What differs</h3><p class='read'>A dash: the method does not read that "
            'setting.</p><div class="scroll"><table><thead><tr><th scope="col">configuration</th>'
            f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )
    return "configuration", "Configuration", body


def _commands(readings: Sequence[Reading]) -> tuple[str, str, str]:
    made: dict[str, list[Reading]] = {}
    for reading in readings:
        if reading.run is not None:
            made.setdefault(str(reading.run.config["command"]), []).append(reading)
    blocks = []
    for command, members in made.items():
        labels = list(dict.fromkeys(r.run.label for r in members if r.run is not None))
        seeds = sorted({r.run.seed for r in members if r.run is not None})
        names = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
        blocks.append(
            f'<div class="command"><pre>{escape(command)}</pre>'
            '<button class="copy" type="button" hidden>Copy</button></div>'
            f'<p class="read">{escape(names)}; {_seeds(seeds)}</p>'
        )
    versions = dict.fromkeys(_versions(r) for r in readings if r.run is not None)
    told = "".join(f'<p class="read">Made with {escape(v)}.</p>' for v in versions)
    read = '<p class="read">Each makes its runs again: the same seeds, the same numbers.</p>'
    return "commands", "Commands", read + "".join(blocks) + told


def _runs(readings: Sequence[Reading]) -> tuple[str, str, str]:
    rows = []
    for r in readings:
        seed = str(r.run.seed) if r.run is not None else "–"
        kept = None if r.last("null_keep_rate") is None else r.last("kept")
        numbers = [r.last("train_accuracy"), r.last("test_accuracy"), kept]
        cells = "".join(f"<td>{'–' if n is None else percent(n)}</td>" for n in numbers)
        seconds = sum(entry["seconds"] for entry in r.metrics)
        why = escape(r.why)
        rows.append(
            f'<tr><th scope="row">{escape(r.path.name)}</th>'
            f'<td class="text"><span class="badge {BADGES[r.status]}">{r.status}</span></td>'
            f"<td>{seed}</td><td>{len(r.metrics)}</td>{cells}<td>{_clock(seconds)}</td>"
            f'<td class="text long">{why}</td></tr>'
        )
    head = "".join(
        f'<th scope="col"{style}>{name}</th>'
        for name, style in (
            ("run", ""),
            ("status", ' class="text"'),
            ("seed", ""),
            ("epochs", ""),
            ("train", ""),
            ("test", ""),
            ("kept", ""),
            ("time", ""),
            ("", ' class="text"'),
        )
    )
    table = (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    if len(readings) > 40:
        table = f"<details><summary>All {len(readings)} runs</summary>{table}</details>"
    return "runs", "Runs", table


def _footer(folder: Path, readings: Sequence[Reading]) -> str:
    return (
        f"Made by <code>consilience report {escape(folder.resolve().name)}</code> "
        f"(consilience {escape(__version__)}) from {_plural(len(readings), 'run directory')}. "
        "This file needs nothing but itself."
    )


def _name(label: str) -> str:
    """Return a label with what it says beyond the method set apart: settings like `l2=0`."""
    words = label.split(" ")
    cut = next((i for i, word in enumerate(words) if "=" in word), len(words))
    changed = escape(" ".join(words[cut:]))
    small = f' <span class="changed">{changed}</span>' if changed else ""
    return escape(" ".join(words[:cut])) + small


def _panel(title: str, chart: str, note: str) -> str:
    return (
        f'<figure class="panel"><figcaption>{_name(title)}</figcaption>{chart}'
        f'<p class="now">{escape(note)}</p></figure>'
    )


def _left_out(groups: Sequence[Group], shown: Sequence[Group]) -> str:
    if len(groups) <= len(shown):
        return ""
    return (
        f'<p class="read">Shown: {len(shown)} of {len(groups)} configurations, the best by test '
        "accuracy. The table has all.</p>"
    )


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    if spread.deviation is None or spread.low == spread.high:
        return percent(spread.mean)
    around = f"{100 * spread.deviation:.{1 if spread.deviation >= 0.001 else 2}f}"
    low, high = percent(spread.low), percent(spread.high)
    return f'{percent(spread.mean)} ± {around}<br><span class="range">{low} – {high}</span>'


def _share(kept: Spread | None, null: Spread | None) -> str:
    if kept is None or null is None:
        return "–"
    return f'{percent(kept.mean)}<br><span class="range">({percent(null.mean)})</span>'


def _time(seconds: Spread | None) -> str:
    return "–" if seconds is None else _clock(seconds.mean)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def _versions(reading: Reading) -> str:
    assert reading.run is not None  # noqa: S101 (the caller chose those)
    versions = ", ".join(f"{k} {v}" for k, v in dict(reading.run.config["versions"]).items())
    commit = reading.run.config["commit"]
    return f"{versions}" + (f", commit {commit}" if commit else "")


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, seeds))


def _plural(count: int, noun: str) -> str:
    if count == 1:
        return f"one {noun}"
    return f"{count} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"
