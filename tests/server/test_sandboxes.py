"""Sandboxes and containers: refused system calls, read-only or full folders, small limits, other PID namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cells import cells

CELLS = cells("server/cells/sandboxes.py")
FOUND = "[2000000.0, 2000000.0]\nTrue\n5 True\n[0, 2, 4]\n"

#: What a shell does before it becomes the interpreter, by what is tried.
SHELL = {
    "no reading of another process's memory": "refuse 310",
    "no prctl": "refuse 157",
    "no pidfd": "refuse 424,434",
    "no choice of cores, no posix_fallocate, no advice on memory": "refuse 203,204,285,28",
    "a /dev/shm of 64 kB": "mount -t tmpfs -o size=64k tmpfs /dev/shm",
    "a read-only /dev/shm": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "a full temporary folder": "mount -t tmpfs -o size=4k tmpfs $TMPDIR; dd if=/dev/zero of=$TMPDIR/x bs=4k || true",
    "a /proc without other users' processes": "mount -t proc -o hidepid=2 proc /proc",
    "a small address space and stack": "ulimit -v 8000000; ulimit -s 1024; ulimit -l 0",
    "signals that are ignored": "trap '' INT TERM HUP",
    "closed standard descriptors": "exec 0<&- 1>&- 2>&-",
    "a umask that takes all permissions away": "umask 777",
}
#: Takes from root the right to ignore the permissions of files.
USER = "setpriv --bounding-set=-dac_override,-dac_read_search"
NAMESPACES = [
    shutil.which("unshare"),
    *("--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc"),
]


@pytest.fixture
def tried(tmp_path: Path) -> Path:
    """A folder with the scripts; its path has a space and a letter that is not ASCII."""
    if os.geteuid() or NAMESPACES[0] is None or not shutil.which("setpriv") or os.uname().machine != "x86_64":
        pytest.skip("needs root, unshare and setpriv, to make namespaces, and the numbers of x86-64's system calls")
    folder = tmp_path / "a földer"
    folder.mkdir()
    (tmp_path / "temporary").mkdir()
    for name, text in (("refuse.py", "a command for which system calls fail"), ("work.py", "all that ranks do")):
        (folder / name).write_text(CELLS[text])
    command = [*map(str, NAMESPACES), sys.executable, "refuse.py", "424", "true"]
    if subprocess.run(command, cwd=folder, capture_output=True).returncode:
        pytest.skip("this system lets root make no namespaces, or refuse no system calls")
    return folder


def works(folder: Path, *names: str, found: str = FOUND, more: str = "") -> None:
    refused = [SHELL[name].split()[1] for name in names if SHELL[name].startswith("refuse")]
    shell = "; ".join(SHELL[name] for name in names if not SHELL[name].startswith("refuse"))
    refusing = f"{sys.executable} refuse.py {','.join(refused)}" if refused else ""
    command = [
        "/bin/bash",
        "-c",
        f'set -e; {shell or ":"}; exec {USER} {refusing} "$@"',
        "bash",
        sys.executable,
        "work.py",
    ]
    state = str(folder.parent / "state")
    environ = {**os.environ, "TMPDIR": str(folder.parent / "temporary"), "XDG_STATE_HOME": state}
    done = subprocess.run(
        [*map(str, NAMESPACES), *command, "found", more], cwd=folder, env=environ, capture_output=True
    )
    written = (folder / "found").read_text() if (folder / "found").exists() else ""
    assert (done.returncode, written) == (0, found), done.stderr.decode()


def test_all_that_a_sandbox_refuses_at_once(tried: Path) -> None:
    works(tried, *SHELL, found=FOUND + "7 8\n", more="and a session with a name")


@pytest.mark.long("a script of its own for each")
@pytest.mark.parametrize("name", SHELL)
def test_a_sandbox(name: str, tried: Path) -> None:
    works(tried, name, found=FOUND + "7 8\n", more="and a session with a name")
