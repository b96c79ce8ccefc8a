"""Objects of the standard library and of what notebooks use: each arrives equal or is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import objects
import pytest

CODE = """
import warnings
warnings.simplefilter("ignore")
import numpy as np
import objects
for row in objects.rows():
    print(*row, sep="\\t")
"""


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, ...]]:
    """In a process of their own: some of the objects are threads, event loops and connections."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=objects.__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(line.split("\t")) for line in done.stdout.splitlines() if line.count("\t") == 2]


def test_no_object_of_the_table_arrives_changed(rows: list[tuple[str, ...]]) -> None:
    assert len(rows) >= 500
    assert not [row for row in rows if row[2] == "changed"]


def test_the_page_says_so(rows: list[tuple[str, ...]]) -> None:
    said = dict(re.findall(r"^[|] `(.*)` [|] (.*) [|]$", objects.PAGE.read_text(), re.MULTILINE))
    for package, what, fate in rows:  # other releases have other objects
        if package == "numpy" and np.lib.NumpyVersion(np.__version__) < "2.4.0":
            continue  # some of it became C, and then did not pickle; or pickles only from then on
        known = said.get(what.replace("|", "\\|"))
        assert known is None or known == fate, (what, fate, known)
