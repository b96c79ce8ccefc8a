"""What is set in the notebook holds in the ranks."""

from __future__ import annotations

import pytest
import torch
from conftest import Cell, Kernel

SETTINGS = {
    "logging": """
        import logging, sys, pathlib
        class Upper(logging.Formatter):
            def format(self, record): return super().format(record).upper()
        logging.basicConfig(level=logging.INFO, format='%(levelname)s: %(message)s', stream=sys.stdout)
        log = logging.getLogger('mine')
        log.setLevel(logging.DEBUG)
        to_file = logging.FileHandler('log.txt')
        to_file.setFormatter(Upper('%(message)s'))
        log.addHandler(to_file)
        logging.getLogger('quiet').setLevel(logging.ERROR)
        def fn():
            log.debug('to both')
            logging.getLogger('quiet').warning('to none')
            logging.getLogger('other').info('to the root')
        in_ddp(1, fn)
        assert pathlib.Path('log.txt').read_text() == 'TO BOTH\\n'
        to_file.addFilter(lambda record: False)
        in_ddp(1, fn)
        assert pathlib.Path('log.txt').read_text() == 'TO BOTH\\n', 'a filter of a handler that ranks know'
        printed.extend(['DEBUG: to both', 'INFO: to the root'] * 2)
        log.removeHandler(to_file)
        to_file.close()
        logging.root.handlers.clear()
    """,
    "warnings": """
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            def fn(): warnings.warn('now an error')
            try:
                in_ddp(1, fn)
            except UserWarning as exc:
                assert str(exc) == 'now an error'
            else:
                raise AssertionError('ignored')
            in_ddp(1, fn, settings=False)
            warnings.simplefilter('ignore')
            in_ddp(1, lambda: warnings.warn('ignored'))
    """,
    "numbers": """
        import decimal, sys, torch, numpy as np
        def state():
            return (torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
                    torch.are_deterministic_algorithms_enabled(), np.get_printoptions()['precision'], np.geterr(),
                    sys.getrecursionlimit(), decimal.getcontext().prec)
        before = state()
        try:
            torch.set_default_dtype(torch.float64)
            torch.set_float32_matmul_precision('high')
            torch.set_grad_enabled(False)
            torch.use_deterministic_algorithms(True, warn_only=True)
            np.set_printoptions(precision=3)
            np.seterr(divide='raise')
            sys.setrecursionlimit(4321)
            decimal.getcontext().prec = 5
            assert in_ddp(1, state) == state() != before
            assert in_ddp(1, state, settings=False) != state()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_float32_matmul_precision('highest')
            torch.set_grad_enabled(True)
            torch.use_deterministic_algorithms(False)
            np.set_printoptions(precision=8)
            np.seterr(divide='warn')
            sys.setrecursionlimit(3000)
            decimal.getcontext().prec = 28
        assert in_ddp(1, state)[:2] == state()[:2]
    """,
    "pandas and matplotlib": """
        import pandas as pd, matplotlib
        def state(): return pd.get_option('display.max_rows'), matplotlib.rcParams['lines.linewidth']
        with Session(1) as session:
            default = session.run(state)
            pd.set_option('display.max_rows', 7)
            matplotlib.rcParams['lines.linewidth'] = 9.0
            assert session.run(state) == (7, 9.0)
            session.run(lambda: pd.set_option('display.max_rows', 3))
            assert session.run(state) == (3, 9.0)  # a rank's own
            pd.reset_option('display.max_rows')
            matplotlib.rcdefaults()
            assert session.run(state) == default
    """,
    "locale": """
        import locale
        locale.setlocale(locale.LC_ALL, 'C.UTF-8')
        assert in_ddp(1, lambda: locale.setlocale(locale.LC_ALL)) == locale.setlocale(locale.LC_ALL)
    """,
    "patched modules": """
        import statistics
        FACTOR = 3
        def mean(data):
            return FACTOR * sum(data)
        statistics.mean = mean
        def fn():
            import statistics
            return statistics.mean([1, 2])
        assert in_ddp(1, fn) == 9
    """,
    "patched classes": """
        import pandas as pd, fractions, types
        from fastcore.basics import patch
        SCALE = 3
        @patch
        def scaled(self: fractions.Fraction): return self * SCALE
        @patch(as_prop=True)
        def half(self: fractions.Fraction): return self / 2
        @pd.api.extensions.register_dataframe_accessor('rows_of')
        class RowsOf:
            def __init__(self, frame): self.frame = frame
            def count(self): return len(self.frame) * SCALE
        def fn():
            frame = pd.DataFrame({'a': [1]})
            return fractions.Fraction(1, 3).scaled(), fractions.Fraction(1).half, frame.rows_of.count()
        assert in_ddp(1, fn) == fn()
        SCALE = 4
        assert in_ddp(1, fn) == fn()
        try:
            in_ddp(1, fn, settings=False)
        except AttributeError:
            pass
        else:
            raise AssertionError('patched')
    """,
}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_is_set_in_the_notebook_holds_in_ranks(cell: Cell, case: str) -> None:
    cell("printed = []")
    text = cell(SETTINGS[case]).text
    for line in eval(cell("print(printed)").text):
        assert line in text
    assert "to none" not in text and "ignored" not in text


def test_a_patch_that_cannot_travel_is_said_once(kernel: Kernel) -> None:
    kernel.ok("import fractions\nfrom nbdist import in_ddp\nstuck = (i for i in ())")
    kernel.ok("def use(self): return stuck\nfractions.Fraction.use = use")
    said = kernel.ok("assert in_ddp(1, lambda: hasattr(fractions.Fraction, 'use')) is False").text
    assert "fractions.Fraction.use, which the notebook has set, is not set in the ranks" in said
    assert "Fraction.use" not in kernel.ok("in_ddp(1, int)").text
    kernel.ok("fractions.use = use")
    said = kernel.ok("assert in_ddp(1, lambda: hasattr(fractions, 'use')) is False").text
    assert "fractions.use, which the notebook has set, is not set in the ranks" in said


def test_seeds_that_differ_between_ranks(cell: Cell) -> None:
    cell("""
        import random, torch
        def draw(): return random.random(), torch.rand(1).item()
        for how in ({}, {'seed': 3}):
            with Session(2, seed_ranks=True, **how) as session:
                first, second = session.run_all(draw)
                assert first[0] != second[0] and first[1] != second[1]
            with Session(2, **how) as session:
                assert len(set(session.run_all(draw))) == 1
        with Session(2, seed=3) as alike, Session(2, seed=3, seed_ranks=True) as differ:
            assert alike.run(draw) == differ.run(draw)
    """)


def test_what_is_at_its_default_imports_nothing_in_ranks(cell: Cell) -> None:
    """`torch.use_deterministic_algorithms(False)` imports the compiler: most of a second, in each rank of each call."""
    cell("import sys, torch")
    imported = cell("print(in_ddp(2, lambda: 'torch._inductor' in sys.modules))").text.strip()
    assert imported == str(torch.__version__.startswith("2.5."))  # which imports it itself
