"""On a system without what only Linux has, such as macOS, nbdist does the same: `without_linux/` takes it all away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Kernel

ROOT = Path(__file__).parent.parent
#: What a user would miss first. The whole core: make matrix ENVIRONMENTS=without-linux
CORE = ["tests/test_everyday_cells.py", "tests/wire/test_parcel.py"]


@pytest.fixture
def without_linux(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the path for the processes that a test starts: a forked one does not read `sitecustomize`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "without_linux"))
    yield


@pytest.mark.long("without what only Linux has")
@pytest.mark.started
def test_no_linux_feature_is_used(without_linux: None, tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    try:
        kernel.ok("from nbdist import Session\nimport os, select, signal")
        kernel.ok(
            "def there():\n"
            "    from nbdist.system import processes\n"
            "    from nbdist.wire import rank_memory, rendezvous\n"
            "    found = hasattr(os, 'memfd_create'), hasattr(select, 'epoll'), hasattr(signal, 'pidfd_send_signal')\n"
            "    return *found, processes.open_pidfd(os.getpid()) >= 0, rank_memory.POSSIBLE, rendezvous._LINUX"
        )
        result = kernel.ok("with Session(2) as session:\n    print(there(), *session.run_all(there))")
        assert result.text == f"{' '.join([str((False,) * 6)] * 3)}\n"
        assert kernel.ok("from nbdist import in_ddp\nprint(in_ddp(0, there))").text == f"{(False,) * 6}\n"
    finally:
        kernel.close()


@pytest.mark.long("without what only Linux has")
@pytest.mark.started
def test_the_core_works_without_it(without_linux: None) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *CORE]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
