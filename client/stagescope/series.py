"""`Series`: a number over the steps of a run, displayed as a sparkline, and `Exact`."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope.answers import Record
from stagescope.table import Row, Table, begun_again_steps
from stagescope_wire import nonfinite, render
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import ranges_text
from stagescope_wire.render_html import escaped, html_block, html_line
from stagescope_wire.sparkline import Value, sparkline, step_ranges

_AGAIN_MARK: Final = "^"
_RESTART_MARK: Final = "|"
_STEP_FIELDS: Final = frozenset({
    "steps", "attempts", "superseded_by", "complete", "comparable", "begun_again", "reasons",
    "nonfinite",
})  # fmt: skip
"""Fields of an answer with one entry per step; they become columns."""
_SHOWN: Final = 64
_RESTARTS: Final = 6
"""Most restarts that a text lists."""
_READABLE: Final = 40
"""Characters of a sparkline beside its summary, unless it has fewer steps."""


class Series(Table):
    """One row per step, ascending: `step`, `attempt`, ..., and one column of values per series.

    Where attempts share steps, the rows of one attempt follow those of another.

    A value is None if the step has none (`reason` says why) and NaN if it is NaN. Read `comparable`
    before you trust a number: it is the verdict on the step's two streams. `begun_again` names
    the ranks that repeated the step within its attempt. Both passes count. `series` names the
    columns of values. Each has a description in `about["series"]`; scalars also have `low` and
    `high` there, over ranks and parts.

    Usage:
        >>> series = session.series("rollout_corr/k3_kl", by="rank")
        >>> series["step"], series["actor 0"]
        >>> series.to_pandas().plot(x="step", y=series.series)
    """

    __slots__ = ()

    @classmethod
    def from_answer(cls, answer: JsonObject) -> Series:
        """Return the series in an answer of `GET /series`; of several attempts one by one."""
        repeats = len(set(answer["steps"])) < len(answer["steps"])
        places = [*range(len(answer["steps"]))]
        if repeats:  # a line would jump between the attempts at every step
            places.sort(key=lambda at: (answer["attempts"][at], answer["steps"][at]))

        def ordered(values: Sequence[Json]) -> list[Json]:
            return [values[at] for at in places]

        columns: dict[str, Sequence[Json]] = {
            "step": ordered(answer["steps"]), "attempt": ordered(answer["attempts"]),
            "superseded_by": ordered(answer["superseded_by"]),
            "complete": ordered(answer["complete"]), "comparable": ordered(answer["comparable"]),
            "begun_again": ordered(answer.get("begun_again") or [[]] * len(places)),
            "nonfinite": ordered(answer.get("nonfinite") or [None] * len(places)),
            "reason": ordered(answer["reasons"]),
        }  # fmt: skip
        values = {one["name"] or "value": ordered(one["values"]) for one in answer["series"]}
        columns |= {name: nonfinite.numbers(each) for name, each in values.items()}
        about = {name: value for name, value in answer.items() if name not in _STEP_FIELDS}
        about["series"] = [
            {n: ordered(v) if n in ("low", "high") else v for n, v in _series_fields(one).items()}
            for one in answer["series"]
        ]
        about["names"] = [*values]
        title = answer["metric"] + (f" by {answer['by']}" if answer["by"] else "")
        return cls(columns, title=title, about=about, truncated=answer["earlier_to"] is not None)

    @property
    def series(self) -> list[str]:
        """Names of the columns of values, one per series."""
        return list(self.about["names"])

    @property
    def _kinds(self) -> Mapping[str, str]:
        return {"begun_again": "nested", "nonfinite": "int", **dict.fromkeys(self.series, "float")}

    @property
    def gaps(self) -> list[tuple[int, str]]:
        """(step, reason) of the steps without a value."""
        pairs = zip(self["step"], self["reason"], strict=True)
        return [(step, reason) for step, reason in pairs if reason is not None]

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a sparkline per series with its extremes, then the gaps and verdicts.

        Below the sparklines `|` marks where another attempt begins, `^` a step that was repeated.
        """
        if not len(self):
            return [
                line for note in self._empty_notes() for line in render.wrapped("", note, width)
            ]
        shown = self.series[: _SHOWN if rows is None else rows]
        left = max((render.width_of(name) for name in shown), default=0)
        facts = {name: _summary(self["step"], self[name]) for name in shown}
        right = max((len(text) for text in facts.values()), default=0)
        indent = left + len(render.GAP) if left else 0
        room = width - left - right - 2 * len(render.GAP)
        # A short sparkline hides steps: then its summary stands below it.
        is_narrow = room < min(max(len(self), 8), _READABLE)
        room = width - indent if is_narrow else room
        marks = [" " * indent + line for line in (self._marks(room),) if line]
        lines = []
        for name in shown:
            label = f"{render.printable(name):<{left}}{render.GAP}" if left else ""
            bars = f"{label}{sparkline(self[name], room)}"
            summary = facts[name]
            lines += [bars, *marks, f"  {summary}"] if is_narrow else [bars + render.GAP + summary]
        lines += marks if shown and not is_narrow else []
        if len(shown) < len(self.series):
            lines.append(f"... {len(self.series) - len(shown)} more series")
        notes = [*self._restart_notes(), *self.notes()]
        return lines + [line for note in notes for line in render.wrapped("", note, width)]

    def _restarts(self) -> list[int]:
        """Return the places of the rows at which another attempt than before begins."""
        attempts = self["attempt"]
        return [at for at in range(1, len(attempts)) if attempts[at] != attempts[at - 1]]

    def _marks(self, width: int) -> str:
        """Return the line of marks below a sparkline; "" for none. A restart hides a repetition."""
        restarts, again = {*self._restarts()}, [bool(ranks) for ranks in self["begun_again"]]
        marks = ""
        for begin, end in step_ranges(len(again), width):
            if restarts.intersection(range(begin, end)):
                marks += _RESTART_MARK
            else:
                marks += _AGAIN_MARK if any(again[begin:end]) else " "
        return marks.rstrip()

    def _restart_notes(self) -> list[str]:
        """Return which attempts begin where, for the marks of restarts."""
        begins = [f"attempt {self['attempt'][at]} at step {self['step'][at]}"
                  for at in self._restarts()]  # fmt: skip
        if not begins:
            return []
        more = f" and {len(begins) - _RESTARTS} more" if len(begins) > _RESTARTS else ""
        return [f"{_RESTART_MARK} begin of {', '.join(begins[:_RESTARTS])}{more}"]

    def notes(self) -> list[str]:
        """Return which steps these are, which have no value and why, and which are doubtful."""
        steps, attempts = self["step"], self["attempt"]
        distinct = sorted(set(steps))
        notes = [f"{render.counted(len(distinct), 'step')}, {distinct[0]} to {distinct[-1]}"]
        if len(set(attempts)) > 1:
            notes[0] += f", attempts {', '.join(map(str, sorted(set(attempts))))}"
        if len(distinct) < len(steps):
            notes[0] += f" ({len(steps) - len(distinct)} of them more than once)"
        by_reason = render.grouped((reason, step) for step, reason in self.gaps)
        notes += [
            f"no value at {ranges_text('step', sorted({*at}))}: {why}"
            for why, at in by_reason.items()
        ]
        if self.about["kind"] == "scalar":
            notes[0] += "; a value is the mean over the ranks and parts that logged it"
        if self.about["kind"] == "metric":
            verdicts = render.grouped(zip(self["comparable"], steps, strict=True))
            notes += [
                f"{verdict}: {ranges_text('step', sorted({*at}))}"
                for verdict, at in verdicts.items()
                if verdict not in (None, "comparable")
            ]
            broken = sorted({s for s, n in zip(steps, self["nonfinite"], strict=True) if n})
            if broken:
                notes.append(
                    f"some tokens are not finite and not counted: {ranges_text('step', broken)}"
                )
        pairs = zip(attempts, self["superseded_by"], strict=True)
        superseded = render.grouped(zip(pairs, steps, strict=True))
        notes += [
            f"superseded: {ranges_text('step', at)} of attempt {own}, "
            f"because attempt {by} resumed before them"
            for (own, by), at in sorted(superseded.items(), key=lambda each: each[0][0])
            if by is not None
        ]
        if self.about.get("note"):
            notes.append(str(self.about["note"]))
        notes += begun_again_steps(self, mark=f"{_AGAIN_MARK} ")
        if self.about.get("earlier_to") is not None:
            notes.append(f"there are earlier steps: ask for those up to {self.about['earlier_to']}")
        return notes

    def _empty_notes(self) -> list[str]:
        note = self.about.get("note")
        return ["(no steps)", *([str(note)] if note else [])]

    def __repr__(self) -> str:
        return "\n".join([render.clip(self.heading, 80), *self.lines()])

    def _repr_html_(self) -> str:
        """Return one line per series: dashed rules before attempts, triangles at repeated steps."""
        rules = self._restarts()
        marks = [at for at, ranks in enumerate(self["begun_again"]) if ranks]
        rows = []
        for name in self.series[:_SHOWN] if len(self) else ():
            facts = _summary(self["step"], self[name])
            what = f"{self.heading}, {name}: {facts}"
            line = html_line(self[name], what=what, rules=rules, marks=marks)
            label = "" if name == "value" else escaped(name)
            rows.append(f"<tr><td>{label}</td><td>{line}</td><td>{html.escape(facts)}</td></tr>")
        hidden = len(self.series) - _SHOWN
        notes = [f"... {hidden} more series"] if hidden > 0 else []
        notes += ["a dashed line: another attempt"] if rows and rules else []
        notes += self.notes() if len(self) else self._empty_notes()
        foot = "".join(f"<div>{escaped(note)}</div>" for note in notes)
        return html_block(self.heading, f"<table>{''.join(rows)}</table>{foot}")


