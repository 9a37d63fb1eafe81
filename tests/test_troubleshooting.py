"""Every error of the library stands on the page that explains errors, and no other does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "consilience"
PAGE = ROOT / "docs" / "troubleshooting.md"
SETTINGS = "## Rules and optimizers"
ENGINE = ["observation/**/*.py", "agreement.py", "report.py", "_verification.py"]


def words(node):
    """The text of a string in the source, with … where something is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) or "…" for part in node.values)
    return ""


def messages(patterns):
    """What is said by the errors that are made in some files, and by reasons for one."""
    found = {}
    for path in (path for pattern in patterns for path in sorted(SOURCE.glob(pattern))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name.endswith("Error") or name == "unsupported":
                    for text in filter(None, map(words, node.args)):
                        found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


def quotes(text):
    """What the page quotes: its blockquotes, and the first cells of its tables."""
    yield from re.findall(r"^> (.+)$", text, re.MULTILINE)
    for cell in re.findall(r"^\| (.+?) \|", text, re.MULTILINE):
        if cell not in ("message", "why", "---"):
            yield from cell.split("; ")


def covers(quote, message):
    """Whether a quote is the beginning of a message; … stands for anything."""
    pattern = ".*".join(re.escape(part) for part in quote.split("…"))
    return re.match(pattern, message, re.DOTALL)


PARTS = {"engine": ENGINE, "settings": ["rules/*.py", "optim/*.py"]}


@pytest.mark.parametrize("part", PARTS)
def test_every_error_is_explained_and_no_other(part):
    before, after = PAGE.read_text().split(SETTINGS)
    said, quoted = messages(PARTS[part]), list(quotes({"engine": before, "settings": after}[part]))
    assert len(said) > 20
    missing = [
        f"{where}: {message}"
        for message, where in said.items()
        if not any(covers(quote, message) for quote in quoted)
    ]
    assert not missing, "docs/troubleshooting.md should say what these mean:\n" + "\n".join(missing)
    stale = [quote for quote in quoted if not any(covers(quote, message) for message in said)]
    assert not stale, "docs/troubleshooting.md explains what no error says:\n" + "\n".join(stale)
