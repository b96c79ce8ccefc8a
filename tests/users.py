"""Actions as another user of the machine, which root can become."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
OTHER = 12345


def as_another_user(action: Callable[[], object]) -> str:
    """Do something as another user, in a process of its own; the name of the exception, or what it returns as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.write(write, str(action()).encode())
        except BaseException as exc:
            os.write(write, type(exc).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with open(read) as file:
        return file.read()
