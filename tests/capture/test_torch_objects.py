"""Objects of torch that need their own way to be pickled arrive, in both directions."""

from __future__ import annotations

import pytest
from cells import cells
from conftest import Cell

CELLS = cells("capture/cells/torch_objects.py")


@pytest.mark.parametrize("case", CELLS)
def test_a_torch_object_arrives(cell: Cell, case: str) -> None:
    cell(CELLS[case])
