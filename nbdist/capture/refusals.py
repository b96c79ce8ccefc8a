"""Pickles of settings that the notebook has changed, and warnings about settings that cannot be sent."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from .pickler import Pickler

T = TypeVar("T")

#: Bytes that what the notebook has put into a module may have as a pickle: it goes along with each call.
LARGEST = 1 << 20


class Refusals:
    """A filter of the settings that the notebook has changed. It warns once of each one that cannot be sent."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def without(self, found: list[T], place: Callable[[T], str]) -> list[T]:
        """Return the settings that can be sent. `place` returns the name of a setting for the warning, or an empty
        string for no warning."""
        if not found or not _why_not(found):
            return found
        return [one for one in found if not self._refuses(one, place)]

    def _refuses(self, one: T, place: Callable[[T], str]) -> bool:
        why = _why_not(one)
        if why and (name := place(one)) and name not in self._named:
            self._named.add(name)
            warnings.warn(
                f"{name}, which the notebook has set, is not set in the ranks: {why}. Set it inside the function.",
                stacklevel=2,
            )
        return bool(why)


def _why_not(value: Any) -> str:
    """Return the reason why a value cannot be set in ranks; empty if it can. Big data are neither copied nor written:
    each call asks."""
    pickler = Pickler(_Small(), least=LARGEST, to_cpu=True)
    try:
        pickler.dump(value)
    except _TooLargeError:
        pass
    except Exception:
        return "it cannot be sent"
    else:
        if not pickler.buffers:
            return ""
    return f"it has more than {LARGEST >> 20} MB"


class _TooLargeError(Exception):
    """A pickle has more than `LARGEST` bytes."""


class _Small(io.BytesIO):
    """A file for a pickle of at most `LARGEST` bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LARGEST:
            raise _TooLargeError
        return super().write(data)


def pickle_setting(value: Any) -> tuple[bytes | None, set[str]]:
    """Return the pickle of a setting, None if it cannot be pickled, and the modules that its reader imports."""
    pickler = Pickler(io.BytesIO(), in_band=True)
    try:
        pickler.dump(value)
    except Exception:
        return None, set()
    return pickler.file.getvalue(), pickler.modules
