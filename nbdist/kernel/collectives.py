"""`Collectives`, the last collectives of all ranks: a picture in time, a table, and the first difference."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..notebook.shell import cell_numbers
from ..wire.recording import Collective
from .calls.mismatches import first_difference
from .calls.stacks import Frame
from .calls.standings import Standing
from .calls.stopping import ranks_named

#: Collectives of each rank in a picture, and rows of a table.
_MOST_BARS, _MOST_ROWS = 200, 20
_WIDTH, _ROW, _LEFT = 720, 22, 70
#: Colors of kinds, in the order in which these appear.
_COLORS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#999999")
_MARK = "#d55e00"


class Difference(NamedTuple):
    """The first collective that is not the same on all ranks of a process group."""

    group: str
    number: int
    """The number of the collective in the group, from 1."""
    by_rank: Mapping[int, Collective]
    """The collective of each rank. A rank is missing if it has not begun a collective with this number."""
    missing: Sequence[int]


class Collectives:
    """The last 1,000 collectives of each rank, at the time when this object was made.

    A notebook shows them as a picture: a row for each rank, a bar for each collective from its beginning to its end,
    and a mark at the first difference between ranks. Elsewhere they are printed as a table.

    Attributes: `by_rank`, for each rank a list of `nbdist.wire.recording.Collective`; `difference`, the first
    collective that is not the same on all ranks of its process group, or that some ranks have not begun. None: there is
    no difference.
    """

    def __init__(self, by_rank: Mapping[int, Sequence[Collective]], now: float) -> None:
        self.by_rank = {rank: list(own) for rank, own in by_rank.items()}
        self._now = now
        self.difference = _first_difference(self.by_rank)

    def __repr__(self) -> str:
        rows = self._rows()
        if not rows:
            return _NONE
        left_out = len(rows) - _MOST_ROWS
        shown = rows[-_MOST_ROWS:]
        marked = [row for row in rows if self._is_marked(*row)]
        shown = [*marked, *shown[1:]] if marked and marked[0] not in shown else shown
        numbers = cell_numbers()
        table = [["number", *(f"rank {rank}" for rank in self.by_rank)]]
        table += [[str(key[1]), *(self._cell(rank, key, numbers) for rank in self.by_rank)] for key in shown]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in table]
        for place, key in enumerate(shown, 1):
            lines[place] += "  <- the first difference" if self._is_marked(*key) else ""
        lines = [line.rstrip() for line in lines]
        lines[1:1] = [f"... {left_out:,} earlier"] if left_out > 0 else []
        return "\n".join([*lines, *([self.hint()] if self.difference else [])])

    def hint(self) -> str:
        """Return a sentence about the first difference; empty if there is none."""
        if self.difference is None:
            return ""
        numbers = cell_numbers()
        calls: dict[str, list[int]] = {}
        for rank, one in self.difference.by_rank.items():
            calls.setdefault(_what(one, numbers), []).append(rank)
        told = [f"{ranks_named(ranks)} in {what}" for what, ranks in calls.items()]
        if self.difference.missing:
            told.append(f"{ranks_named(self.difference.missing)} not yet")
        return f"collective {self.difference.number:,} of the group is the first that differs: {'; '.join(told)}"

    def _rows(self) -> list[tuple[str, int]]:
        """Return the groups and numbers of all collectives, in the order in which the first rank began each."""
        begins: dict[tuple[str, int], float] = {}
        for own in self.by_rank.values():
            for one in own:
                key = one.group, one.place_in_group
                begins[key] = min(begins.get(key, one.begin), one.begin)
        return sorted((key for key in begins if key[1]), key=lambda key: begins[key])

    def _is_marked(self, group: str, number: int) -> bool:
        return self.difference is not None and (group, number) == self.difference[:2]

    def _cell(self, rank: int, key: tuple[str, int], numbers: Mapping[str, int]) -> str:
        for one in self.by_rank[rank]:
            if (one.group, one.place_in_group) == key:
                return f"{_what(one, numbers)}, {_took(one, self._now)}"
        return "-"

    def _repr_html_(self) -> str:
        shown = {rank: own[-_MOST_BARS:] for rank, own in self.by_rank.items()}
        everything = [one for own in shown.values() for one in own]
        if not everything:
            return f"<p>{_NONE}</p>"
        begin = min(one.begin for one in everything)
        end = max(self._now if one.waits else one.end or one.begin for one in everything)
        scale = _WIDTH / max(end - begin, 1e-6)
        kinds = list(dict.fromkeys(one.kind for one in everything))
        colors = {kind: _COLORS[min(number, len(_COLORS) - 1)] for number, kind in enumerate(kinds)}
        numbers, parts, y = cell_numbers(), [], 0
        for rank, own in shown.items():
            parts.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
            for one in own:
                x = _LEFT + (one.begin - begin) * scale
                width = max(1.0, ((self._now if one.waits else one.end or one.begin) - one.begin) * scale)
                mark = f' stroke="{_MARK}" stroke-width="3"' if self._is_marked(one.group, one.place_in_group) else ""
                title = f"rank {rank}, {one.place_in_group:,}: {_what(one, numbers)}, {_took(one, self._now)}"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}" '
                    f'fill="{colors[one.kind]}"{mark}><title>{html.escape(title)}</title></rect>'
                )
            y += _ROW
        legend = " ".join(f'<span style="color:{color}">&#9632;</span> {html.escape(k)}' for k, color in colors.items())
        hint = f'<p style="color:{_MARK}">{html.escape(self.hint())}</p>' if self.difference else ""
        return (
            f'<div style="font-family:sans-serif;font-size:13px"><div>{legend} &nbsp; {_seconds(end - begin)}</div>'
            f'<svg viewBox="0 0 {_LEFT + _WIDTH} {y}" width="{_LEFT + _WIDTH}" height="{y}" fill="currentColor" '
            f'font-family="sans-serif" font-size="13">{"".join(parts)}</svg>{hint}</div>'
        )


_NONE = "no collectives: the ranks have made none since they entered their process group"


def _first_difference(by_rank: Mapping[int, Sequence[Collective]]) -> Difference | None:
    standings = [Standing(rank, "runs", begun=own) for rank, own in by_rank.items()]
    groups = {one.group: one.ranks for own in by_rank.values() for one in own if one.place_in_group}
    found: list[tuple[float, Difference]] = []
    for group, members in groups.items():
        those = first_difference([one for one in standings if one.rank in members], group)
        missing: Sequence[int] = []
        if not those:
            last = {
                rank: max((one.place_in_group for one in by_rank[rank] if one.group == group), default=0)
                for rank in members
            }
            number = min(last.values()) + 1
            begun = {rank: one for rank in members for one in by_rank[rank] if _is(one, group, number)}
            those, missing = begun, [rank for rank in members if rank not in begun]
        if those:
            number = next(iter(those.values())).place_in_group
            missing = missing or [rank for rank in members if rank not in those]
            found.append((min(one.begin for one in those.values()), Difference(group, number, those, missing)))
    return min(found, key=lambda one: one[0])[1] if found else None


def _is(one: Collective, group: str, number: int) -> bool:
    return one.group == group and one.place_in_group == number


def _what(one: Collective, numbers: Mapping[str, int]) -> str:
    place = f" at {Frame(one.file, str(one.line), '').place(numbers)}" if one.file else ""
    return f"{one.what()}{place}"


def _took(one: Collective, now: float) -> str:
    if one.raised:
        return "raised"
    if one.waits:
        return f"waits for {_seconds(now - one.begin)}"
    return "begun" if one.end is None else _seconds(one.end - one.begin)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
