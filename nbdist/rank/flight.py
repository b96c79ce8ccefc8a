"""Collectives of this rank that torch's flight recorder has, among them those that C++ calls.

Ranks read it only when the kernel suspects a hang, in a thread of its own: torch may ask the GPU, which may not answer.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import math
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from ..wire.recording import FLIGHT

#: The functions of torch that return the records, of NCCL and of other backends.
_DUMPS = ("_dump_nccl_trace", "_dump_fr_trace")
#: The number of collectives that are sent.
_MOST = 100
_last = ""


def read() -> None:
    """Begin to read the flight recorder. Returns at once; `text` has the result later."""
    global _last
    _last = ""
    _thread.start_new_thread(_read, ())


def text() -> str:
    """Return the result of the last `read`, as a line for the kernel; empty without one."""
    return _last


def _read() -> None:
    global _last
    found = []
    for name in _DUMPS:
        dump = getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)
        with contextlib.suppress(Exception):  # another version of torch
            if dump is not None:
                found += pickle.loads(dump(includeCollectives=True, includeStackTraces=False)).get("entries", ())
    found.sort(key=lambda entry: entry["time_created_ns"])
    _last = f"{FLIGHT}{json.dumps([_sent(entry) for entry in found if not entry['is_p2p']][-_MOST:])}\n"


def _sent(entry: Mapping[str, Any]) -> list[Any]:
    """Return what the kernel reads of an entry: the group's name and its number in this process, the number in the
    group, the function, the elements and type of the first tensor, and whether the collective has ended.
    """
    sizes, types = entry["input_sizes"], entry["input_dtypes"]
    elements = math.prod(sizes[0]) if sizes else -1
    kind = entry["profiling_name"].rpartition(":")[2]
    ended = entry["retired"] or entry["state"] == "completed"
    name = entry["process_group"][0]
    return [name, entry["pg_id"], entry["collective_seq_id"], kind, elements, types[0] if types else "", ended]
