"""Temporary replacement of attributes in other libraries' modules."""

from __future__ import annotations

from typing import Any

from ..system.interrupts import undivided

Originals = list[tuple[Any, str, Any]]
"""The class or module, the attribute, and its earlier value."""


@undivided("replaces functions of a library")
def replace(patched: Originals) -> Originals:
    """Set attributes of modules or classes, and return their earlier values."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, value in patched:
        setattr(owner, name, value)
    return originals
