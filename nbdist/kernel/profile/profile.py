"""`Profile`, the result of a profiled call: a picture in the cell, a table, and a trace for Chrome."""

from __future__ import annotations

import functools
import gzip
import html
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checks import check_count
from .timeline import KINDS, Step, Trace, chrome_trace, steps

#: The share of its time from which on it is said that a rank waits.
LEAST = 0.2

_COLORS = {"loader": "#e69f00", "compute": "#0072b2", "communication": "#009e73", "waiting": "#d55e00"}
_WIDTH, _ROW, _LEFT = 720, 22, 70


class Profile:
    """The time of a call's steps by rank and kind of work; a notebook shows it as a picture.

    Attributes: `value`, the value of the function on the first of the ranks; `steps`, a list of
    `nbdist.kernel.profile.timeline.Step`.
    """

    def __init__(self, value: Any, recorded: Mapping[int, tuple[bytes, int]]) -> None:
        self.value = value
        self._recorded = recorded

    @functools.cached_property
    def _traces(self) -> dict[int, Trace]:
        """Read the traces at first use, because reading takes longer than recording."""
        return {rank: Trace(*recorded) for rank, recorded in self._recorded.items()}

    @functools.cached_property
    def steps(self) -> list[Step]:
        return steps(self._traces)

    def shares(self) -> dict[int, dict[str, float]]:
        """Return, by rank, the shares of the profiled time for the loader, computing, communication, and waiting for
        others."""
        found = {}
        for rank in self._traces:
            own = [step for step in self.steps if step.rank == rank]
            whole = sum(step.seconds for step in own)
            if whole:
                found[rank] = {kind: sum(step.parts[kind] for step in own) / whole for kind in KINDS}
        return found

    def hint(self) -> str:
        """Return sentences about ranks that waited more than a fifth of the time: for which rank, and why; otherwise an
        empty text."""
        shares = self.shares()
        rank = max(shares, key=lambda rank: shares[rank]["waiting"], default=None)
        if rank is None or shares[rank]["waiting"] <= LEAST:
            return ""
        waited: dict[int, float] = {}
        for step in self.steps:
            if step.rank == rank:
                for other, seconds in step.waited_for.items():
                    waited[other] = waited.get(other, 0.0) + seconds
        slow = max(waited, key=lambda other: waited[other])
        said = f"rank {rank} waited {shares[rank]['waiting']:.0%} of the time"
        if waited[slow] < 0.5 * sum(waited.values()):
            return f"{said} for other ranks, none of which is slower than the rest"
        own = [step for step in self.steps if step.rank == slow]
        more = {kind: shares[slow][kind] - shares[rank][kind] for kind in ("loader", "compute")}
        kind = max(more, key=lambda kind: more[kind])
        took = sum(step.parts[kind] for step in own) / len(own)
        whole = sum(step.seconds for step in own) / len(own)
        what = "its loader" if kind == "loader" else "its computing"
        return f"{said} for rank {slow}: {what} took {_time(took)} of a step of {_time(whole)}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the traces of all ranks to one file, for https://ui.perfetto.dev or chrome://tracing.

        Args:
            path: A file whose name ends in `.json` or `.json.gz`. Both programs open both.
        """
        path = Path(path)
        text = json.dumps(chrome_trace(self._traces)).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)

    def __repr__(self) -> str:
        if not self.steps:
            return _NOTHING
        lines = [f"{'':8}" + "".join(f"{kind:>15}" for kind in KINDS) + f"{'a step':>12}"]
        for rank, shares in self.shares().items():
            own = [step.seconds for step in self.steps if step.rank == rank]
            cells = "".join(f"{shares[kind]:>15.0%}" for kind in KINDS)
            lines.append(f"{f'rank {rank}':8}{cells}{_time(sum(own) / len(own)):>12}")
        return "\n".join([*lines, *([self.hint()] if self.hint() else [])])

    def _repr_html_(self) -> str:
        if not self.steps:
            return f"<p>{_NOTHING}</p>"
        end = max(step.start + step.seconds for step in self.steps)
        rows, y = [], 0
        for rank, shares in self.shares().items():
            rows.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
            rows += [_bar(step, y, _WIDTH / end) for step in self.steps if step.rank == rank]
            text = ", ".join(f"{kind} {shares[kind]:.0%}" for kind in KINDS)
            rows.append(f'<text x="{_LEFT}" y="{y + _ROW + 12}" font-size="11">{text}</text>')
            y += _ROW + 22
        legend = " ".join(f'<span style="color:{_COLORS[kind]}">&#9632;</span> {kind}' for kind in KINDS)
        count = len({step.number for step in self.steps})
        hint = f"<p>{html.escape(self.hint())}</p>" if self.hint() else ""
        return (
            f'<div style="font-family:sans-serif;font-size:13px"><div>{legend} &nbsp; {count} steps, {_time(end)}</div>'
            f'<svg viewBox="0 0 {_LEFT + _WIDTH} {y}" width="{_LEFT + _WIDTH}" height="{y}" fill="currentColor" '
            f'font-family="sans-serif" font-size="13">{"".join(rows)}</svg>{hint}</div>'
        )


def profiled(
    call: Callable[..., list[Any]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ranks: Sequence[int],
    skip: int,
    steps: int,
    **options: Any,
) -> Profile:
    """Return the profile of a call that the session's `call` makes with these `options`; see `Session.profile`."""
    from ...rank import profiling  # which imports torch

    check_count(skip, least=0, name="skip")
    check_count(steps, least=1, name="steps")
    arguments = min(ranks, default=0), skip, steps, fn, *args
    found = call(profiling.run, arguments, kwargs, ranks=ranks, everyone=True, **options)
    return Profile(found[0][0], {rank: (trace, whole) for rank, (_, whole, trace) in zip(ranks, found, strict=True)})


_NOTHING = (
    "nothing was profiled: the function made no more optimizer steps than are left out at its beginning; skip=0 begins "
    "with the function itself"
)


def _bar(step: Step, y: int, scale: float) -> str:
    """Draw a step: its parts in a row, with their total time as width."""
    parts, x = [], _LEFT + step.start * scale
    for kind in KINDS:
        width = step.parts[kind] * scale
        title = f"rank {step.rank}, step {step.number}: {kind} {_time(step.parts[kind])} of {_time(step.seconds)}"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.2f}" height="{_ROW - 4}" fill="{_COLORS[kind]}">'
            f"<title>{title}</title></rect>"
        )
        x += width
    return "".join(parts)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
