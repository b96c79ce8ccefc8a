"""The graph of a workflow, and the schema of its outputs."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from nbdist.recsys.etl import Categorify, Compute, Drop, Filter, Workflow

ROWS = pl.DataFrame({"user": ["a", "b", "a"], "rating": [1.0, 4.0, 5.0]})


def workflow() -> Workflow:
    steps = Filter(pl.col("rating") > 0), Categorify("user"), Compute(liked=pl.col("rating") > 3), Drop("rating")
    return Workflow(*steps, tags={"user": ["user", "sparse"], "liked": ["target"]})


def test_columns_go_from_step_to_step() -> None:
    graph = workflow().fit(ROWS, progress=False).graph
    texts = dict(graph.nodes)
    edges = {(texts[one], texts[other], columns) for one, other, columns in graph.edges}
    assert edges == {
        ("rating", "Filter", "rating"),
        ("user", "Categorify", "user"),
        ("rating", "Compute", "rating"),
        ("Categorify", "user", "user"),
        ("Compute", "liked", "liked"),
    }
    assert graph.mermaid.startswith("flowchart LR\n")
    assert {"text/plain", "text/vnd.mermaid"} <= graph._repr_mimebundle_().keys()
    assert ("Categorify" in dict(workflow().graph.nodes).values()) and "liked" not in dict(workflow().graph.nodes)


def test_a_picture_is_drawn_by_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"  # stands for Graphviz, which is not among the tests' dependencies
    program.write_text('#!/bin/sh\n[ "$1" = -Tsvg ] && grep -c digraph\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert workflow().graph._repr_mimebundle_()["image/svg+xml"] == "1\n"


def test_names_are_quoted() -> None:
    graph = Workflow(Compute(**{'a"b': pl.col("x<y")})).graph
    assert '["x&lt;y"]' in graph.mermaid and '[label="x<y"]' in graph.dot


def test_the_schema_has_types_codes_and_tags_and_is_saved(tmp_path: Path) -> None:
    fitted = workflow().fit(ROWS, progress=False)
    assert fitted.schema.rows() == [("user", "int64", 4, ["user", "sparse"]), ("liked", "bool", None, ["target"])]
    fitted.save(tmp_path / "saved")
    assert Workflow.load(tmp_path / "saved").schema.equals(fitted.schema)
    file = tmp_path / "saved" / "workflow.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tags": {"user": "no list"}}))
    with pytest.raises(ValueError, match="`tags` must be lists of texts by column"):
        Workflow.load(tmp_path / "saved")
    with pytest.raises(ValueError, match="`tags` must have a list of texts"):
        Workflow(Categorify("user"), tags={"user": "user"})
    with pytest.raises(ValueError, match="`tags` has 'item', which is not among the outputs"):
        _ = Workflow(Categorify("user"), tags={"item": ["x"]}).fit(ROWS, progress=False).schema
