"""Settings of the notebook hold in the ranks."""

from __future__ import annotations

import logging
import pickle
import signal
import sys
import threading
import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from cells import cells
from conftest import Cell, Kernel

from nbdist import Session, in_ddp
from nbdist.capture.registered_names import may_be
from nbdist.capture.registries import Entry, enter
from nbdist.capture.settings import SettingsSender
from nbdist.engines import forkserver

SETTINGS = cells("capture/cells/settings.py")
RANKS = 1


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_the_notebook_are_sent_to_ranks(cell: Cell, case: str) -> None:
    cell("printed = []")
    text = cell(SETTINGS[case]).text
    for line in eval(cell("print(printed)").text):
        assert line in text
    assert "to none" not in text and "ignored" not in text


def test_a_warning_names_a_patch_that_cannot_be_sent(kernel: Kernel) -> None:
    kernel.ok("import fractions\nfrom nbdist import in_ddp\nstuck = (i for i in ())")
    kernel.ok("def use(self): return stuck\nfractions.Fraction.use = use")
    said = kernel.ok("assert in_ddp(1, lambda: hasattr(fractions.Fraction, 'use')) is False").text
    assert "fractions.Fraction.use, which the notebook has set, is not set in the ranks" in said
    assert "Fraction.use" not in kernel.ok("in_ddp(1, int)").text
    kernel.ok("fractions.use = use")
    said = kernel.ok("assert in_ddp(1, lambda: hasattr(fractions, 'use')) is False").text
    assert "fractions.use, which the notebook has set, is not set in the ranks" in said


def test_a_library_that_holds_the_notebook_is_no_registry(kernel: Kernel) -> None:
    """plotly keeps IPython's shell, with all variables of the notebook in it; a console keeps these alone."""
    kernel.ok("import fractions, copyreg, numpy\nfrom nbdist import in_ddp\ndata = numpy.ones(1 << 18)")
    kernel.ok("class Own: ...\nvars(fractions).update(shell=get_ipython(), names=globals())")
    kernel.ok("copyreg.pickle(Own, repr)")
    assert kernel.ok("assert in_ddp(1, lambda: hasattr(fractions, 'names')) is False").text == ""
    kernel.ok("del fractions.shell, fractions.names, copyreg.dispatch_table[Own]")


def test_seeds_that_differ_between_ranks(cell: Cell) -> None:
    cell(cells("capture/cells/seeds.py")["seeds"])


@pytest.mark.started
def test_default_settings_import_nothing_in_ranks(kernel: Kernel) -> None:
    """`torch.use_deterministic_algorithms(False)` imports the compiler: most of a second, in each rank of each call."""
    kernel.ok("import sys, torch\nfrom nbdist import in_ddp")
    imported = kernel.ok("print(in_ddp(2, lambda: 'torch._inductor' in sys.modules))").text.strip()
    assert imported == str(torch.__version__.startswith("2.5."))  # which imports it itself


def test_polars_at_its_defaults_is_not_imported_in_ranks(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    """An import takes 0.3 s of CPU in each rank; a server that had imported it would import all else a second time."""
    pytest.importorskip("polars")
    assert not session.run(lambda: "polars" in sys.modules)
    forkserver.stop()  # a new one writes where capfd reads
    assert in_ddp(1, lambda: "polars" in sys.modules, imports="import polars")
    assert "polars" not in capfd.readouterr().err


@pytest.mark.started
def test_scikit_learn_is_imported_in_ranks_for_changed_options_alone() -> None:
    sklearn = pytest.importorskip("sklearn")
    forkserver.stop()  # another test may have asked it to import scikit-learn
    assert not in_ddp(1, lambda: "sklearn" in sys.modules)
    with Session(1) as session, sklearn.config_context(working_memory=7):
        assert session.run(lambda: sys.modules["sklearn"].get_config()["working_memory"]) == 7
        sklearn.set_config(working_memory=1024)
        assert session.run(lambda: sys.modules["sklearn"].get_config()["working_memory"]) == 1024


def test_a_library_keeps_its_handlers_for_itself() -> None:
    """A handler of a signal, and a formatter, that cannot be sent cost nothing else, and are not warned about."""

    class Colored(logging.Formatter):
        """A formatter that holds what cannot be pickled, as colorlog's does."""

        lock = threading.Lock()

        def __init__(self) -> None:
            super().__init__()
            self.own = threading.Lock()

    Colored.__module__ = "colorlog"
    handler, logger = logging.StreamHandler(), logging.getLogger("of.a.library")
    handler.setFormatter(Colored())
    before = signal.signal(signal.SIGUSR1, lambda *_: Colored.lock.acquire())
    signal.getsignal(signal.SIGUSR1).__module__ = "pytest_timeout"  # type: ignore[union-attr]
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = SettingsSender().take()
    finally:
        logger.removeHandler(handler)
        signal.signal(signal.SIGUSR1, before)
    assert "SIGUSR1" not in pickle.loads(found["Python"])["signals"]
    assert found["logging"]


def test_a_name_that_a_cell_registers_leaves_the_library_its_own() -> None:
    library: Any = types.ModuleType("library")
    own, years, names = object(), np.dtype("M8[Y]"), {"s", "t"}
    library.makers, library.kinds = {"s": own}, [years, "s"]
    found = [may_be(None, years, names), may_be(None, "s", names), may_be("s", own, names), may_be("u", own, names)]
    assert found == [False, True, True, False]
    leave = [
        enter(Entry(library, "makers", "s", object(), by_name=True)),
        enter(Entry(library, "makers", "t", own, by_name=True)),
        enter(Entry(library, "kinds", None, "s", by_name=True)),
        enter(Entry(library, "kinds", None, np.dtype("M8[as]"))),  # equality with years raises TypeError
    ]
    assert library.makers == {"s": own, "t": own} and len(library.kinds) == 3
    for undo in leave:
        undo()
    assert library.makers == {"s": own} and library.kinds == [years, "s"]
