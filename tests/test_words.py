"""First words of docstrings and a list of words to avoid, checked in all Python files, in docs/ and in the notebooks.

The checks cover docstrings of modules, classes, functions and attributes, comments, the pages of docs/, and the text
cells of notebooks. Code is left out: backticks, code blocks, examples in docstrings. Messages have tests of their own.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Folders with Python files.
FOLDERS = ("nbdist", "tests", "benchmarks", "notebooks")
#: Pages that are made with the site.
MADE = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/notebooks/0*.md")}
#: A docstring begins with a verb or a noun instead.
FIRST = "what whether how let that those this these such it which where who whom nobody as one of".split()
AVOIDED = re.compile(
    r"\b(hear[sd]?|hearing|heed(s|ed)?|tells?|telling|told|foretells?|foretold|learnt|nobody|whom|bury|buries|buried|"
    r"beside|mend(s|ed|ing)?|lets?\s+go|so\s+many|of\s+which|(those|that)\s+of|thereby|[wt]?hither|anew|likewise|"
    r"for\s+ever)\b",
    re.IGNORECASE,
)
#: Code in Markdown and docstrings: blocks, spans, and examples with what they show.
CODE = re.compile(r"^(?P<fence> *```+).*?^(?P=fence)|``?[^`]+``?|^ *>>> .*?(?=^ *$|\Z)", re.DOTALL | re.MULTILINE)


@functools.cache
def docstrings(source: str) -> list[tuple[int, str]]:
    """Return the docstrings with their lines."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    constants = (one.value for one in statements if isinstance(one.value, ast.Constant))
    return [(one.lineno, one.value) for one in constants if isinstance(one.value, str)]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line; comments of consecutive lines as one text."""
    first, last, lines = 0, -1, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != last + 1:
                yield first, "\n".join(lines)
                lines = []
            first = first if lines else token.start[0]
            last = token.start[0]
            lines.append(token.string.lstrip("#: "))
    if lines:
        yield first, "\n".join(lines)


def avoided(text: str) -> list[str]:
    return [found[0] for found in AVOIDED.finditer(CODE.sub(lambda code: "`" + "\n" * code[0].count("\n"), text))]


def first_word(text: str) -> str:
    found = re.match(r"\s*([A-Za-z]+)", text)
    return found[1].lower() if found else ""


def without_glossary(page: str) -> str:
    """Remove the last column of the glossary: it lists the words that are not used."""
    return re.sub(r"(?<=\n)(\| .* \| .* \|) .* \|(?=\n)", r"\1", page)


def files(folder: str, pattern: str) -> list[str]:
    names = (path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern))
    return sorted(name for name in names if name not in MADE)


def python_files() -> list[str]:
    return [name for folder in FOLDERS for name in files(folder, "*.py")]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name in python_files()
        for line, text in docstrings((ROOT / name).read_text())
        if first_word(text) in FIRST
    ]
    assert not found, "\n".join(found)


def test_docstrings_and_comments_avoid_words() -> None:
    found = []
    for name in python_files():
        source = (ROOT / name).read_text()
        # Tokens take ten times as long as lines: only where a line that may have a comment has such a word.
        lines = (line.partition("#")[2].lstrip("#: ") for line in source.splitlines() if "#" in line)
        noted = comments(source) if AVOIDED.search("\n".join(lines)) else ()
        for line, text in [*docstrings(source), *noted]:
            found += [f"{name}:{line}: {word!r}" for word in avoided(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", files("notebooks", "*.ipynb"))
def test_notebooks_avoid_words(name: str) -> None:
    cells = json.loads((ROOT / name).read_text())["cells"]
    assert not [word for cell in cells if cell["cell_type"] == "markdown" for word in avoided("".join(cell["source"]))]


@pytest.mark.parametrize("name", files("docs", "*.md"))
def test_pages_avoid_words(name: str) -> None:
    page = (ROOT / name).read_text()
    assert not avoided(without_glossary(page) if name == "docs/development.md" else page)


def test_code_is_left_out() -> None:
    assert avoided("Told\nof `told`, that\nof a `` whom ``:\n\n```python\nbeside\n```\nanew") == [
        "Told",
        "that\nof",
        "anew",
    ]
    assert avoided("Mended.\n\n    >>> told()\n    anew\n\nLikewise") == ["Mended", "Likewise"]
    assert first_word(" `Whom`") == "" and first_word("What comes") == "what"
    assert list(comments("a = 1  # told\n#: so\n#: many\n\n# one")) == [(1, "told\nso\nmany"), (5, "one")]
