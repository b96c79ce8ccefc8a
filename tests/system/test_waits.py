"""Processes that wait for one another, as `/proc` shows them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import LINUX, poll

from nbdist.system import pipes, waits

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
            return any(pipes._written_pipes(one) for one in family) and waits.at_rest(process.pid)

        assert poll(lambda: waits.call(process.pid, process.pid) is not None and writes())
        if stuck:
            assert poll(lambda: pipes.full_pipe(process.pid, waits.descendants(process.pid)) is not None)
        else:
            assert pipes.full_pipe(process.pid, waits.descendants(process.pid)) is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


#: Programs whose threads wait for what no other process can cause.
ALONE = {
    "reads its own pipe": "import os; read, write = os.pipe(); os.read(read, 1)",
    "reads its own pair of sockets": "import socket; here, there = socket.socketpair(); here.recv(1)",
    "waits for an event": "import threading; threading.Event().wait()",
    "joins a thread that reads its own pipe": """
        import os, threading
        read, write = os.pipe()
        threading.Thread(target=os.read, args=(read, 1)).start()
        threading.Event().wait()
    """,
    "awaits an event": """
        import asyncio
        async def wait():
            await asyncio.Event().wait()
        asyncio.run(wait())
    """,
}
#: Programs whose wait another program, a signal or the time may end.
NOT_ALONE = {
    "reads the terminal or a pipe of its parent": "import os; os.read(0, 1)",
    "reads a FIFO": """
        import os, tempfile
        path = os.path.join(tempfile.mkdtemp(), "fifo")
        os.mkfifo(path)
        file = os.open(path, os.O_RDWR)
        os.unlink(path)
        os.read(file, 1)
    """,
    "has a thread that sleeps": """
        import threading, time
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        threading.Event().wait()
    """,
    "has a timer": """
        import threading
        threading.Timer(1000, print).start()
        threading.Event().wait()
    """,
    "handles a signal": """
        import signal, threading
        signal.signal(signal.SIGUSR1, lambda *_: None)
        threading.Event().wait()
    """,
    "waits for a semaphore that other processes may have": """
        import multiprocessing
        multiprocessing.Semaphore(0).acquire()
    """,
    "waits for a connection": """
        import socket, tempfile
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(tempfile.mkdtemp() + "/socket")
        sock.listen()
        sock.accept()
    """,
    "reads a TCP connection to itself": """
        import socket
        listener = socket.create_server(("127.0.0.1", 0))
        sock = socket.create_connection(listener.getsockname())
        sock.recv(1)
    """,
    "has a child, and a handler of its end": """
        import signal, subprocess, threading
        signal.signal(signal.SIGCHLD, lambda *_: None)
        child = subprocess.Popen(["sleep", "1000"])
        threading.Event().wait()
    """,
}


@pytest.mark.parametrize(("program", "alone"), [(one, True) for one in ALONE] + [(one, False) for one in NOT_ALONE])
def test_a_wait_that_only_the_process_itself_could_end(program: str, alone: bool) -> None:
    code = textwrap.dedent((ALONE if alone else NOT_ALONE)[program]) + "\n"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=subprocess.PIPE)
    try:
        if alone:
            assert poll(lambda: waits.at_rest(process.pid) and pipes.wakers(process.pid) == set())
        else:
            assert poll(lambda: waits.use(process.pid) is not None and _asleep(process.pid))
            assert pipes.wakers(process.pid) != set()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _asleep(pid: int) -> bool:
    """Return whether a process has started, and used no CPU time for a moment since."""
    before = waits.use(pid)
    time.sleep(0.2)
    now = waits.use(pid)
    return before is not None and now == before and waits.at_rest(pid)
