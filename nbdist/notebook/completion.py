"""IPython's completion and help in the kernel, extended by names of the ranks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any


def complete_alone(shell: Any, word: str, complete: Callable[[str, str], list[str]]) -> Callable[[], None]:
    """In a kernel, let only `complete` complete lines that begin with `word`. Returns a function that undoes this.

    IPython before 8.6 adds its own completions.

    Args:
        shell: The kernel's shell.
        word: The name of the magic, such as "%ddp".
        complete: Called with the line up to the cursor, and the part of the line to complete.
    """

    def matches(line: str, token: str) -> list[str]:
        return [text for text in complete(line, token) if text.startswith(token)]

    module: Any = importlib.import_module("IPython.core.completer")
    if not hasattr(module, "context_matcher"):

        def hook(shell: Any, event: Any) -> list[str]:
            return matches(event.line, event.symbol)

        shell.set_hook("complete_command", hook, str_key=word)
        return lambda: None

    @module.context_matcher(priority=1000, identifier=f"nbdist {word}")  # type: ignore[untyped-decorator]
    def matcher(context: Any) -> Any:
        line = context.text_until_cursor
        ours = line.split(None, 1)[:1] == [word] and line != word
        found = matches(line, context.token) if ours else []
        return {"completions": [module.SimpleCompletion(text) for text in found], "suppress": ours}

    shell.Completer.custom_matchers.append(matcher)
    return lambda: shell.Completer.custom_matchers.remove(matcher)


def complete_also(shell: Any, complete: Callable[[str, str, int], list[str]]) -> Callable[[], None]:
    """In a kernel, add the results of `complete` to IPython's completions (from 8.6 on). Returns a function that undoes
    this.

    Args:
        shell: The kernel's shell.
        complete: Given the cell's text, the line with the cursor, and the cursor's place in the line.
    """
    module: Any = importlib.import_module("IPython.core.completer")
    if not hasattr(module, "context_matcher"):
        return lambda: None

    @module.context_matcher(priority=10, identifier="nbdist")  # type: ignore[untyped-decorator]
    def matcher(context: Any) -> Any:
        found = complete(context.full_text, context.line_with_cursor, context.cursor_position)
        return {"completions": [module.SimpleCompletion(text) for text in found], "suppress": False}

    shell.Completer.custom_matchers.append(matcher)
    return lambda: shell.Completer.custom_matchers.remove(matcher)


def inspect_also(shell: Any, inspect: Callable[[str, int, int], dict[str, Any]]) -> Callable[[], None]:
    """Show the result of `inspect` for a name that a front end asks about (Shift-Tab). Returns a function that undoes
    this.

    Args:
        shell: The kernel's shell.
        inspect: A function of the cell's text, the position of the cursor, and the level of detail, 0 or 1. It returns
            texts by their MIME types. If it returns none, IPython looks in the notebook.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return lambda: None
    original = kernel.do_inspect

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *args: Any, **options: Any) -> Any:
        found = inspect(code, cursor_pos, detail_level)
        if not found:
            return original(code, cursor_pos, detail_level, *args, **options)
        if not shell.enable_html_pager:
            found.pop("text/html", None)
        return {"status": "ok", "found": True, "data": found, "metadata": {}}

    kernel.do_inspect = do_inspect
    return lambda: delattr(kernel, "do_inspect")
