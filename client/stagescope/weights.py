"""Answers about weights: those that the rollout received compared bitwise with those sent."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from stagescope import render
from stagescope.table import Row, Table, context

WEIGHT_ORDER: Final = ("name", "verdict", "ranks", "odd_ranks", "dtype", "shape", "reason")
"""Columns that are shown first: in 80 columns a table leaves out the last ones."""
VERSION_ORDER: Final = (
    "version", "step", "differ", "missing", "replicas_differ", "not_comparable", "agree",
    "complete",
)  # fmt: skip
_VERDICT: Final = 16
_INDENT: Final = " " * _VERDICT
DEVICE_ORDER: Final = ("device", "odd", "suspected", "runs", "last_run", "last_step", "last_rank")


class Weights(Table):
    """The weights of one version, one row each, the worst first.

    `verdict` is `differs`, `missing`, `not comparable` (see `reason`), `not compared` or `agrees`;
    `ranks` are the rollout ranks that differ, `odd_ranks` the ranks that differ from their
    replicas.

    Usage:
        >>> weights = session.step(5).weights()
        >>> weights.about["counts"]           # {"differs": 1, "agrees": 310}
        >>> weights.where(verdict="differs")["name"]
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a line per weight with its full name, and notes below those that are wrong."""
        count = len(self) if rows is None else min(rows, len(self))
        lines = [f"{'verdict':<{_VERDICT}}name"] if len(self) else ["(no rows)"]
        for row in self[:count]:
            lines += _wrapped(f"{row['verdict']:<{_VERDICT}}", row["name"], width)
            lines += [line for note in _notes(row) for line in _wrapped(_INDENT, note, width)]
        if count < len(self):
            lines.append(f"... {len(self) - count} more rows")
        if self.truncated:
            lines.append(f"truncated at {len(self)} rows: the service has more (see limit)")
        return lines

    @property
    def heading(self) -> str:
        """The version, the number of weights per verdict, and the run."""
        counts = self.about.get("counts") or {}
        verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        text = f"weights of version {self.about.get('version')}: {verdicts or 'none'}"
        return render.printable(", ".join(part for part in (text, context(self.about)) if part))


def _notes(row: Row) -> Iterator[str]:
    """Yield what a reader must know about a weight that is wrong."""
    if row["reason"]:
        yield row["reason"]
    if row["verdict"] == "differs":
        form = f"{row['dtype']}[{', '.join(map(str, row['shape']))}]"
        yield f"{form}, on rollout rank {', '.join(map(str, row['ranks']))}"
        yield f"{row['trainer']} sent, {row['rollout']} received"
    if row["odd_ranks"]:
        yield f"unlike its replicas: {render.format_value(row['odd_ranks'])}"


def _wrapped(start: str, text: str, width: int) -> list[str]:
    room = max(width - len(start), 20)
    pieces = textwrap.wrap(render.printable(text), room) or [""]
    return [start + pieces[0], *(" " * len(start) + piece for piece in pieces[1:])]
