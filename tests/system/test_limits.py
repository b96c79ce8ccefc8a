"""The limit of processes and threads: the error, or a notice above it, names the limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from users import OTHER, needs_root

from nbdist import NbdistError
from nbdist.engines import forkserver
from nbdist.system.limits import lack_of_threads


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: can't start new thread",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: Resource temporarily unavailable",
        "RuntimeError: Resource temporarily unavailable",
        "terminate called after throwing 'std::system_error'\n  what():  Resource temporarily unavailable",
    ],
)
def test_an_error_of_a_thread_names_the_limit(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, said in ((20_000, "20,000 of this user (`ulimit -u`), or that of the"), (-1, "reached, that of the")):
        monkeypatch.setattr("resource.getrlimit", lambda kind, most=most: (most, most))
        assert said in lack_of_threads(f"RankDied: rank 1 left\n{words}")


@pytest.mark.parametrize("words", ["BlockingIOError: [Errno 11] Resource temporarily unavailable", "KeyError: 3"])
def test_other_errors_name_no_limit(words: str) -> None:
    assert lack_of_threads(words) == ""


def test_a_fork_server_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(forkserver.interpreter, "start", refuse)
    with pytest.raises(NbdistError, match=r"the fork server could not be started: .*limit of processes \(ulimit -u"):
        forkserver.ForkServer(frozenset())


CALL = "import nbdist\ntry:\n    nbdist.in_ddp(2, int)\nexcept Exception as exc:\n    print(exc)\n"


@needs_root
@pytest.mark.long("starts as another user, under limits")
@pytest.mark.parametrize("most, said", [(1, "the fork server could not be started"), (5, "of this user (`ulimit -u`)")])
def test_a_small_limit_of_processes(most: int, said: str) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to be a user that limits hold for and that can read this interpreter")
    user = ["setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups"]
    reads = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    shell = ["/bin/bash", "-c", f'ulimit -u {most}; exec "$@"', "sh", sys.executable, "-c", CALL]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        environ = {**os.environ, "TMPDIR": folder, "HOME": folder}
        done = subprocess.run([*user, *reads, *shell], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stdout + done.stderr, done
