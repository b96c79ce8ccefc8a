"""The reasons why the process of a rank has ended, as texts that follow the name of the rank."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence

NEVER_STARTED = "was never started: the fork server was lost, or is out of descriptors (see ulimit -n)"
SILENT = "has closed its connection to the notebook: did something in it close all descriptors?"
#: Of the ranks of a process, in what that process forks.
NOT_OURS = "belongs to the process that this one was forked from"
#: Why a rank ends by itself after it has reported an exception.
NO_GROUP = "could not join the process group"
NO_GPU = "cannot use its GPU any more, after a CUDA error"
#: Of a worker whose task of Ray's runs where other versions are; to be formatted with the differences.
OTHER_VERSIONS = "cannot work: {}, as Ray's process there reports"

_HINTS = {
    "SIGKILL": ": out of memory? Nothing in nbdist sent this signal",
    "SIGBUS": ": /dev/shm full?",
    "SIGSEGV": ": a crash in compiled code",
}
_LIMITS = {
    errno.EAGAIN: ": the limit of processes (ulimit -u, or that of the container) is reached",
    errno.ENOMEM: ": there is no memory for another process",
    errno.EMFILE: ": the fork server's limit of open files (ulimit -n) is reached",
}


def describe_status(status: int | None) -> str:
    """Describe a wait status: the exit code, or the signal by name and its likely reason."""
    if status is None:
        return "disappeared: its exit status could not be read (was the fork server killed?)"
    if status >= 0:
        return f"left with exit code {status} before its function returned"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}{_HINTS.get(name, '')}"


def lost_in_import(modules: Sequence[str], status: int) -> str:
    """Describe the end of the fork server, given its wait status, while it imported modules for a rank."""
    ended = describe_status(status) if status < 0 else f"ended with exit code {status}"
    which = "one of " if len(modules) > 1 else ""
    return f"was never started: the fork server {ended} while it imported {which}{', '.join(modules)}"


def not_started(number: int) -> str:
    """Describe the failure of a fork by the number of the system's error."""
    return f"could not be started: {os.strerror(number)}{_LIMITS.get(number, '')}"


def lost_with_node(node: str, why: str) -> str:
    """Describe the loss of a node of a cluster, or of nbdist's process there."""
    return f"was lost with {node}, or with nbdist's process there: {why}"


def lost_with_head(why: str) -> str:
    """Describe the loss of the head of a cluster."""
    return f"was lost: so was the head of the cluster ({why})"


def lost_with_task(why: str) -> str:
    """Describe the loss of Ray's process that ran the task of a worker."""
    return f"was lost with the process of Ray that it worked in: {why}"


def lost_connection(words: str) -> str:
    """Describe the end of the process between the notebook and the cluster, with its last output."""
    return "was lost: the connection to the Ray cluster has ended" + (f" ({words})" if words else "")
