"""Named sessions from a terminal: `python -m nbdist attach NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...errors import NbdistError, text_of
from .attaching import attach, find_folder, open_session
from .listing import sessions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    parser = argparse.ArgumentParser("python -m nbdist", description="Named sessions of nbdist.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    commands.add_parser("sessions", help="list the sessions")
    for name, about in {
        "attach": "show the output of the last call, and what follows until its end; Ctrl-C leaves the call alone",
        "replay": "show the output that the journal has of the last call",
        "stop": "interrupt the call that runs, as the stop button does",
        "close": "end a session and its ranks, and remove its journal",
    }.items():
        commands.add_parser(name, help=about, description=about).add_argument("name")
    given = parser.parse_args(arguments)
    try:
        return _carry_out(given.command, getattr(given, "name", ""))
    except (NbdistError, OSError, ValueError) as exc:
        print(f"nbdist: {text_of(exc)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nnbdist: left; the call goes on", file=sys.stderr)
        return 130


def _carry_out(command: str, name: str) -> int:
    if command == "sessions":
        print(sessions())
    elif command == "attach":
        return _attach(name)
    else:
        session = open_session(find_folder(name))
        if command == "replay":
            session.replay()
        elif command == "stop":
            session.stop()
        else:
            session.close()
    return 0


def _attach(name: str) -> int:
    """Show the last call of a session until its end; return 1 if the call has failed."""
    session = attach(name)
    try:
        session.result()
    except (KeyboardInterrupt, NbdistError):
        raise
    except BaseException as exc:
        print(f"nbdist: the call has failed: {exc.__cause__ or text_of(exc)}", file=sys.stderr)
        return 1
    return 0
