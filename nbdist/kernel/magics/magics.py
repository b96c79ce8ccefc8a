"""`%ddp` and `%%ddp`: a session, and cells that run on its ranks."""

from __future__ import annotations

import ast
import shlex
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.utils.tokenutil import token_at_cursor

from ...errors import entry
from ...notebook.completion import complete_alone, complete_also, inspect_also
from ...notebook.shell import cell_numbers, label_cells
from ...rank import cells
from ..collectives import Collectives
from ..launch import warm
from ..named.attaching import attach
from ..named.listing import SessionTable, sessions
from ..profile.profile import Profile, profiled
from ..session import Session
from .command_line import WHOLE, Parser, cell_parser, line_parser, start_options

#: Cells that begin so are the notebook's own, also under `%autoddp`.
_OWN = ("%%", "%ddp", "%autoddp", "%load_ext", "%unload_ext", "%reload_ext")


def load(shell: Any) -> None:
    """Load the extension for `%load_ext nbdist`: start the fork server, and register the magics."""
    warm()
    unload(shell)  # loaded again, it has one session, and checks each cell once
    magics = DdpMagics(shell)
    shell.register_magics(magics)
    shell.input_transformers_post.append(magics.check_syntax)
    shell.input_transformers_cleanup.append(magics.send_cell)
    magics.undo = [complete_alone(shell, word, magics.complete) for word in ("%ddp", "%%ddp")]
    magics.undo.append(complete_also(shell, magics.complete_cell))
    magics.undo.append(inspect_also(shell, magics.inspect_cell))


def unload(shell: Any) -> None:
    """Unload the extension for `%unload_ext nbdist`: end the session of the magics."""
    magics = shell.magics_manager.registry.get("DdpMagics")
    if magics is not None and magics.undo:
        magics.stop(Namespace())
        shell.input_transformers_post.remove(magics.check_syntax)
        shell.input_transformers_cleanup.remove(magics.send_cell)
        while magics.undo:
            magics.undo.pop()()


