"""The examples in the docstrings of public names run, and there is one in each."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest
from conftest import Kernel

import nbdist
import nbdist.fastai
from nbdist import in_ddp
from nbdist.kernel.magics.magics import DdpMagics

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def check_example(name: str, obj: Any, names: dict[str, Any]) -> None:
    """Run what the docstring of `obj` shows, with `names` at hand, in `__main__` as in a notebook."""
    names = {"__name__": "__main__", **names}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(obj) or "", names, name, None, 0)
    assert example.examples, "a public name shows how it is used"
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(example, out=report.append)
    assert not result.failed, "".join(report)


@pytest.mark.parametrize("name", sorted(nbdist.__all__))
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    obj: Any = getattr(nbdist, name)
    check_example(name, obj, {name: obj, "in_ddp": in_ddp})


@pytest.mark.parametrize("name", sorted(nbdist.fastai.__all__))
def test_example_of_fastai(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    obj = getattr(nbdist.fastai, name)
    check_example(f"nbdist.fastai.{name}", obj, {name: obj})


def test_example_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_example("in_ddp.options", in_ddp.options, {"in_ddp": in_ddp})


def test_example_of_the_magics(kernel: Kernel) -> None:
    """Each prompt begins a cell of a notebook."""
    cells = doctest.DocTestParser().get_examples(inspect.getdoc(DdpMagics.ddp) or "")
    assert cells
    for cell in cells:
        shown = kernel.ok(cell.source).text
        assert doctest.OutputChecker().check_output(cell.want, shown, FLAGS), f"{cell.source}shows {shown}"
