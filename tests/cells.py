"""Files of cells: what tests run in kernels, in ranks and as scripts, where ruff reads it."""

from __future__ import annotations

import re
from pathlib import Path


def cells(path: str) -> dict[str, str]:
    """The texts of a file's cells by their names.

    A cell begins below a line `# %% its name`, which is not part of it: its first line is line 1 in tracebacks. It ends
    with its last line that is not blank. What is above the first cell belongs to none.

    Args:
        path: As seen from `tests`, such as `kernel/cells/widgets.py`.

    Raises:
        ValueError: There are two cells of one name.
    """
    _, *parts = re.split(r"^# %% (.+)\n", (Path(__file__).parent / path).read_text(), flags=re.MULTILINE)
    found = {name: text.rstrip() + "\n" for name, text in zip(parts[::2], parts[1::2], strict=True)}
    if 2 * len(found) < len(parts):
        raise ValueError(f"{path}: two cells of one name")
    return found
