"""`nbdist.attach`."""

from __future__ import annotations

from ...checks import nearest
from ...errors import NbdistError, entry
from ...wire.session_folder import SessionFolder, names
from ..session import Session
from . import starting


@entry
def attach(name: str) -> Session:
    """Return a session that was made with `name=`, and show the output of its last call from the beginning.

    Output that follows is shown in the same cell, live. `result()` of the session waits for the value of the call. If
    the keeper of the session has ended, for example when the machine restarted, `replay` and `result` still work.

    Args:
        name: The name of the session.

    Raises:
        NbdistError: There is no session with this name; it is on another machine; or it was made with a different
            version of nbdist or Python.
        PermissionError: Other users can access the session's folder.

    Examples:
        >>> from nbdist import Session
        >>> session = Session(2, name="doctest", devices="cpu")
        >>> session.run(max, 3, 5)
        5
        >>> again = attach("doctest")
        >>> again.result()
        5
        >>> again.close()
    """
    folder = find_folder(name)
    if other := folder.other_version():
        raise NbdistError(
            f"the session {name!r} was made with {other}: attach to it with the same version. "
            f"`python -m nbdist replay {name}` shows its output with any version"
        )
    session = open_session(folder)
    session._follow()
    return session


def find_folder(name: str) -> SessionFolder:
    """Return the folder of a session on this machine. Raises `NbdistError` if there is none."""
    folder = SessionFolder(name)
    known = names()
    if name not in known:
        there = ", ".join(map(repr, known)) if known else "none: Session(2, name='...') starts one"
        raise NbdistError(f"there is no session {name!r}. Sessions with a name: {there}{nearest(name, known)}")
    if host := folder.elsewhere():
        raise NbdistError(f"the session {name!r} is on another machine: attach to it on {host}")
    return folder


def open_session(folder: SessionFolder) -> Session:
    """Return the session of a folder, and show none of its output."""
    session = object.__new__(Session)
    session._options, executor, session._engine = starting.find(folder)
    session._begin(executor)
    return session
