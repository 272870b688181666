"""The report of a comparison of dumps, and `Changes`: what differs between two attempts.

The text fits 80 columns. It begins with the verdict, the first difference, and likely and excluded
causes. Every section follows, with one line per tensor, and below it one per rank and microbatch.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Final

from stagescope.answers import Record
from stagescope.table import Table
from stagescope_wire import nonfinite
from stagescope_wire.comparison_texts import as_lines, change_lines, with_numbers
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import counted, printable
from stagescope_wire.schema import Target

_HEADINGS: Final[Mapping[str, str]] = {
    "numbers": "may change numbers", "place": "another place",
    "start": "differs at every start", "unknown": "one side does not know it",
}  # fmt: skip


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
        a, b = (Target(self.about[side]["run"], self.about[side]["attempt"]) for side in "ab")
        unknown = sum(row["weight"] == "unknown" for row in self)
        differ = len(self) - unknown
        text = f"{a} (a) against {b} (b): {counted(differ, 'thing differs', 'things differ')}"
        text += f", {counted(unknown, 'is', 'are')} unknown" if unknown else ""
        return printable(text)

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a block of lines for each weight; long values are on separate lines."""
        lines = [
            f"side {name} has no fingerprint: only what is known of its ranks is compared"
            for name in self.about.get("unknown") or []
        ]
        shown = self[:rows]
        for weight, changes in groupby(shown, key=lambda row: row["weight"]):
            lines.append(f"{_HEADINGS.get(weight, weight)}:")
            lines += [line for row in changes for line in change_lines(row, width)]
        if not len(self):
            lines.append("nothing that is known differs")
        if rest := len(self) - len(shown):
            lines.append(f"... {counted(rest, 'more thing')}")
        if note := self.about.get("note"):
            lines += textwrap.wrap(f"not compared: {note}", width, subsequent_indent="  ")
        return lines


class ComparisonReport(Record):
    """The comparison of two or three dumps; its fields are those of `stagescope compare --json`.

    Usage:
        >>> report = session.compare("qwen3-8b@1:5", "qwen3-8b@2:5")
        >>> report.verdict               # 'same', 'within noise', 'different', 'not comparable'
        >>> report.first                 # the first difference, in the order of the data's flow
        >>> report.save("report.html")   # one self-contained page with figures
    """

    __slots__ = ("_save",)

    def __init__(
        self, comparison: JsonObject, *, save: Callable[[Path], None] | None = None
    ) -> None:
        super().__init__(with_numbers(comparison), title=f"comparison: {comparison.get('verdict')}")
        self._save = save

    @property
    def verdict(self) -> str:
        """The verdict on everything that was compared: a key of `MARKS`."""
        return str(self["verdict"])

    @property
    def first(self) -> JsonObject | None:
        """The first difference in the order in which data flow; None if nothing differs."""
        return next((pair["first"] for pair in self["pairs"] if pair["first"] is not None), None)

    @property
    def exit_status(self) -> int:
        """0: same or within noise; 1: different; 2: not comparable."""
        return int(self["exit_status"])

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the report as lines of at most `width` columns (longer words are not cut)."""
        return [line.text for line in as_lines(self, width=width, full=False)]

    def save(self, path: str | Path) -> Path:
        """Write the report and return its path: `.json` as JSON, else one HTML page with figures.

        Raises:
            InvalidInput: a page of a report that did not come from a service, which draws figures.
        """
        target = Path(path)
        if target.suffix == ".json":
            target.write_text(nonfinite.dumps(dict(self)) + "\n", encoding="utf-8")
            return target
        if self._save is None:
            raise InvalidInput(
                "this comparison came from no service", advice="stagescope compare --html FILE"
            )
        self._save(target)
        return target

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"
