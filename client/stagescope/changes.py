"""`Changes`: what differs between two attempts, as a table and as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

from stagescope import render
from stagescope.table import Table
from stagescope.wire.nonfinite import JsonObject
from stagescope.wire.schema import Target

_HEADINGS: Final[Mapping[str, str]] = {
    "numbers": "may change numbers",
    "place": "another place",
    "start": "differs at every start",
    "unknown": "one side does not know it",
}


class Changes(Table):
    """All differences between two attempts; those that may change numbers come first.

    Usage:
        >>> changes = session.diff("qwen3-8b@1", "qwen3-8b@2")
        >>> changes.where(weight="numbers")["name"]
        >>> changes.about["counts"]
    """

    __slots__ = ()

    @property
    def heading(self) -> str:
        """Which two attempts, and how many things differ."""
        a, b = (Target(side["run"], side["attempt"]) for side in self._sides())
        unknown = sum(row["weight"] == "unknown" for row in self)
        differ = len(self) - unknown
        text = f"{a} (a) against {b} (b): {render.counted(differ, 'thing')} "
        text += "differs" if differ == 1 else "differ"
        verb = "is" if unknown == 1 else "are"
        return render.printable(f"{text}, {unknown} {verb} unknown" if unknown else text)

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a block of lines for each weight; long values are on separate lines."""
        lines = [
            f"side {name} has no fingerprint: only what is known of its ranks is compared"
            for name in self.about.get("unknown") or []
        ]
        shown = self[:rows]
        weight = None
        for row in shown:
            if row["weight"] != weight:
                weight = row["weight"]
                lines.append(f"{_HEADINGS.get(weight, weight)}:")
            lines += change_lines(row, width)
        if not len(self):
            lines.append("nothing that is known differs")
        rest = len(self) - len(shown)
        if rest:
            lines.append(f"... {rest} more thing{'' if rest == 1 else 's'}")
        if note := self.about.get("note"):
            lines += textwrap.wrap(f"not compared: {note}", width, subsequent_indent="  ")
        return lines

    def _sides(self) -> Iterator[JsonObject]:
        yield from (self.about["a"], self.about["b"])


def change_lines(row: JsonObject, width: int) -> Iterator[str]:
    """Yield the two values of one change, as lines of at most `width` columns."""
    label = f"  {row['area']} {row['name']}: "
    missing = "unknown" if row["weight"] == "unknown" else render.MISSING
    values = [missing if row[side] is None else _value(row[side]) for side in ("a", "b")]
    line = render.printable(f"{label}{values[0]} -> {values[1]}")
    if len(line) <= width:
        yield line
        return
    yield render.printable(label).rstrip()
    for side, value in zip("ab", values, strict=True):
        yield from textwrap.wrap(
            render.printable(value), width, initial_indent=f"    {side} ", subsequent_indent=" " * 6
        )


def _value(value: object) -> str:
    """Return a value as text; different values have different texts."""
    return value if isinstance(value, str) else json.dumps(value)
