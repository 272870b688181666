"""`Series`: one number over the steps of a run, as columns, with a sparkline as text."""

from __future__ import annotations

import html
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stagescope import render
from stagescope.answers import Record
from stagescope.frames import Table, begun_again_steps
from stagescope.wire import nonfinite

_BARS: Final = "▁▂▃▄▅▆▇█"
_PLAIN: Final = "_.-=+*%#"
_NAN: Final = "!"
_AGAIN: Final = "^"
_ALIGNED: Final = frozenset({
    "steps", "attempts", "superseded_by", "complete", "comparable", "begun_again", "reasons",
})  # fmt: skip
"""What an answer holds an entry a step of, and is a column."""
_SHOWN: Final = 64

Value = float | None


class Series(Table):
    """A row a step, ascending: `step`, `attempt`, ..., and a column of values for each series.

    A value is None where the step has none (`reason` says why) and NaN where it is NaN.
    `comparable` is the verdict on the step's two streams: read it before a number is trusted.
    `begun_again` names the ranks that did the step again within its attempt: both goes count.
    `series` names the columns of values; `about["series"]` says what each is of, and of scalars
    `low` and `high` over ranks and parts.

    Usage:
        >>> series = session.series("rollout_corr/k3_kl", by="rank")
        >>> series["step"], series["actor 0"]
        >>> series.to_pandas().plot(x="step", y=series.series)
    """

    __slots__ = ()

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Series:
        """Return what `GET /series` answered."""
        columns: dict[str, Sequence[Any]] = {
            "step": answer["steps"],
            "attempt": answer["attempts"],
            "superseded_by": answer["superseded_by"],
            "complete": answer["complete"],
            "comparable": answer["comparable"],
            "begun_again": answer.get("begun_again") or [[]] * len(answer["steps"]),
            "reason": answer["reasons"],
        }
        names = []
        for one in answer["series"]:
            name = one["name"] or "value"
            names.append(name)
            columns[name] = [nonfinite.number(value) for value in one["values"]]
        about = {name: value for name, value in answer.items() if name not in _ALIGNED}
        about["series"] = [_place(one) for one in answer["series"]]
        about["names"] = names
        title = answer["metric"] + (f" by {answer['by']}" if answer["by"] else "")
        return cls(columns, title=title, about=about, truncated=answer["earlier_to"] is not None)

    @property
    def series(self) -> list[str]:
        """Names of the columns that hold values, one a series."""
        return list(self.about["names"])

    @property
    def _kinds(self) -> Mapping[str, str]:
        return {"begun_again": "nested", **dict.fromkeys(self.series, "float")}

    @property
    def gaps(self) -> list[tuple[int, str]]:
        """(step, reason) of the steps without a value."""
        pairs = zip(self["step"], self["reason"], strict=True)
        return [(step, reason) for step, reason in pairs if reason is not None]

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a sparkline a series with its extremes, then its gaps and verdicts."""
        if not len(self):
            return ["(no steps)"]
        shown = self.series[: _SHOWN if rows is None else rows]
        left = max((render.width_of(name) for name in shown), default=0)
        facts = {name: _facts(self["step"], self[name]) for name in shown}
        right = max((len(text) for text in facts.values()), default=0)
        indent = left + len(render.GAP) if left else 0
        room = width - left - right - 2 * len(render.GAP)
        is_tight = room < 8
        room = width - indent if is_tight else room
        lines = []
        for name in shown:
            label = f"{render.printable(name):<{left}}{render.GAP}" if left else ""
            bars = f"{label}{sparkline(self[name], room)}"
            lines += [bars, f"  {facts[name]}"] if is_tight else [bars + render.GAP + facts[name]]
        if shown and any(self["begun_again"]):
            lines.append(" " * indent + self._marks(room))
        if len(shown) < len(self.series):
            lines.append(f"... {len(self.series) - len(shown)} more series")
        return lines + [line for note in self.notes() for line in render.wrapped("", note, width)]

    def _marks(self, width: int) -> str:
        """Return a line of `^` for below a sparkline: where a step was begun again."""
        again = [bool(ranks) for ranks in self["begun_again"]]
        return "".join(_AGAIN if any(again[a:b]) else " " for a, b in _places(len(again), width))

    def notes(self) -> list[str]:
        """Return which steps they are, which have no value and why, and which to distrust."""
        steps, attempts = self["step"], self["attempt"]
        notes = [f"{render.counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}"]
        if len(set(attempts)) > 1:
            notes[0] += f", attempts {', '.join(map(str, sorted(set(attempts))))}"
        by_reason: dict[str, list[int]] = {}
        for step, reason in self.gaps:
            by_reason.setdefault(reason, []).append(step)
        notes += [
            f"no value at {render.stretches('step', at)}: {reason}"
            for reason, at in by_reason.items()
        ]
        if self.about["kind"] == "metric":
            verdicts: dict[str, list[int]] = {}
            for step, verdict in zip(steps, self["comparable"], strict=True):
                if verdict not in (None, "comparable"):
                    verdicts.setdefault(str(verdict), []).append(step)
            notes += [
                f"{verdict}: {render.stretches('step', at)}" for verdict, at in verdicts.items()
            ]
        again = [step for step, by in zip(steps, self["superseded_by"], strict=True) if by]
        if again:
            notes.append(f"done again by a later attempt: {render.stretches('step', again)}")
        notes += begun_again_steps(self, mark=f"{_AGAIN} ")
        if self.about.get("earlier_to") is not None:
            notes.append(f"there are earlier steps: ask for those up to {self.about['earlier_to']}")
        return notes

    def __repr__(self) -> str:
        return "\n".join([render.clip(self.heading, 80), *self.lines()])

    def _repr_html_(self) -> str:
        rows = []
        for name in self.series[:_SHOWN]:
            line = html.escape(sparkline(self[name], 60, bars=_BARS))
            facts = html.escape(_facts(self["step"], self[name])) if len(self) else ""
            rows.append(
                f"<tr><td>{html.escape(render.printable(name))}</td>"
                f'<td style="font-family:monospace;white-space:pre">{line}</td>'
                f"<td>{facts}</td></tr>"
            )
        if rows and any(self["begun_again"]):
            marks = html.escape(self._marks(60))
            rows.append(
                f'<tr><td></td><td style="font-family:monospace;white-space:pre">{marks}</td></tr>'
            )
        notes = "".join(
            f"<div>{html.escape(render.printable(note))}</div>"
            for note in (self.notes() if len(self) else ["(no steps)"])
        )
        return render.html_block(self.heading, f"<table>{''.join(rows)}</table>{notes}")


def _place(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a series is of; of a scalar also its extremes over ranks and parts."""
    return {
        name: nonfinite.numbers(value) if name in ("low", "high") else value
        for name, value in one.items()
        if name != "values"
    }


