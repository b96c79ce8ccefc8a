"""Objects of the notebook arrive as they are, whatever order their parts are read in, or are refused by name."""

from __future__ import annotations

import pytest
from cells import cells
from conftest import Cell

ARRIVE = cells("capture/cells/arrival.py")
REFUSALS = cells("capture/cells/refusals.py")


@pytest.mark.parametrize("case", ARRIVE)
def test_an_object_arrives_as_in_the_table(cell: Cell, case: str) -> None:
    if "import wrapt" in ARRIVE[case]:
        pytest.importorskip("wrapt")
    cell(ARRIVE[case])


@pytest.mark.long("interpreters of their own")
def test_columns_of_objects_in_polars_frames(cell: Cell) -> None:
    cell(REFUSALS["columns of objects in polars frames"])


def test_outputs_of_earlier_cells_are_sent(cell: Cell) -> None:
    cell("(i for i in ())")  # what is not asked for does not travel
    number = cell("[1, 2, 3]").number
    cell(f"assert in_ddp(1, lambda: (_, _{number}, Out[{number}], In[{number}])) == ([1, 2, 3],) * 3 + ('[1, 2, 3]',)")
    cell(f"number = {number}\n" + REFUSALS["a value that was shown and is not asked for by its number"])


def test_an_object_that_a_rank_cannot_unpickle_is_named(cell: Cell) -> None:
    cell(REFUSALS["what cannot be read in a rank"])
    cell(REFUSALS["a module whose file is gone"])
