"""The graph of a workflow's steps and columns: Mermaid's text, and a picture where Graphviz is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .ops.step import Step


@dataclass(frozen=True)
class Graph:
    """The graph of steps and of the columns that go from one step to the next. A notebook shows it as a picture."""

    nodes: tuple[tuple[str, str], ...]
    """The name and the text of each step, and of each column at the beginning or the end."""
    edges: tuple[tuple[str, str, str], ...]
    """The source node, the target node, and the columns between them."""

    @property
    def mermaid(self) -> str:
        """Return the graph as text for Mermaid, which JupyterLab, GitHub and others draw."""
        nodes = [f'  {name}["{_quoted(text)}"]' for name, text in self.nodes]
        edges = [f'  {one} -- "{_quoted(text)}" --> {other}' for one, other, text in self.edges]
        return "\n".join(["flowchart LR", *nodes, *edges])

    @property
    def dot(self) -> str:
        """Return the graph as text for Graphviz."""
        nodes = [f'  {name} [label="{_escaped(text)}"];' for name, text in self.nodes]
        edges = [f'  {one} -> {other} [label="{_escaped(text)}"];' for one, other, text in self.edges]
        return "\n".join(["digraph {", "  rankdir=LR; node [shape=box];", *nodes, *edges, "}"])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return SVG, if the program `dot` is installed, and text that JupyterLab draws."""
        found = {"text/plain": self.mermaid, "text/vnd.mermaid": self.mermaid}
        if program := shutil.which("dot"):
            found["image/svg+xml"] = subprocess.run(
                [program, "-Tsvg"], input=self.dot, capture_output=True, text=True, check=True
            ).stdout
        return found


def graph(steps: Sequence[Step], outputs: Collection[str]) -> Graph:
    """Return the graph of the steps. If the outputs are unknown, as before `fit`, it ends with the steps."""
    nodes: list[tuple[str, str]] = []
    edges: dict[tuple[str, str], list[str]] = {}
    made: dict[str, str] = {}  # column → the node that it comes from

    def origin(column: str) -> str:
        if column not in made:
            made[column] = f"in{len(nodes)}"
            nodes.append((made[column], column))
        return made[column]

    for number, step in enumerate(steps):
        sources = {column: origin(column) for column in sorted(step.needs(set(step.adds)))}
        name = f"step{number}"
        nodes.append((name, type(step).__name__))
        for column, source in sources.items():
            edges.setdefault((source, name), []).append(column)
        made |= dict.fromkeys(step.adds, name)
    for number, column in enumerate(outputs):
        source = origin(column)
        nodes.append((f"out{number}", column))
        edges.setdefault((source, f"out{number}"), []).append(column)
    return Graph(tuple(nodes), tuple((*ends, ", ".join(columns)) for ends, columns in edges.items()))


def _quoted(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
