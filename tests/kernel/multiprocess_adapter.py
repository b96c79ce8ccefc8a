"""multiprocess' own test suite, run over our context: `python tests/kernel/multiprocess_adapter.py FOLDER [METHOD]`.

FOLDER holds the unpacked source distribution of the release that is installed (`make multiprocess` fetches it); library
and suite are taken from there, by a link in a folder of installed packages, so that servers import the library for all
processes, as they do for users. The suite is run in one piece, as the library runs it for its own start methods: with
METHOD, "nbdist" or one of those, as the start method of everything in it. It fails, too, if files are left behind.
"""

from __future__ import annotations

import os
import signal
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

assert multiprocess.tests.__file__.startswith({packages!r}), multiprocess.tests.__file__
nbdist.context("multiprocess")
multiprocess.tests.install_tests_in_module_dict(globals(), {method!r})
"""


def pytest_collection_modifyitems(items: list[Any]) -> None:
    import pytest

    for item in items:
        reason = BY_DESIGN.get(item.name) if os.environ["NBDIST_SUITE_METHOD"] == "nbdist" else None
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def main(folder: str, method: str = "nbdist", *arguments: str) -> int:
    here, release = Path(__file__).resolve(), Path(folder).resolve() / "py{}.{}".format(*sys.version_info)
    with tempfile.TemporaryDirectory() as suite, tempfile.TemporaryDirectory(prefix="mp", dir="/tmp") as temporary:
        packages = Path(suite) / "site-packages"
        packages.mkdir()
        for part in release.iterdir():
            (packages / part.name).symlink_to(part)
        (Path(suite) / "test_suite.py").write_text(SUITE.format(method=method, packages=str(packages)))
        path = os.pathsep.join([str(packages), suite, str(here.parent), str(here.parents[2])])
        env = {**os.environ, "PYTHONPATH": path, "TMPDIR": temporary, "NBDIST_SUITE_METHOD": method}
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # a program that is run in the background inherits that it is ignored
        command = [sys.executable, "-m", "pytest", "-p", "multiprocess_adapter", "-p", "no:cacheprovider"]
        options = ["-c", os.devnull, "--rootdir", suite, "-q", "-rfE", "--timeout", "90", "-W", "ignore"]
        status = subprocess.call([*command, *options, "test_suite.py", *arguments], cwd=suite, env=env)
        left = sorted(str(path.relative_to(temporary)) for path in Path(temporary).rglob("*"))
    if left:
        print(f"left behind in the folder for temporary files: {left}")
    return status or bool(left)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
