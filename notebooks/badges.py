"""Badges below a notebook's title, which open the notebook in Colab and in Kaggle.

python notebooks/badges.py    gives all notebooks the badges of the repository in pyproject.toml, if it has one
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import nox.project

NOTEBOOKS = Path(__file__).resolve().parent
#: By place: its picture, and what comes before OWNER/NAME/blob/... in the address that opens a file of GitHub there.
PLACES = {
    "Colab": (
        "https://colab.research.google.com/assets/colab-badge.svg",
        "https://colab.research.google.com/github/",
    ),
    "Kaggle": (
        "https://kaggle.com/static/images/open-in-kaggle.svg",
        "https://kaggle.com/kernels/welcome?src=https://github.com/",
    ),
}
BADGES = re.compile(r"(^\[!\[Open in .*\n)+\n?", re.MULTILINE)


def repository(pyproject: Path = NOTEBOOKS.parent / "pyproject.toml") -> str:
    """Return `OWNER/NAME` on GitHub, from the URL `Source` in pyproject.toml; an empty string if it has none."""
    project = nox.project.load_toml(pyproject)["project"]
    address: str = project.get("urls", {}).get("Source", "")
    return address.removeprefix("https://github.com/").strip("/")


def with_badges(text: str, name: str, repository: str) -> str:
    """Return a notebook's first text with badges of this repository below the title; without badges if it is empty."""
    title, _, rest = BADGES.sub("", text).partition("\n\n")
    file = f"{repository}/blob/main/notebooks/{name}.ipynb"
    badges = "\n".join(f"[![Open in {place}]({picture})]({opens}{file})" for place, (picture, opens) in PLACES.items())
    return "\n\n".join([title, badges, rest] if repository else [title, rest])


def main() -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        node = nbformat.read(path, as_version=4)
        node.cells[0].source = with_badges(node.cells[0].source, path.stem, repository())
        nbformat.write(node, path)


if __name__ == "__main__":
    main()
