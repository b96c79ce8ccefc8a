"""Frameworks that launch processes of their own find, in a notebook's ranks, that these are there already."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from cells import cells
from conftest import Kernel

CELLS = cells("integrations/cells/frameworks.py")
TUTORIAL = "transformers as its tutorial of fine-tuning writes it"
pytestmark = pytest.mark.long("other projects' frameworks")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("frameworks"))
    try:
        kernel.ok(CELLS["what all train"])
        yield kernel
    finally:
        kernel.close()


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("lightning", ["Lightning"]),
        ("accelerate", ["an Accelerator of an earlier cell", "accelerate", "what was prepared in an earlier cell"]),
        ("transformers", ["TrainingArguments of an earlier cell", "transformers", TUTORIAL]),
        ("ignite", ["ignite"]),
    ],
)
def test_the_example_of_the_frameworks_documentation_runs(notebook: Kernel, package: str, names: list[str]) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"not installed: {package}")
    for name in names:
        notebook.ok(CELLS[name])
