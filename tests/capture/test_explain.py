"""`explain` names what travels with a call, and why."""

from __future__ import annotations

import math

import numpy as np
import pytest
from conftest import Kernel

import nbdist
from nbdist import CaptureError
from nbdist.capture.explain import Explanation, Item, size


def travels(explanation: Explanation) -> dict[str, Item]:
    return {item.name: item for item in explanation.items}


def test_arguments() -> None:
    def fn(*args: object, **kwargs: object) -> float:
        return math.pi

    items = travels(nbdist.explain(fn, np.zeros(1_000_000), 3, name="x"))
    assert items["argument 1"].how == "shared" and items["argument 1"].nbytes >= 8_000_000
    assert items["argument 2"].how == "by value" and items["argument name"].how == "by value"


def test_explain_raises_for_an_argument_that_cannot_be_sent() -> None:
    with pytest.raises(CaptureError, match="argument 1"):
        nbdist.explain(len, (i for i in ()))


def test_sizes_are_printed_with_units() -> None:
    assert [size(n) for n in (0, 999, 1500, 2_000_000, 3_100_000_000)] == ["0 B", "999 B", "1.5 KB", "2.0 MB", "3.1 GB"]


def test_in_a_notebook(kernel: Kernel) -> None:
    kernel.ok("""
import math
import numpy as np
import nbdist
big, unread, small = np.zeros(1_000_000), np.zeros(500_000), {"a": 1}
def helper():
    return big.sum() + math.pi
def fn():
    return helper(), small, np.e
table = nbdist.explain(fn, imports="import math", need="unread")
""")
    text = kernel.ok("print(table)").text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["math"] == ["import"] and rows["np"] == ["import"]
    assert rows["big"][0] == "shared" and rows["big"][-2:] == ["8.0", "MB"]
    assert rows["helper"][:2] == ["by", "value"] and rows["small"][:2] == ["by", "value"]
    assert "warning: unread (4.0 MB) travels, but the function never reads it" in text
    shown = kernel.ok("table").outputs[0]["data"]
    assert "<td>big</td><td>shared</td><td>8.0 MB</td>" in shown["text/html"]
    assert "import" in shown["text/plain"]
