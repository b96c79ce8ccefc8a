"""The time of ranks by kind (loader, compute, communication, waiting), from the traces of torch's profiler."""

from __future__ import annotations

import bisect
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: What a rank's time goes to, in the order in which it is shown.
KINDS = ("loader", "compute", "communication", "waiting")

_STEP = re.compile(r"ProfilerStep#(\d+)$")
_LOADER = "enumerate(DataLoader)"
#: Collectives: of CPU ranks as c10d and nbdist's own note them, of GPUs as kernels.
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc|nbdist):|nccl(Dev)?Kernel", re.I)
#: Work of a GPU. Where there is any, what the CPU does meanwhile costs nothing.
_ON_GPU = frozenset(["kernel", "gpu_memcpy", "gpu_memset"])
#: Operators that only hand a collective over.
_HANDING_OVER = re.compile(r"c10d::|record_param_comms")


class Span(NamedTuple):
    """A time span in microseconds of the machine's clock."""

    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """An optimizer step of a rank."""

    rank: int
    number: int
    start: float
    """Seconds since the first step of any rank began."""
    seconds: float
    parts: Mapping[str, float]
    """Seconds by kind. Their sum is the time of the step."""
    waited_for: Mapping[int, float]
    """Seconds of waiting by the rank that was waited for."""


class Trace:
    """The trace of one rank's profiler.

    Args:
        compressed: The trace that `rank.profiling.run` returns.
        whole: The number of complete steps. The events after them are used only if there is no complete step.
    """

    def __init__(self, compressed: bytes, whole: int) -> None:
        self.content: dict[str, Any] = json.loads(zlib.decompress(compressed)) if compressed else {}
        base = self.content.get("baseTimeNanoseconds", 0) / 1000
        self.steps: dict[int, Span] = {}
        self.loader: list[Span] = []
        self.collectives: list[tuple[str, Span]] = []
        cpu: list[Span] = []
        gpu: list[Span] = []
        main = None
        for event in self.events():
            if event["name"].startswith("ProfilerStep#") and event.get("cat") == "user_annotation":
                main = event["tid"]
        for event in self.events():
            name, kind = event["name"], event.get("cat")
            span = Span(base + event["ts"], base + event["ts"] + event["dur"])
            if _COLLECTIVE.match(name):
                self.collectives.append((name, span))
            elif kind in _ON_GPU:
                gpu.append(span)
            elif event["tid"] != main:
                continue
            elif kind == "user_annotation" and (step := _STEP.match(name)):
                self.steps[int(step[1])] = span
            elif kind == "user_annotation" and name.startswith(_LOADER):
                self.loader.append(span)
            elif kind == "cpu_op" and not _HANDING_OVER.match(name):
                cpu.append(span)
        self.steps = {number: span for number, span in self.steps.items() if number < whole} or self.steps
        self.busy = merged(gpu or cpu)
        self.loader = merged(self.loader)
        self.collectives.sort(key=lambda one: one[1])

    def events(self) -> Iterable[dict[str, Any]]:
        """Yield the events that have a duration."""
        return (event for event in self.content.get("traceEvents", []) if event["ph"] == "X")


def merged(spans: Iterable[Span]) -> list[Span]:
    """Merge spans into ordered ones that do not overlap."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def inside(whole: Span, spans: Sequence[Span]) -> list[Span]:
    """Cut `spans` to the parts inside `whole`. The spans must not overlap."""
    first = max(0, bisect.bisect_right(spans, whole.start, key=lambda span: span.start) - 1)
    found = []
    for span in itertools.islice(spans, first, None):
        if span.start >= whole.end:
            break
        if span.end > whole.start:
            found.append(Span(max(span.start, whole.start), min(span.end, whole.end)))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of `spans` outside `others`. The spans of each list must not overlap."""
    found = []
    for span in spans:
        start = span.start
        for other in inside(span, others):
            if other.start > start:
                found.append(Span(start, other.start))
            start = max(start, other.end)
        if start < span.end:
            found.append(Span(start, span.end))
    return found