def sparkline(values: Sequence[Value], width: int, *, bars: str = "") -> str:
    """Return the values as a line of at most `width` bars, the highest of each stretch.

    A space is a gap, `!` a value that is not finite.
    """
    bars = bars or (_BARS if _draws(_BARS) else _PLAIN)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    line = ""
    for begin, end in _places(len(values), width):
        here = [value for value in values[begin:end] if value is not None]
        if not here:
            line += " "
        elif not all(map(math.isfinite, here)):
            line += _NAN
        else:
            share = (max(here) - low) / (high - low) if high > low else 0.0
            line += bars[min(int(share * len(bars)), len(bars) - 1)]
    return line


def _places(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield which of `count` steps, from and to, each place of a line of `width` stands for."""
    width = max(min(width, count), 1)
    for place in range(width):
        yield place * count // width, (place + 1) * count // width


def _draws(text: str) -> bool:
    """Return whether the output's encoding has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _facts(steps: Sequence[int], values: Sequence[Value]) -> str:
    known = [(value, step) for step, value in zip(steps, values, strict=True) if value is not None]
    if not known:
        return "no value"
    finite = [(value, step) for value, step in known if math.isfinite(value)]
    last = render.format_value(float(known[-1][0]))
    text = f"last {last}"
    if finite:
        (low, at_low), (high, at_high) = min(finite), max(finite)
        text += f"  min {low:.4g} ({at_low})  max {high:.4g} ({at_high})"
    bad = [step for value, step in known if not math.isfinite(value)]
    return text + (f"  not finite at {render.stretches('step', bad)}" if bad else "")


class Exact(Record):
    """Which steps of a run are exact; `ranges` is a table of it."""

    __slots__ = ()

    def __init__(self, said: Mapping[str, Any]) -> None:
        attempt = said.get("attempt")
        of = "" if attempt is None else f", attempt {attempt}"
        super().__init__(said, title=f"exact: run {said.get('run')}{of}")

    @property
    def text(self) -> str:
        """All of it in a sentence."""
        return str(self["text"])

    @property
    def first(self) -> dict[str, Any] | None:
        """The first step that differs, and its first token by sample and position."""
        return None if self["first"] is None else dict(self["first"])

    @property
    def is_exact(self) -> bool:
        """Whether every measured step is proved to be exact."""
        return bool(self["rows"]) and {row["verdict"] for row in self["rows"]} == {"exact"}

    def ranges(self) -> Table:
        """Return a row for each range of steps of one verdict."""
        return Table.from_rows(self["rows"], title="ranges of steps")

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the sentence, wrapped."""
        return textwrap.wrap(self.text, width)

    def _repr_html_(self) -> str:
        return Record({"text": self.text}, title=self.heading)._repr_html_()
