"""`nbdist.context`: `multiprocessing` and `multiprocess` with processes from the fork server."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from ... import engines
from ...capture import messages
from ...checks import check_choice
from ...errors import NbdistError, entry
from ..calls.arguments import check_platform
from ..cell.cell import Cell
from .classes import make
from .processes import follow_cells, watch_interrupts


@entry
def context(package: str = "multiprocess") -> Any:
    """Return a context of `multiprocess` or `multiprocessing` whose processes come from the fork server.

    It has the attributes of every context (`Process`, `Pool`, `Queue`, `Pipe`, `Event`, `Lock`, `Value`, `Manager` and
    so on), with the package's own code. Nothing is forked from the kernel. Functions, classes and values of cells are
    pickled as for `in_ddp`, as arguments and in messages. Output of the processes appears in the cell that started
    them. An interrupt of the notebook reaches them, and they end with the kernel. A pool that has lost a worker raises
    `WorkerDied`. After the first call, `get_context("nbdist")` of the package returns the same context.

    Args:
        package: "multiprocess", which `pip install "nbdist[multiprocess]"` brings, or "multiprocessing": the standard
            library's, which `torch.utils.data.DataLoader(multiprocessing_context=...)` and
            `concurrent.futures.ProcessPoolExecutor(mp_context=...)` take.

    Raises:
        ValueError: `package` is another package.
        NbdistError: `multiprocess` is not installed.
        NotImplementedError: The system is Windows.

    Examples:
        >>> scale = 10
        >>> def scaled(x):
        ...     return scale * x
        >>> with context().Pool(2) as pool:
        ...     pool.map(scaled, range(4))
        [0, 10, 20, 30]
    """
    check_platform()
    check_choice(package, ("multiprocess", "multiprocessing"), name="package")
    if importlib.util.find_spec(package) is None:
        raise NbdistError(
            'multiprocess is not installed: pip install "nbdist[multiprocess]", or use the standard library\'s: '
            'nbdist.context("multiprocessing")'
        )
    if not engines.resolve(None).local:
        Cell().notice("the processes of a context run on this machine, not on the cluster; parallel_map runs there")
    made = _make(package)
    messages.install(package)
    watch_interrupts()
    follow_cells()
    return made


#: The context of a library, made once.
_make = functools.cache(make)
