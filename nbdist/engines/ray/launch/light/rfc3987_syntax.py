"""A substitute for the package of this name in Ray's processes, which imports the package when it is first used.

The package builds a parser at import, which takes three seconds of CPU. Each process of Ray imports it through
jsonschema, if it is installed, as with JupyterLab: two thirds of Ray's start time (Ray 2.60, jsonschema 4.26,
rfc3987-syntax 1.1).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_elsewhere = [path for path in sys.path if os.path.abspath(path) != _HERE]
_spec = importlib.machinery.PathFinder.find_spec(__name__, _elsewhere)
if _spec is None or _spec.loader is None:
    raise ImportError(f"No module named {__name__!r}", name=__name__)


def is_valid_syntax(term: str, value: str) -> bool:
    """Call the package's function of this name, which jsonschema uses."""
    return bool(_package().is_valid_syntax(term, value))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_package(), name)


def _package() -> Any:
    if sys.modules[__name__].__spec__ is not _spec:
        assert _spec is not None and _spec.loader is not None
        module = importlib.util.module_from_spec(_spec)
        sys.modules[__name__] = module
        _spec.loader.exec_module(module)
    return sys.modules[__name__]
