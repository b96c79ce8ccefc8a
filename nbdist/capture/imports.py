"""`imports=`: a block of import statements, checked in the kernel and executed in the ranks."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import textwrap
import types
from collections.abc import Iterable, Sequence
from typing import Any

from ..checks import shown

IMPORTS_FILE = "<nbdist imports>"
_IMPORTS = "imports must be import statements, in a string or a list of strings"


def parse_imports(imports: str | Iterable[str]) -> str:
    """Return the import block as one string. Raises `ValueError` with the line for any other statement."""
    if not isinstance(imports, str):
        imports = list(imports) if isinstance(imports, Iterable) else [imports]
        if not all(isinstance(line, str) for line in imports):
            raise TypeError(f"{_IMPORTS}, got {shown(imports)}")
        imports = "\n".join(textwrap.dedent(line) for line in imports)
    block = textwrap.dedent(imports).strip("\n")
    try:
        statements = _statements(block)
    except SyntaxError as exc:
        line = (exc.text or _line(block, exc.lineno or 1)).strip()
        raise ValueError(f"{_IMPORTS}, and line {exc.lineno} is not Python ({exc.msg}): {line}") from None
    for statement in statements:
        line = _line(block, statement.lineno)
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            advice = f'. Did you mean "import {line}"?' if line.replace(".", "").isidentifier() else ""
            raise ValueError(f"{_IMPORTS}, got in line {statement.lineno}: {line}{advice}")
        if isinstance(statement, ast.ImportFrom) and statement.level:
            raise ValueError(f"imports must be absolute, and line {statement.lineno} is a relative import: {line}")
    return block


@functools.lru_cache(maxsize=16)
def _statements(block: str) -> Sequence[ast.stmt]:
    return ast.parse(block, IMPORTS_FILE).body


def _line(block: str, lineno: int) -> str:
    lines = block.splitlines()
    return lines[lineno - 1].strip() if 0 < lineno <= len(lines) else ""


def names_given(block: str) -> set[str]:
    """Return the names that the import block binds, as far as this process knows them.

    The names of `from x import *` are known if x is loaded in this process; a rank knows them all.
    """
    names: set[str] = set()
    for statement in _statements(block):
        assert isinstance(statement, (ast.Import, ast.ImportFrom))
        for alias in statement.names:
            if alias.name == "*":
                module = sys.modules.get(getattr(statement, "module", "") or "")
                names |= set(_public_names(module)) if module is not None else set()
            elif isinstance(statement, ast.Import):
                names.add(alias.asname or alias.name.partition(".")[0])
            else:
                names.add(alias.asname or alias.name)
    return names


def modules_named(block: str) -> list[str]:
    """Return the modules that the import block names, in order."""
    modules: dict[str, None] = {}
    for statement in _statements(block):
        if isinstance(statement, ast.Import):
            modules.update(dict.fromkeys(alias.name for alias in statement.names))
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            modules[statement.module] = None
    return list(modules)


def _public_names(module: types.ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [name for name in vars(module) if not name.startswith("_")]


def keep_source(file: str, text: str) -> None:
    """Make tracebacks show lines of code that is in no file."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def run_imports(block: str, namespace: dict[str, Any]) -> set[str]:
    """Execute the import block in `namespace`, and return the names that it binds."""
    if not block:
        return set()
    keep_source(IMPORTS_FILE, block)
    given: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, IMPORTS_FILE, "exec"), given)
    del given["__name__"], given["__builtins__"]
    namespace.update(given)
    return set(given)
