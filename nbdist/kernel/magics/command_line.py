"""The command lines of `%ddp` and `%%ddp`."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from IPython.core.error import UsageError

from ...checks import nearest

#: What `%autoddp` puts before a cell.
WHOLE = "--whole-cell"
_OUTPUT: dict[str, Any] = {"choices": ["rank0", "all", "tabs", "none"], "help": "whose output the cell shows"}


def _devices(text: str) -> str | Sequence[str]:
    return text if text in ("cpu", "cuda") else text.split(",")


def _threads(text: str) -> int | str:
    return text if text == "bind" else int(text)


def _checks(text: str) -> str | Sequence[str]:
    return text.split(",") if "," in text else text


def _lines(text: str) -> int | None:
    return None if text == "all" else int(text)


class _Variable(Action):
    """An option that collects several `--env NAME=VALUE` in a dict."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        name, equals, value = str(values).partition("=")
        if not name or not equals:
            parser.error(f"{option_string} must be NAME=VALUE, got {values!r}")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), name: value})


#: How `%ddp start` takes each option of a session (`options.SessionOptions`): arguments of `add_argument`.
_START: dict[str, dict[str, Any]] = {
    "backend": {"help": "of the process group: gloo, nccl"},
    "devices": {"type": _devices, "help": "cpu, cuda, or one for each rank: cuda:0,cuda:2"},
    "threads": {"type": _threads, "help": "for each rank, or bind"},
    "timeout": {"type": float, "help": "seconds that a cell may take"},
    "output": _OUTPUT,
    "lines": {"type": _lines, "help": "of output that a cell shows, or all"},
    "env": {"action": _Variable, "metavar": "NAME=VALUE", "help": "a variable for the ranks; may be repeated"},
    "seed": {"type": int, "help": "seed the ranks once"},
    "seed_ranks": {"action": "store_true", "help": "seed each rank differently"},
    "settings": {"action": "store_false", "help": "leave out what is set in the notebook"},
    "engine": {"help": "local, ray, or an engine of another package"},
    "start": {"choices": ["forkserver", "spawn"], "help": "how ranks start"},
    "hold_on_error": {"action": "store_true", "help": "keep the frames of an error for post-mortem"},
    "on_hang": {"choices": ["say", "raise"], "help": "what happens where ranks wait for what cannot come"},
    "check": {"type": _checks, "help": "of the numbers of each cell: nan, ranks, ranks:N, or nan,ranks"},
    "restarts": {"type": int, "help": "how often a cell is started again after a rank was lost"},
    "min_ranks": {"type": int, "help": "how many ranks are enough then"},
    "name": {"help": "of ranks that outlive the notebook's kernel"},
    "idle": {"type": float, "help": "seconds without a call after which those end"},
    "keep": {"type": int, "help": "bytes of their output and values that stay on the disk"},
}


def numbers(text: str) -> list[int]:
    """Parse numbers of ranks, such as `0,2-3`."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of ranks: write them like 0,2-3") from None
    if not found:
        raise ArgumentTypeError(f"{text!r} names no rank")
    return found


class Parser(ArgumentParser):
    """A parser that raises an error with the usage for a wrong line."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '?([^' ]*)'? \(|unrecognized arguments: (\S*)", message)
        choices = [action.choices for action in self._actions if action.choices]
        parsers = [self, *(parser for one in choices if isinstance(one, dict) for parser in one.values())]
        known = [str(name) for names in choices for name in names]
        known += [option for parser in parsers for option in parser._option_string_actions]
        suggestion = nearest(next(filter(None, unknown.groups()), ""), known) if unknown else ""
        more = "%ddp help says what each command does" if suggestion or "COMMAND" in message else ""
        raise UsageError("\n".join(filter(None, [message + suggestion, self.format_usage().rstrip(), more])))


def line_parser(magics: Any) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of `%ddp`, and the parsers of its commands, by name."""
    parser = Parser("%ddp", add_help=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, about: str, action: Any) -> Parser:
        added: Parser = commands.add_parser(name, add_help=False, help=about, description=about)
        added.set_defaults(action=action)
        return added

    start = command("start", "start N ranks, with the options of nbdist.Session", magics.start)
    start.add_argument("n", type=int, help="how many ranks")
    for name, about in _START.items():
        flag = "--no-" + name if about.get("action") == "store_false" else "--" + name
        start.add_argument(flag.replace("_", "-"), dest=name, default=SUPPRESS, **about)
    command("status", "show what each rank does", magics.status)
    command("stacks", "show where each rank is", magics.stacks)
    command("collectives", "show the last collectives of each rank, as a picture", magics.collectives)
    command("logs", "show what a rank has written", magics.logs).add_argument("rank", type=int)
    command("push", "send variables of the notebook to all ranks", magics.push).add_argument("names", nargs="+")
    command("pull", "bring variables of rank 0 into the notebook", magics.pull).add_argument("names", nargs="+")
    post_mortem = command("post-mortem", "open pdb in a rank that raised (start --hold-on-error)", magics.post_mortem)
    post_mortem.add_argument("rank", type=int, nargs="?")
    command("who", "list the variables of rank 0", magics.who)
    command("history", "list the cells that the ranks have run", magics.history)
    command("use", "run cells on the ranks of a Session of the notebook", magics.use).add_argument("name")
    command("attach", "run cells on the ranks of a named session, and show its last call", magics.attach).add_argument(
        "name"
    )
    command("sessions", "list the named sessions", magics.sessions)
    command("restart", "start fresh ranks", magics.restart)
    command("stop", "end the ranks", magics.stop)
    help = command("help", "show these commands, or the options of one", magics.help)
    help.add_argument("command", nargs="?", choices=list(commands.choices), metavar="command")
    return parser, commands.choices


def start_options(arguments: Namespace) -> dict[str, Any]:
    """Return the options of a session from a line `%ddp start`, by name."""
    return {name: value for name, value in vars(arguments).items() if name in _START}


def cell_parser() -> Parser:
    """Return the parser of `%%ddp`."""
    parser = Parser("%%ddp", add_help=False)
    parser.add_argument("--ranks", type=numbers, help="who runs the cell, such as 0,2-3; all if not said")
    parser.add_argument("--output", **_OUTPUT)
    parser.add_argument(WHOLE, dest="whole", action="store_true", help=SUPPRESS)  # of `%autoddp`
    parser.add_argument("--profile", type=int, nargs="?", const=20, metavar="STEPS", help="show where their time goes")
    parser.add_argument("--skip", type=int, default=3, metavar="STEPS", help="that are made before those")
    parser.add_argument("--pdb", action="store_true", help="open the debugger in a rank that raises")
    parser.add_argument("--need", default="", help="notebook variables to send first")
    parser.add_argument("--imports", default="", help="import statements to run first")
    return parser
