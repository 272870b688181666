"""Tables of the canary: how engines and trainer score the same tokens, version by version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from stagescope.table import Row, Table
from stagescope_wire import render
from stagescope_wire.canary import PAIRS
from stagescope_wire.nonfinite import JsonObject

_REPEATED: Final = "difference vs before"
"""A pair that is a column only where it is wrong: in a healthy run it says nothing."""
_COLUMNS: Final[Mapping[str, str]] = {
    **dict(zip((pair.name for pair in PAIRS), ("trainer", "decode", "cached", "adapter", "twice"),
               strict=True)),
    "engine vs engines": "engines",
    "engine vs before": "before",
    _REPEATED: "again",
}  # fmt: skip
"""Pair of arms -> its column in text."""
_WRONG: Final = ("differs", "equal")
_MARK: Final = "!"


class CanaryVersions(Table):
    """The versions that a canary scored, one row for each engine, the newest first.

    `pairs` has the numbers of each pair of arms. In text, the verdict is the cause where there is
    one. Each pair is a column with mean |d| in nats; a `!` marks one that is wrong, and the reasons
    follow below the table.

    Usage:
        >>> versions = session.canary("my-run")
        >>> versions.where(verdict="differs")["version"]
        >>> versions[0]["pairs"][0]["mean"]
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a line for each version and engine, and below them what is wrong."""
        shown = [*self[:rows]]
        if not shown:
            return super().lines(width=width, rows=rows)
        pairs = {
            pair["pair"]
            for row in shown
            for pair in row["pairs"]
            if pair["pair"] != _REPEATED or pair["verdict"] in _WRONG
        }
        columns = {name: column for name, column in _COLUMNS.items() if name in pairs}
        table = Table.from_rows([_line(row, columns) for row in shown])
        lines = table.lines(width=width)
        if columns:
            text = ", ".join(f"{column}: {name}" for name, column in columns.items())
            lines += render.wrapped("", f"mean |d| in nat; {text}", width)
        for row in shown:
            for note in _notes(row):
                lines += render.wrapped("", note, width)
        return lines + self._omissions(rows)


def _line(row: Row, columns: Mapping[str, str]) -> JsonObject:
    means = {pair["pair"]: _cell(pair) for pair in row["pairs"]}
    return {
        "version": row["version"],
        "step": row["step"],
        "engine": row["source"] or "(none)",
        "verdict": ", ".join(row["causes"]) or row["verdict"],
        **{column: means.get(name, "-") for name, column in columns.items()},
    }


def _cell(pair: JsonObject) -> str:
    mean = "nan" if pair["mean"] is None else f"{pair['mean']:.2g}"
    return mean + (_MARK if pair["verdict"] in _WRONG else "")


def _notes(row: Row) -> Iterator[str]:
    """Yield what a reader must know about a version that is wrong."""
    where = f"version {row['version']}, {row['source'] or 'engine'}"
    if row["problem"]:
        yield f"{where}: {row['problem']}"
    yield from row["reasons"]
    for pair in row["pairs"]:
        if pair["verdict"] in _WRONG and not (pair["cause"] and row["reasons"]):
            usual = "" if pair["usual"] is None else f", usually {pair['usual']:.2g}"
            gaps = f", {pair['not_finite']} not finite" if pair["not_finite"] else ""
            tokens = render.counted(pair["tokens"], "token")
            yield (
                f"{where}: {pair['pair']} {_cell(pair)[:-1]}{gaps} over {tokens}"
                f"{usual}, bound {pair['bound']:.2g} ({pair['bound_of']})"
            )
