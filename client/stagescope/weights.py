"""Answers about weights: what the rollout received, held bit for bit against what was sent."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stagescope import render
from stagescope.frames import Table, context

WEIGHT_ORDER: Final = ("name", "verdict", "ranks", "odd_ranks", "dtype", "shape", "reason")
"""Columns that are shown first: a table in 80 columns leaves out the last."""
VERSION_ORDER: Final = (
    "version", "step", "differ", "missing", "replicas_differ", "not_comparable", "agree",
    "complete",
)  # fmt: skip
_VERDICT: Final = 16
_INDENT: Final = " " * _VERDICT
DEVICE_ORDER: Final = ("device", "odd", "suspected", "runs", "last_run", "last_step", "last_rank")


class Weights(Table):
    """The weights of one version, a row each, the worst first.

    `verdict` is `differs`, `missing`, `not comparable` (see `reason`), `not compared` or `agrees`;
    `ranks` are those of the rollout that differ, `odd_ranks` those whose replicas hold something
    else.

    Usage:
        >>> weights = session.step(5).weights()
        >>> weights.about["counts"]           # {"differs": 1, "agrees": 310}
        >>> weights.where(verdict="differs")["name"]
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a line a weight, names whole; below, what is to be said of one that is wrong."""
        count = len(self) if rows is None else min(rows, len(self))
        lines = [f"{'verdict':<{_VERDICT}}name"] if len(self) else ["(no rows)"]
        for row in (self[at] for at in range(count)):
            lines += _wrapped(f"{row['verdict']:<{_VERDICT}}", row["name"], width)
            lines += [line for note in _notes(row) for line in _wrapped(_INDENT, note, width)]
        if count < len(self):
            lines.append(f"... {len(self) - count} more rows")
        if self.truncated:
            lines.append(f"truncated at {len(self)} rows: the service has more (see limit)")
        return lines

    @property
    def heading(self) -> str:
        """The version, how many weights have which verdict, and of which run."""
        counts = self.about.get("counts") or {}
        words = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        said = f"weights of version {self.about.get('version')}: {words or 'none'}"
        return render.printable(", ".join(part for part in (said, context(self.about)) if part))


def _notes(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a reader must know of a weight that is not as it should be."""
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
