"""Values that cells assign to attributes of modules and classes: they hold in ranks until they are taken back."""

from __future__ import annotations

import pytest
from cells import cells
from conftest import Kernel

from nbdist.capture.assigned import assigned_in

CELLS = cells("capture/cells/assigned.py")


@pytest.mark.parametrize(
    "cell, chains",
    [
        ("mod.CFG = 2", [("mod", "CFG")]),
        ("a.b.c, other = 1, 2", [("a", "b", "c")]),
        ("mod.CFG += 1", [("mod", "CFG")]),
        ("mod.CFG: int = 1", [("mod", "CFG")]),
        ("mod.CFG['lr'] = 1", [("mod", "CFG", "")]),
        ("mod.CFG[0].lr = 1", [("mod", "CFG", "", "lr")]),
        ("del mod.CFG['lr']", [("mod", "CFG", "")]),
        ("setattr(mod, 'CFG', 2)", [("mod", "CFG")]),
        ("setattr(mod, name, 2)", []),
        ("mod.CFG.update(lr=1)", [("mod", "CFG", "")]),
        ("mod.train(1)", [("mod", "()")]),
        ("with x:\n    if y:\n        mod.CFG = 2", [("mod", "CFG")]),
        ("for mod.CFG in x: pass", [("mod", "CFG")]),
        ("class A:\n    mod.CFG = 2", [("mod", "CFG")]),
        ("def f():\n    mod.CFG = 2", []),
        ("f = lambda: setattr(mod, 'CFG', 2)", []),
        ("f().CFG = 2", []),
        ("CFG['lr'] = 1", [("CFG", "")]),
        ("x = mod.CFG", []),
        ("not python.", []),
    ],
)
def test_assignments_to_attributes_are_found_in_a_cell(cell: str, chains: list[tuple[str, ...]]) -> None:
    assert list(assigned_in(cell)) == chains


def test_attributes_set_in_modules_are_sent_to_ranks(kernel: Kernel) -> None:
    kernel.ok(CELLS["begin"])
    kept = (
        "values",
        "variables with a module's objects",
        "the same cell",
        "taken back",
        "deleted",
        "set by a function of the module",
        "a method of a class",
    )
    for name in kept:
        kernel.ok(CELLS[name])
    said = kernel.ok(CELLS["a class that cannot be changed in a rank"]).text
    assert "guarded.Guarded.width is not set in this rank: TypeError('it is final')" in said


def test_a_warning_names_an_attribute_that_cannot_be_sent(kernel: Kernel) -> None:
    kernel.ok(CELLS["begin"])
    said = kernel.ok(CELLS["too large"]).text
    assert "own_settings.RATE, which the notebook has set, is not set in the ranks: it has more than 1 MB" in said
    assert "own_settings.RATE" not in kernel.ok("in_ddp(1, int)").text


def test_threads_that_call_at_once_have_the_same_patches(kernel: Kernel) -> None:
    kernel.ok(CELLS["threads"])
    for number in range(3):
        kernel.ok(f"string.capwords = lambda text: {number}\nassert call_all() == [{number}] * 3, call_all()")
