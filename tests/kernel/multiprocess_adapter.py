"""multiprocess' own test suite, run over our context: `python tests/kernel/multiprocess_adapter.py [METHOD]`.

The suite is the one that is installed with multiprocess. It is run as the library runs it for its own start methods:
with METHOD, "nbdist" or one of those, as the start method of everything in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Tests that the library passes with its own `forkserver` and that fail here, each with the reason.
BY_DESIGN = {
    "test_queue_feeder_on_queue_feeder_error": "what cannot be pickled raises CaptureError, which names it",
    "test_noforkbomb": "a program without a guard works: it is not run again in each process",
    "test_context": "a process that is spawned by another context while set_start_method('nbdist') holds is told of a "
    "method that it does not know",
}

SUITE = """
import multiprocess.tests

import nbdist

nbdist.context("multiprocess")
multiprocess.tests.install_tests_in_module_dict(globals(), {method!r})
"""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    import pytest

    for item in items:
        reason = BY_DESIGN.get(item.name) if os.environ["NBDIST_SUITE_METHOD"] == "nbdist" else None
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def main(method: str = "nbdist", *arguments: str) -> int:
    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "test_suite.py"
        suite.write_text(SUITE.format(method=method))
        path = os.pathsep.join([folder, str(here.parent), str(here.parents[2])])
        env = {**os.environ, "PYTHONPATH": path, "NBDIST_SUITE_METHOD": method}
        command = [sys.executable, "-m", "pytest", "-p", "multiprocess_adapter", "-p", "no:cacheprovider"]
        options = ["-c", os.devnull, "--rootdir", folder, "-q", "-rfE", "--timeout", "90", "-W", "ignore"]
        return subprocess.call([*command, *options, "test_suite.py", *arguments], cwd=folder, env=env)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
