"""The notebooks as pages of the documentation: docs/notebooks/NAME.md, with the outputs that a reader would see.

python notebooks/pages.py            # the pages
python notebooks/pages.py gallery    # the pictures of docs/notebooks/index.md: the last plot of each notebook

A notebook that the tests have executed (build/notebooks/) is taken from there, as long as its cells are still the same;
the others are executed, with small data. None is executed twice.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
from badges import repository, with_badges
from execute import execute
from nbconvert import MarkdownExporter
from nbformat import NotebookNode
from traitlets.config import Config

from nbdist.recsys.triton import serving

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS, EXECUTED, PAGES = ROOT / "notebooks", ROOT / "build" / "notebooks", ROOT / "docs" / "notebooks"
#: What the tests run them with: few data, two ranks.
SMALL = {"NBDIST_SMALL": "1", "NBDIST_MOVIELENS": "small", "NBDIST_RANKS": "2", "PYTHONPATH": str(ROOT)}
#: Notebooks that set their number of ranks themselves.
OWN_RANKS = {"06_multislot"}
NEEDS_TRITON = {"05_ctr_triton"}

#: Colours of a terminal, and lines of a progress bar that were overwritten.
COLOUR, OVERWRITTEN = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"[^\n\r]*\r(?!\n)")


def executed(name: str) -> NotebookNode:
    """A notebook with its outputs: those that are there already, or new ones."""
    source = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    kept = EXECUTED / f"{name}.ipynb"
    if kept.exists():
        node = nbformat.read(kept, as_version=4)
        whole = all(cell.cell_type != "code" or cell.execution_count or not cell.source for cell in node.cells)
        if whole and [cell.source for cell in node.cells] == [cell.source for cell in source.cells]:
            return node
    if name in NEEDS_TRITON and not serving.exists_for_this_machine():
        print(f"{name}: there is no Triton server for this machine, so its page has no outputs", file=sys.stderr)
        return source
    os.environ.update(SMALL)
    if name in OWN_RANKS:
        del os.environ["NBDIST_RANKS"]
    node, status = execute(NOTEBOOKS / f"{name}.ipynb", EXECUTED)
    if status:
        raise SystemExit(f"{name} fails: the documentation has to show notebooks that run")
    return node


def plain(node: NotebookNode) -> NotebookNode:
    """The outputs as a page can show them: without colours, bars that were overwritten, and widgets."""
    for cell in node.cells:
        if cell.cell_type != "code":
            continue
        outputs = []
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = OVERWRITTEN.sub("", COLOUR.sub("", output.text))
            elif output.output_type == "error":
                output.traceback = [COLOUR.sub("", line) for line in output.traceback]
            elif "application/vnd.jupyter.widget-view+json" in output.data:
                continue
            outputs.append(output)
        cell.outputs = outputs
    return node


def write(name: str) -> None:
    """Write one page, and its plots in the same folder."""
    exporter = MarkdownExporter(
        config=Config({"NbConvertBase": {"display_data_priority": ["text/html", "image/png", "text/plain"]}})
    )
    node = plain(executed(name))
    here = repository() or os.environ.get("GITHUB_REPOSITORY", "")  # the latter in a workflow
    node.cells[0].source = with_badges(node.cells[0].source, name, here)
    page, resources = exporter.from_notebook_node(node, resources={"unique_key": name, "output_files_dir": name})
    for file, data in resources["outputs"].items():
        (PAGES / file).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / file).write_bytes(data)
    title, _, rest = page.partition("\n\n")
    origin = (
        f"*The notebook `notebooks/{name}.ipynb`, executed with small data on CPU ranks: the figures are no benchmark.*"
    )
    (PAGES / f"{name}.md").write_text(f"{title}\n\n{origin}\n\n{rest}", encoding="utf-8")


def write_gallery() -> None:
    """Write the last plot of each notebook into docs/pictures/. A notebook without plots has no picture."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        outputs = [output for cell in executed(path.stem).cells for output in cell.get("outputs", [])]
        plots = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        if plots:
            (ROOT / "docs" / "pictures" / f"{path.stem}.png").write_bytes(base64.b64decode(plots[-1]))


def main() -> None:
    for old in PAGES.glob("[0-9]*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        write(path.stem)


if __name__ == "__main__":
    write_gallery() if sys.argv[1:] == ["gallery"] else main()
