"""Print docstrings, messages and paragraphs for the reading test of CONTRIBUTING.md, drawn by a seed.

python tests/docs/draw.py SEED [COUNT_OF_DOCSTRINGS COUNT_OF_MESSAGES COUNT_OF_PARAGRAPHS]
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTS = (60, 40, 20)
Text = tuple[str, str]
"""The place of a text, `file:line`, and the text."""


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """Parse each module of nbdist, in the order of their paths."""
    files = sorted((ROOT / "nbdist").rglob("*.py"))
    return [(str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def docstrings() -> list[Text]:
    """Collect the docstrings of modules, classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (f"{name}:{node.body[0].lineno}", text)
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def template(node: ast.expr) -> str:
    """Join the constant parts of a string expression; an ellipsis stands for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "…"


def messages() -> list[Text]:
    """Collect the texts of exceptions that nbdist raises, and of warnings."""
    found = []
    for name, tree in modules():
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            warns = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warn"
            if (isinstance(node, ast.Raise) or warns) and isinstance(call, ast.Call) and call.args:
                text = template(call.args[0])
                if len(re.findall(r"\w+", text)) > 3:
                    found.append((f"{name}:{call.lineno}", text))
    return found


def paragraphs() -> list[Text]:
    """Collect paragraphs, list items and rows of tables of README and docs, without code."""
    found = []
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if file.name[0].isdigit() or file.name == "objects.md":
            continue  # a notebook's page, or a table of code
        text = re.sub(r"^```.*?^```|<!--.*?-->", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)
        for part in re.split(r"\n\s*\n|\n(?=[-|] ?)", text):
            words = re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`", "", part))
            if len(words) > 7 and not part.startswith((":::", "#", "|--")):
                found.append((str(file.relative_to(ROOT)), part.strip()))
    return found


def main(seed: int, *counts: int) -> None:
    chance = random.Random(seed)
    kinds = {"docstring": docstrings(), "message": messages(), "paragraph": paragraphs()}
    for (kind, texts), count in zip(kinds.items(), counts or COUNTS, strict=True):
        for number, (place, text) in enumerate(chance.sample(texts, min(count, len(texts))), 1):
            print(f"[{kind} {number}] {place}\n{text}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["1"]))