def total(spans: Iterable[Span]) -> float:
    """Return the total length of spans, in seconds."""
    return sum(span.end - span.start for span in spans) / 1e6


def steps(traces: Mapping[int, Trace]) -> list[Step]:
    """Return the steps of all ranks, by number and rank.

    Each moment of a rank counts as one kind. Loader: while the loader makes a batch. Otherwise compute: while an
    operator runs (on a GPU: a kernel). Otherwise, during a collective, waiting: until the last rank has come to it, and
    communication from then on. The rest is compute: it is Python's time. The clocks of the ranks must agree, as they do
    on one machine.
    """
    waits = _waits(traces)
    begin = min((span.start for trace in traces.values() for span in trace.steps.values()), default=0.0)
    found = []
    for rank, trace in traces.items():
        under_way = merged(span for _, span in trace.collectives)
        for number, whole in trace.steps.items():
            loader = inside(whole, trace.loader)
            idle = without(without([whole], loader), inside(whole, trace.busy))
            for_others: dict[int, float] = {}
            waiting: list[Span] = []
            for last, span in waits[rank]:
                if last != rank and span.end > whole.start and span.start < whole.end:
                    part = without([part for gap in idle for part in inside(gap, [span])], merged(waiting))
                    waiting += part
                    if part:
                        for_others[last] = for_others.get(last, 0.0) + total(part)
            communication = without([part for gap in idle for part in inside(gap, under_way)], merged(waiting))
            seconds = total([whole])
            parts = {"loader": total(loader), "communication": total(communication), "waiting": total(waiting)}
            parts["compute"] = max(0.0, seconds - sum(parts.values()))
            start = (whole.start - begin) / 1e6
            found.append(Step(rank, number, start, seconds, {kind: parts[kind] for kind in KINDS}, for_others))
    return sorted(found, key=lambda step: (step.number, step.rank))


def _waits(traces: Mapping[int, Trace]) -> dict[int, list[tuple[int, Span]]]:
    """Return, by rank, for each collective, the rank that came last and the time until it came."""
    by_name: dict[str, dict[int, list[Span]]] = {}
    for rank, trace in traces.items():
        for name, span in trace.collectives:
            by_name.setdefault(name, {}).setdefault(rank, []).append(span)
    waits: dict[int, list[tuple[int, Span]]] = {rank: [] for rank in traces}
    for spans in by_name.values():
        if len(spans) < len(traces) or len({len(own) for own in spans.values()}) > 1:
            continue  # of some of the ranks only: it is unknown which belong together
        for arrivals in zip(
            *([(own[k].start, rank) for k in range(len(own))] for rank, own in spans.items()), strict=True
        ):
            latest, last = max(arrivals)
            for start, rank in arrivals:
                if start < latest:
                    waits[rank].append((last, Span(start, latest)))
    return waits


def chrome_trace(traces: Mapping[int, Trace]) -> dict[str, Any]:
    """Return a trace for Chrome or Perfetto: a group of rows for each rank's process and GPU, on one clock."""
    base = min((trace.content.get("baseTimeNanoseconds", 0) for trace in traces.values()), default=0)
    events: list[dict[str, Any]] = []
    for rank, trace in traces.items():
        pids: dict[Any, int] = {}
        shift = (trace.content.get("baseTimeNanoseconds", 0) - base) / 1000
        for event in trace.content.get("traceEvents", []):
            pid = pids.setdefault(event.get("pid"), rank * 1000 + len(pids))
            moved = {**event, "pid": pid}
            if "ts" in event:
                moved["ts"] = event["ts"] + shift
            if event["ph"] == "M" and event["name"] == "process_name":
                moved["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
            elif event["ph"] == "M" and event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": pid}
            if "id" in event:  # of arrows, which would join ranks
                moved["id"] = f"{rank}:{event['id']}"
            events.append(moved)
    return {"schemaVersion": 1, "baseTimeNanoseconds": base, "displayTimeUnit": "ms", "traceEvents": events}