@magics_class
class DdpMagics(Magics):
    """The magics, and the session that they share."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.session: Session | None = None
        self._history: list[str] = []
        self._auto = False
        self.undo: list[Callable[[], None]] = []
        """Functions that undo what `load` has done to the shell."""
        self._line, self._commands = line_parser(self)
        self._cell = cell_parser()

    @line_cell_magic
    @entry
    def ddp(self, line: str, cell: str | None = None) -> Any:
        """Ranks that stay between cells.

        %ddp start N [--devices cpu] [--backend gloo] [--threads T] [--timeout SECONDS] [--output rank0|all|tabs|none]
                     [--lines N|all] [--env NAME=VALUE] [--seed S] [--seed-ranks] [--no-settings] [--engine NAME]
                     [--start forkserver|spawn] [--hold-on-error] [--on-hang say|raise] [--restarts K] [--min-ranks M]
                     [--name NAME] [--idle SECONDS] [--keep BYTES]
                                                      start N ranks, with the options of nbdist.Session; gives that
        %ddp status                                   what each rank does
        %ddp stacks                                   where each rank is
        %ddp collectives                              the last collectives of each rank, as a picture
        %ddp logs RANK                                what a rank has written
        %ddp push NAME ...                            send variables of the notebook to all ranks
        %ddp pull NAME ...                            bring variables of rank 0 into the notebook
        %ddp post-mortem [RANK]                       pdb in a rank that raised (needs start --hold-on-error)
        %ddp who                                      the variables that live in rank 0
        %ddp history                                  the cells that the ranks have run
        %ddp use NAME                                 run cells on the ranks of a Session of the notebook
        %ddp attach NAME                              run cells on the ranks of a named session; shows its last call
        %ddp sessions                                 the named sessions
        %ddp help [COMMAND]                           these commands, or the options of one
        %ddp restart                                  fresh ranks
        %ddp stop                                     end the ranks

        %%ddp [--ranks 0,2-3] [--output rank0|all|tabs|none] [--need "NAMES"] [--imports "STATEMENTS"] [--pdb]
              [--profile [STEPS]] [--skip STEPS]
        code that runs in `__main__` of every rank, or of some; the value of its last expression is shown, or with
        --profile a picture of where the time of its optimizer steps went: see `Session.profile`

        Examples:
            >>> %load_ext nbdist
            >>> %ddp start 2 --devices cpu
            <nbdist.Session: 2 ranks on cpu, gloo, running>
            >>> %%ddp
            ... import torch
            ... import torch.distributed as dist
            ... total = torch.ones(())
            ... dist.all_reduce(total)
            ... total
            tensor(2.)
            >>> %ddp pull total
            >>> total
            tensor(2.)
            >>> %ddp stop
        """
        arguments = self._parse(self._line if cell is None else self._cell, line.strip() or "help" * (cell is None))
        return arguments.action(arguments) if cell is None else self.run_cell(arguments, cell)

    @line_magic
    @entry
    def autoddp(self, line: str) -> None:
        """Run every later cell on the ranks, as if `%%ddp` were its first line; `%autoddp off` ends this.

        A cell that begins with `%%local` runs in the notebook, and so does a cell that begins with another `%%magic` or
        `%ddp`.
        """
        if line.strip() not in ("", "on", "off"):
            raise UsageError("write %autoddp, or %autoddp off")
        self._running()
        self._auto = line.strip() != "off"

    def send_cell(self, lines: list[str]) -> list[str]:
        """Transform a cell for IPython under `%autoddp`: add `%%ddp` above it, and remove `%%local`."""
        first = next((line for line in lines if line.strip()), "")
        if first.startswith("%%local"):
            return ["\n" if line is first else line for line in lines]
        if not self._auto or not first or first.startswith(_OWN):
            return lines
        return [f"%%ddp {WHOLE}\n", *lines]

    def _parse(self, parser: Parser, line: str) -> Namespace:
        try:
            return parser.parse_args(shlex.split(line))
        except ValueError as exc:  # of shlex: a quotation that does not end
            raise UsageError(f"{parser.prog}: {exc}") from None

    def _running(self) -> Session:
        if self.session is None:
            raise UsageError("no session is running: start one with %ddp start 2")
        return self.session

    def start(self, arguments: Namespace) -> Session:
        if self.session is not None:
            raise UsageError(f"{self.session.nranks} ranks run already: %ddp stop ends them, %ddp restart renews them")
        session = Session(arguments.n, **start_options(arguments))
        try:
            session.run(cells.nothing)
        except BaseException:
            session.close()
            raise
        self.session = session
        return session

    def help(self, arguments: Namespace) -> None:
        parser = self._line if arguments.command is None else self._commands[arguments.command]
        print(parser.format_help().rstrip())
        if parser is self._line:
            print("\n%%ddp above a cell runs the cell on the ranks; %autoddp runs all later cells there.")

    def status(self, arguments: Namespace) -> Any:
        return self._running().status()

    def stacks(self, arguments: Namespace) -> None:
        print(self._running().stacks())

    def collectives(self, arguments: Namespace) -> Collectives:
        return self._running().collectives()

    def logs(self, arguments: Namespace) -> None:
        print(self._running().logs(arguments.rank), end="")

    def push(self, arguments: Namespace) -> None:
        self._running().run(cells.nothing, need=arguments.names)

    def pull(self, arguments: Namespace) -> None:
        self.shell.push(self._running().run(cells.variables, arguments.names))  # type: ignore[union-attr]

    def post_mortem(self, arguments: Namespace) -> None:
        self._running().post_mortem(arguments.rank)

    def who(self, arguments: Namespace) -> None:
        names = self._running().run(cells.who)
        width = max(map(len, names), default=0)
        print("\n".join(f"{name:{width}}  {kind}" for name, kind in sorted(names.items())) or "nothing yet")

    def history(self, arguments: Namespace) -> None:
        print("\n".join(self._history))

    def use(self, arguments: Namespace) -> None:
        session = self.shell.user_ns.get(arguments.name)  # type: ignore[union-attr]
        if not isinstance(session, Session):
            raise UsageError(f"{arguments.name} is not an nbdist.Session of this notebook")
        if self.session not in (None, session):
            raise UsageError(f"{self.session.nranks} ranks run already: %ddp stop ends them")
        self.session = session

    def attach(self, arguments: Namespace) -> Session:
        if self.session is not None:
            raise UsageError(f"{self.session.nranks} ranks run already: %ddp stop ends them")
        self.session = attach(arguments.name)
        return self.session

    def sessions(self, arguments: Namespace) -> SessionTable:
        return sessions()

    def restart(self, arguments: Namespace) -> None:
        self._running().restart()

    def stop(self, arguments: Namespace) -> None:
        session, self.session, self._auto = self.session, None, False
        if session is not None:
            session.close()

    def check_syntax(self, lines: list[str]) -> list[str]:
        """Refuse a `%%ddp` cell with a syntax error as IPython does: before it runs, without a traceback.

        This is a transformer of IPython, which must raise `SyntaxError` for an invalid cell.
        """
        if lines and lines[0].startswith("get_ipython().run_cell_magic('ddp', "):
            call: Any = ast.parse("".join(lines)).body[0]
            _, line, body = (argument.value for argument in call.value.args)
            auto, self._auto = self._auto, False  # the body is no cell
            try:
                text = cells.as_counted(self.shell.transform_cell(body), line == WHOLE)  # type: ignore[union-attr]
            finally:
                self._auto = auto
            number = self.shell.execution_count  # type: ignore[union-attr]
            label_cells({cells.file_of(number): number})
            compile(text, cells.file_of(number), "exec", cells.FLAGS, dont_inherit=True)
        return lines

    def run_cell(self, arguments: Namespace, cell: str) -> Profile | None:
        number = max(cell_numbers().values(), default=0)  # the latest: the cell that runs
        who = "" if arguments.ranks is None else f" --ranks {','.join(map(str, arguments.ranks))}"
        self._history.append(f"# In[{number}]{who}\n{cell.rstrip()}\n")
        session = self._running()
        options: dict[str, Any] = {name: getattr(arguments, name) for name in ("imports", "need", "ranks", "output")}
        given = cell, number, arguments.whole, arguments.pdb
        if arguments.profile is None:
            session.call(cells.run, given, **options)
            return None
        options["ranks"] = options["ranks"] or list(range(session.nranks))
        return profiled(session.call, cells.run, given, {}, skip=arguments.skip, steps=arguments.profile, **options)

    def complete_cell(self, text: str, line: str, cursor: int) -> list[str]:
        """Return the completions of rank 0 inside a `%%ddp` cell, while the ranks are idle."""
        if not text.startswith("%%ddp") or line.startswith("%%ddp"):
            return []
        if self.session is None or not self.session.is_idle():
            return []
        found: list[str] = self.session.call(cells.complete, (line, cursor), ranks=[0], output="none")[0]
        return found

    def inspect_cell(self, text: str, cursor: int, detail: int) -> dict[str, Any]:
        """Return the help of rank 0 for the name at the cursor of a `%%ddp` cell, while the ranks are idle."""
        if not text.startswith("%%ddp") or "\n" not in text[:cursor]:
            return {}
        if self.session is None or not self.session.is_idle():
            return {}
        name = token_at_cursor(text, cursor)
        found: dict[str, Any] = self.session.call(cells.describe, (name, detail), ranks=[0], output="none")[0]
        return found

    def complete(self, line: str, token: str) -> list[str]:
        """Return completions of the line for the Tab key; `token` is the beginning of the word."""
        words = line[: len(line) - len(token)].split()
        parser = self._cell if words[0] == "%%ddp" else self._line
        if parser is self._line:
            if len(words) == 1:
                return list(self._commands)
            parser = self._commands.get(words[1], parser)
        shown = [action for action in parser._actions if action.help != SUPPRESS]
        options = [option for action in shown for option in action.option_strings]
        if words[1:2] == ["use"]:
            return [name for name, value in self.shell.user_ns.items() if isinstance(value, Session)]  # type: ignore[union-attr]
        if words[1:2] == ["push"]:
            return [name for name in self.shell.user_ns if not name.startswith("_")]  # type: ignore[union-attr]
        if words[1:2] == ["attach"]:
            return [one.name for one in sessions()]
        before = parser._option_string_actions.get(words[-1])
        return [str(choice) for choice in before.choices] if before is not None and before.choices else options
