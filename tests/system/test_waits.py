"""Processes that wait for one another, as `/proc` shows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from conftest import LINUX, poll

from nbdist.system import waits

pytestmark = pytest.mark.skipif(not LINUX, reason="only Linux says what a process waits for")

#: Programs that wait forever: the process itself could read the full pipe.
STUCK = {
    "joins a process before it reads the queue": """
        import multiprocessing
        fork = multiprocessing.get_context("fork")
        items = fork.Queue()
        child = fork.Process(target=items.put, args=(bytes(1 << 20),))
        child.start()
        child.join()
    """,
    "waits for a shell": """
        import subprocess
        subprocess.Popen("head -c 1000000 /dev/zero | cat; true", shell=True, stdout=subprocess.PIPE).wait()
    """,
    "reads the other pipe": """
        import subprocess
        writes = "head -c 1000000 /dev/zero >&2"
        subprocess.Popen(writes, shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE).stdout.read()
    """,
    "writes to itself": """
        import os
        os.write(os.pipe()[1], bytes(1 << 20))
    """,
}
#: Programs that wait, and may read the pipe later.
ALIVE = {
    "sleeps": """
        import subprocess, time
        child = subprocess.Popen("head -c 1000000 /dev/zero", shell=True, stdout=subprocess.PIPE)
        time.sleep(1000)
    """,
    "waits for a child with a timeout": """
        import multiprocessing
        fork = multiprocessing.get_context("fork")
        items = fork.Queue()
        child = fork.Process(target=items.put, args=(bytes(1 << 20),))
        child.start()
        child.join(1000)
    """,
    "leaves it to a child": """
        import os, subprocess
        read, write = os.pipe()
        subprocess.Popen(["sleep", "1000"], pass_fds=[read])
        subprocess.Popen("head -c 1000000 /dev/zero", shell=True, stdout=write).wait()
    """,
}


@pytest.mark.parametrize(("program", "stuck"), [(one, True) for one in STUCK] + [(one, False) for one in ALIVE])
def test_a_full_pipe_that_is_never_read(program: str, stuck: bool) -> None:
    lines = (STUCK if stuck else ALIVE)[program].splitlines()
    code = "\n".join(line[8:] for line in lines)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:

        def writes() -> bool:
            family = [process.pid, *waits.descendants(process.pid)]
            return any(waits._written_pipes(one) for one in family) and waits.at_rest(process.pid)

        assert poll(lambda: waits.call(process.pid, process.pid) is not None and writes())
        if stuck:
            assert poll(lambda: waits.full_pipe(process.pid, waits.descendants(process.pid)) is not None)
        else:
            assert waits.full_pipe(process.pid, waits.descendants(process.pid)) is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
