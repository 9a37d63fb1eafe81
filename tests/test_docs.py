"""The docs: their code runs, their links lead somewhere, their tables are what commands print."""

import doctest
import inspect
import re
import runpy
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from consilience import rules

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page, language):
    """Yield the line and the text of each block that can be run."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        if block[1] == language and not NOT_RUN.search(text[: block.start()]):
            yield text[: block.start()].count("\n") + 1, block[2]


@every_page
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "page"}
    for line, code in blocks(page, "python"):
        # The line numbers of a traceback are those of the page.
        exec(compile("\n" * line + code, page, "exec"), namespace)  # noqa: S102
    for line, code in blocks(page, "pycon"):
        example = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
        assert doctest.DocTestRunner().run(example).failed == 0


@every_page
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text()))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, link


@every_page
def test_commands_name_files_that_exist(page):
    """What a page says to run is there to be run."""
    for script in re.findall(r"python ((?:examples|benchmarks)/\S+\.py)", page.read_text()):
        assert (ROOT / script).exists(), script
    makefile = (ROOT / "Makefile").read_text()
    for _, code in blocks(page, "console"):
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if "make" in words:
                for target in words[words.index("make") + 1 :]:
                    assert "=" in target or re.search(f"^{target}:", makefile, re.MULTILINE), line


class UnderstoodError(Exception):
    """A command was understood, and would now run."""


def understood(*_, **__):
    raise UnderstoodError


@every_page
def test_commands_are_understood(page, tmp_path, monkeypatch, capsys):
    """The command line takes each command of its own that a page names, without running it."""
    from consilience import cli
    from consilience.paper.catalogue import FIGURES

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_run", understood)
    text = page.read_text()
    lines = [line for _, code in blocks(page, "console") for line in code.splitlines()]
    for line in {*lines, *re.findall(r"`((?:consilience|python -m) [^`]+)`", text)}:
        words = shlex.split(line, comments=True)
        if words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), line
        if words[:1] != ["consilience"] or any(re.fullmatch("[A-Z]+", word) for word in words):
            continue
        command, *rest = words[1:]
        if command == "figure" and rest[0] not in ("--help", "list", "all"):
            assert rest[0] in [entry.name for entry in FIGURES], line
            assert not rest[1:] or rest[1] in ("--quick", "--out", "--runs"), line
        elif command in ("run", "search") and "--help" not in rest:
            with pytest.raises(UnderstoodError):
                cli.main([command, *rest])
        elif "--help" in rest:
            with pytest.raises(SystemExit) as end:
                cli.main([command, *rest])
            assert end.value.code == 0, line
        else:
            assert command in ("list", "report", "figure"), line
    capsys.readouterr()


def test_the_loop_of_the_readme_runs():
    """The lines that the diff in the README leaves, as they stand."""
    (diff,) = (code for _, code in blocks(ROOT / "README.md", "diff"))
    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    before = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    for loop in (before, after):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        weight = model.weight.detach().clone()
        batch = (torch.randn(10, 4), torch.randint(3, (10,)), torch.arange(10) % 5)
        namespace = {
            "Agreement": __import__("consilience").Agreement,
            "AndMask": rules.AndMask,
            "F": F,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
            "loader": [batch],
        }
        exec(loop, namespace)  # noqa: S102
        moved = model.weight != weight
        if loop is before:
            assert moved.all()
        else:
            kept = namespace["report"].parameters["weight"].kept
            assert 0 < kept < 1
            assert moved.double().mean() == pytest.approx(kept)


def test_tables_of_thresholds_are_those_of_the_command():
    example = runpy.run_path(str(ROOT / "examples" / "chance.py"))
    page = (ROOT / "docs" / "rules.md").read_text()
    assert example["lattices"]() in page
    assert example["rates"]() in page


def test_every_rule_has_a_row():
    for page in ("README.md", "docs/rules.md"):
        text = (ROOT / page).read_text()
        for name in rules.__all__:
            found = getattr(rules, name)
            if inspect.isclass(found) and issubclass(found, rules.Rule) and found is not rules.Rule:
                assert f"| `{name}(" in text, (page, name)


@pytest.mark.parametrize(
    ("script", "made", "page"),
    [
        ("supported_operations.py", "page", "supported-operations.md"),
        ("pictures/votes.py", "draw", "pictures/votes.svg"),
    ],
)
def test_what_the_docs_take_from_the_code_is_up_to_date(script, made, page):
    found = runpy.run_path(str(ROOT / "docs" / script))[made]()
    assert found == (ROOT / "docs" / page).read_text(), "run `make docs`"


def test_the_index_leads_to_every_page():
    """From the index, or from the table of decisions, in a click."""
    docs = ROOT / "docs"
    linked = {docs / "index.md"}
    for page in (docs / "index.md", docs / "decisions" / "README.md"):
        links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
        linked |= {(page.parent / link).resolve() for link in links}
    assert set(docs.rglob("*.md")) <= linked
