"""The module that test_spared.py loads in the server, below a line that sets `fork_at`."""

# %% a fork fails
import errno
import os

left = fork_at
fork = os.fork


def fails():
    global left
    left -= 1
    if left == 0:
        os.fork = fork
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()


os.fork = fails