def _series_fields(one: JsonObject) -> Row:
    return {
        name: nonfinite.numbers(value) if name in ("low", "high") else value
        for name, value in one.items()
        if name != "values"
    }


def _summary(steps: Sequence[int], values: Sequence[Value]) -> str:
    pairs = [(value, step) for step, value in zip(steps, values, strict=True) if value is not None]
    if not pairs:
        return "no value"
    finite = [(value, step) for value, step in pairs if math.isfinite(value)]
    last = render.format_value(float(pairs[-1][0]))
    text = f"last {last}"
    if finite:
        (low, at_low), (high, at_high) = min(finite), max(finite)
        text += f"  min {low:.4g} ({at_low})  max {high:.4g} ({at_high})"
    bad = [step for value, step in pairs if not math.isfinite(value)]
    return text + (f"  not finite at {ranges_text('step', bad)}" if bad else "")


class Exact(Record):
    """The steps of a run in which trainer and rollout are equal; `ranges` is the table."""

    __slots__ = ()

    def __init__(self, answer: JsonObject) -> None:
        super().__init__(answer, title=f"exact: {render.context(answer)}")

    @property
    def text(self) -> str:
        """The answer as one sentence."""
        return str(self["text"])

    @property
    def first(self) -> Row | None:
        """The first step that differs, and its first token by sample and position."""
        return None if self["first"] is None else dict(self["first"])

    @property
    def is_exact(self) -> bool:
        """Whether every measured step is proved to be exact."""
        return bool(self["rows"]) and {row["verdict"] for row in self["rows"]} == {"exact"}

    def ranges(self) -> Table:
        """Return one row per range of steps with the same verdict."""
        return Table.from_rows(self["rows"], title="ranges of steps")

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the sentence, wrapped."""
        return textwrap.wrap(self.text, width)

    def _repr_html_(self) -> str:
        return Record({"text": self.text}, title=self.heading)._repr_html_()
