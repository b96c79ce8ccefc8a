"""pdb in a rank, with commands from the kernel: at a breakpoint, and after an exception."""

from __future__ import annotations

import code
import contextlib
import io
import os
import pdb
import sys
import types
from typing import Any

from .keyboard import Keyboard
from .shell import forget_prompts

_OWN = os.path.dirname(__file__) + os.sep


class Debugger:
    """The debugger that `breakpoint()` opens in a rank, and that `post_mortem` opens from the kernel."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard

    def install(self) -> None:
        """Install this debugger for `breakpoint()`. It costs nothing before its first use."""
        sys.breakpointhook = self._breakpoint

    def _breakpoint(self, *args: Any, **kwargs: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            _RankPdb(self._keyboard).set_trace(sys._getframe(1))

    def post_mortem(self, tb: types.TracebackType) -> None:
        """Show the user the frames of a traceback, until `quit`."""
        shell = _RankPdb(self._keyboard)
        shell.reset()
        shell.interaction(None, tb)


class _RankPdb(pdb.Pdb):
    """pdb that shows its output with its next prompt, even if the rank's output is not shown."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard, self._shown = keyboard, io.StringIO()
        lines: Any = _Lines(self)
        super().__init__(stdin=lines, stdout=self._shown, nosigint=True, skip=["nbdist.rank.*"])
        self.prompt = ""  # the kernel has one

    def line(self, prompt: str = "") -> str:
        """Return the line that the user types."""
        shown = self._shown.getvalue()
        self._shown.seek(0)
        self._shown.truncate()
        return self._keyboard.ask(prompt, shown, debugger=True)

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb itself goes on after an interrupt, which is the notebook's stop button here

    def dispatch_return(self, frame: types.FrameType, arg: Any) -> Any:
        trace = super().dispatch_return(frame, arg)
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(_OWN):  # the function is over
            self.set_continue()
            sys.settrace(None)
        return trace

    def get_stack(self, f: Any, t: Any) -> tuple[list[tuple[types.FrameType, int]], int]:
        """Return the stack without the frames below the function, which are nbdist's."""
        stack, index = super().get_stack(f, t)
        own = [i for i, (frame, _) in enumerate(stack) if frame.f_code.co_filename.startswith(_OWN)]
        first = own[-1] + 1 if own and own[-1] < index else 0
        return stack[first:], index - first

    def do_interact(self, arg: str) -> None:
        """interact

        Open a Python prompt with the variables of the frame. `exit()` or the end of the input leads back.
        """
        assert self.curframe is not None
        names = {**self.curframe.f_globals, **self.curframe.f_locals, "exit": sys.exit, "quit": sys.exit}
        hook, sys.excepthook = sys.excepthook, sys.__excepthook__  # torch's puts the rank before each line
        try:
            with contextlib.redirect_stdout(self._shown), contextlib.redirect_stderr(self._shown):
                banner = "*interactive: exit() leads back*"
                code.interact(banner, readfunc=self._interactive_line, local=names, exitmsg="")
        except SystemExit:
            pass
        finally:
            sys.excepthook = hook
            forget_prompts()  # which Python before 3.13 leaves there

    def _interactive_line(self, prompt: str) -> str:
        return self.line("... " if prompt == getattr(sys, "ps2", "") else ">>> ")


class _Lines:
    """Standard input of a debugger."""

    def __init__(self, shell: _RankPdb) -> None:
        self._shell = shell

    def readline(self) -> str:
        try:
            return f"{self._shell.line()}\n"
        except EOFError:
            return "quit\n"
