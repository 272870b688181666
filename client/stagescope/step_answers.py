"""Answers about a step: ranks that hold up others, stacks, a sample's tokens, weights."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from stagescope.answers import Record
from stagescope.convert import Kinds
from stagescope.table import Row, Table
from stagescope_wire import nonfinite, render
from stagescope_wire.errors import StagescopeError
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import context
from stagescope_wire.render_html import escaped, html_block

_LACKS: Final = ("gap", "missing")
"""Columns of data that a step lacks."""


class Steps(Table):
    """The steps of a run; in text, what a step lacks is below the table, and is not shortened."""

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the table, and below it which steps lack numbers or ranks, and why."""
        named = [name for name in _LACKS if name in self.names]
        if width >= render.WIDE_ENOUGH or not len(self) or len(named) < len(_LACKS):
            return super().lines(width=width, rows=rows)
        others = (name for name in self.names if name not in named)
        lines = self.select(*others).lines(width=width, rows=rows)
        lacking = render.grouped(
            (_lacking(row, name), row["step"]) for row in self[:rows] for name in named if row[name]
        )
        for text, steps in lacking.items():
            at = render.ranges_text("step", sorted({*steps}))
            lines += render.wrapped("", f"{at}: {text}", width)
        return lines


def _lacking(row: Row, name: str) -> str:
    """Return what a step lacks; ranks that an open one waits for are not missing."""
    text = render.format_value(row[name])
    if name == "gap":
        return text
    return f"open, waiting for {text}" if row.get("complete") == "open" else f"missing {text}"


_PROCESS_COLUMNS: Final = ("process", "host", "pid", "role")


class Stuck(Table):
    """The ranks that hold up the others; in text, each rank's process is below the table.

    `about["collectives"]` holds the collectives that cannot finish; in text they come first.
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the collectives that cannot finish, the table, and each rank's process.

        Only the table is shortened.
        """
        named = [
            line for first, text in self._named() for line in render.wrapped(first, text, width)
        ]
        return [*named, *self._ranks(width, rows)]

    def _repr_html_(self) -> str:
        named = "".join(f"<div>{escaped(first + text)}</div>" for first, text in self._named())
        return f"{named}{super()._repr_html_()}"

    def _named(self) -> list[tuple[str, str]]:
        """Return indents and texts: each collective, then the lines at which its ranks wait."""
        found = []
        for each in self.about.get("collectives") or []:
            found.append(("", str(each["message"])))
            for at in each["waiting"]:
                if at["place"]:
                    ranks = render.ranges_text("rank", at["ranks"])
                    found.append(("  ", f"{ranks} (waiting): {at['place']}"))
        return found

    def _ranks(self, width: int, rows: int | None) -> list[str]:
        shown = [name for name in self.names if name not in _PROCESS_COLUMNS]
        has_processes = len(self.names) - len(shown) == len(_PROCESS_COLUMNS)
        if width >= render.WIDE_ENOUGH or not len(self) or not has_processes:
            return super().lines(width=width, rows=rows)
        lines = self.select(*shown).lines(width=width, rows=rows)
        for row in self[:rows]:
            rank = f"{row['role']} rank {row['rank']}: "
            lines += render.wrapped(rank, _process(row), width)
        return lines


def _process(row: Row) -> str:
    """Return a text such as `process silent, pid 4711 on gpu-3`."""
    if row["process"] == "unheard":
        return "no process reports"
    pid = "unknown" if row["pid"] is None else row["pid"]
    # A lease runs out of a process that is stopped, cut off or dead: which of them is not known.
    state = {"gone": "does not answer, its lease ran out"}.get(row["process"], row["process"])
    return f"process {state or 'unknown'}, pid {pid} on {row['host'] or 'unknown host'}"


class Stacks(Record):
    """The Python stacks of processes; `rows` holds one mapping per process.

    Usage:
        >>> print(session.stacks(ranks=[1]))             # the training thread of rank 1
        >>> session.stacks(ranks=[1]).rows[0]["threads"] # every thread
        >>> print(step.stacks().all_threads())
    """

    __slots__ = ("_shows_all_threads",)

    def __init__(self, answer: JsonObject, *, title: str, shows_all_threads: bool = False) -> None:
        super().__init__(answer, title=title)
        self._shows_all_threads = shows_all_threads

    @property
    def rows(self) -> Sequence[JsonObject]:
        """The processes that answered: role, rank, step, stage, state, source and threads.

        A thread has name, ident, is_training, and its stack as text, the outermost frame first.
        """
        rows: Sequence[JsonObject] = self["rows"]
        return rows

    @property
    def not_answered(self) -> Sequence[JsonObject]:
        """The processes that did not answer: role, rank and reason."""
        rows: Sequence[JsonObject] = self.get("not_answered") or []
        return rows

    def of_ranks(self, ranks: Collection[int]) -> Stacks:
        """Return the stacks of these ranks only."""
        answer = {**self, "rows": [row for row in self.rows if row["rank"] in ranks]}
        return Stacks(answer, title=self.heading, shows_all_threads=self._shows_all_threads)

    def all_threads(self) -> Stacks:
        """Return the same stacks, displayed with all threads instead of the training threads."""
        return Stacks(self, title=self.heading, shows_all_threads=True)

    def lines(self, *, width: int = 80) -> list[str]:
        """Return a heading per process, and below it the stacks; frames are never shortened."""
        lines: list[str] = ["outermost frame first, as in a traceback"] if self.rows else []
        for row in self.rows:
            lines += [render.clip(_heading(row), width), *self._threads(row), ""]
        for missing in self.not_answered:
            rank = f"{missing['role'] or ''} rank {missing['rank']}".strip()
            lines.append(render.printable(f"{rank}: {missing['reason']}"))
        return lines or ["no stacks were taken"]

    def _threads(self, row: JsonObject) -> list[str]:
        threads = row.get("threads") or []
        training = [thread for thread in threads if thread.get("is_training")]
        # If no thread is known to train, each of them may.
        shown = threads if self._shows_all_threads or not training else training
        lines = []
        for thread in shown:
            name = thread.get("name") or f"thread {thread.get('ident')}"
            mark = " (training)" if thread.get("is_training") else ""
            lines.append(render.printable(f"  {name}{mark}"))
            stack = str(thread.get("stack") or "(no Python frame)")
            lines += [f"  {render.printable(line)}" for line in stack.split("\n")]
        if len(shown) < len(threads):
            others = render.counted(len(threads) - len(shown), "other thread")
            lines.append(f"  and {others}")
        return lines


def _heading(row: JsonObject) -> str:
    step = "" if row.get("step") is None else f" in step {row['step']}"
    stage = f", {row['stage']}" if row.get("stage") else ""
    source = " (its watchdog)" if row.get("source") == "watchdog" else ""
    state = "" if row.get("state") == "answered" else f": {row.get('state')}"
    return render.printable(f"{row.get('role')} rank {row.get('rank')}{step}{stage}{source}{state}")


_SHOWN_TOKENS: Final = 4000
"""Tokens of the text in a notebook."""
_FULL_SHADE: Final = 0.5
"""Smallest |d|, in nats, that shades a token fully."""
_SHADE: Final = "213,94,0"
_NOT_FINITE: Final = "204,0,160"
_LEGEND: Final = (
    f"shaded by |d|, fully from {_FULL_SHADE} nat on; purple: not finite; faint: not of the model"
)
_COLUMNS: Final[Kinds] = {
    "position": "int", "text": "text", "token_id": "int?", "round": "int?", "d": "float",
    "p": "float", "q": "float", "fate": "text", "weight": "float", "weight_raw": "float",
    "advantage": "float", "clipped": "text", "turn": "int?", "mask": "int",
}  # fmt: skip
_FIELDS: Final = {"position": "positions", "text": "texts", "token_id": "token_ids"}
"""Column -> the field of the answer with its values, if they have two names."""


class SampleTokens(Table):
    """One row per token, in the order of the sample; d = p - q in nats.

    A column that was not recorded is None throughout; `about["unrecorded"]` says how to record it,
    `about["texts_reason"]` why there are no texts.

    Usage:
        >>> step = session.step(5)
        >>> tokens = step.sample(step.samples()[0]["sample_uid"])
        >>> tokens.text            # the decoded sample
        >>> tokens.where(fate="rejected")
    """

    __slots__ = ()

    @classmethod
    def of_answer(cls, answer: Json) -> SampleTokens:
        """Return the table of an answer of `/steps/{step}/samples/{sample_uid}`."""
        if not isinstance(answer, dict) or not isinstance(answer.get("positions"), list):
            raise StagescopeError(
                "the service answered without tokens",
                advice="install versions of service and client that belong together",
            )
        length = len(answer["positions"])
        columns: dict[str, Sequence[Json]] = {
            name: values if kind == "text" else nonfinite.column(name, values)
            for name, kind in _COLUMNS.items()
            for values in (answer.get(_FIELDS.get(name, name)) or [None] * length,)
        }
        fields = {_FIELDS.get(name, name) for name in _COLUMNS}
        about = {name: value for name, value in answer.items() if name not in fields}
        reasons = [f"no texts: {about['texts_reason']}"] if about.get("texts_reason") else []
        reasons += [about["loss_note"]] if about.get("loss_note") else []
        about["note"] = "; ".join(reasons)
        title = f"tokens of {about.get('sample_uid') or 'a row'}"
        return cls(columns, title=title, about=about, kinds=_COLUMNS)

    def _repr_html_(self) -> str:
        """Return the text with every token shaded by its |d|, and the table below it."""
        shown = range(min(len(self), _SHOWN_TOKENS))
        tokens = "".join(map(self._token, shown))
        more = f" ... {len(self) - len(shown)} more tokens" if len(self) > len(shown) else ""
        return html_block(
            self.heading,
            '<div style="white-space:pre-wrap;line-height:1.7;max-height:20em;overflow-y:auto">'
            f"{tokens}{more}</div><div><small>{html.escape(_LEGEND)}</small></div>"
            f"<details><summary>as a table</summary>{super()._repr_html_()}</details>",
        )

    def _token(self, at: int) -> str:
        text, d = self["text"][at], self["d"][at]
        token_id = self["token_id"][at]
        shown = f"{'·' if token_id is None else token_id} " if text is None else str(text)
        if not self["mask"][at]:
            return f'<span style="opacity:.5">{html.escape(shown)}</span>'
        facts = [f"position {self['position'][at]}", f"round {self['round'][at]}"]
        facts += [f"{name} {render.format_value(self[name][at])}" for name in ("d", "p", "q")]
        facts += [str(self["fate"][at])] if self["fate"][at] else []
        value = float(d) if isinstance(d, int | float) else math.nan
        strength = min(abs(value) / _FULL_SHADE, 1.0) if math.isfinite(value) else 1.0
        colour = _SHADE if math.isfinite(value) else _NOT_FINITE
        return (
            f'<span style="background:rgba({colour},{0.8 * strength:.2f})" '
            f'title="{html.escape(", ".join(facts))}">{html.escape(shown)}</span>'
        )

    @property
    def text(self) -> str | None:
        """The sample as text; None without a tokenizer."""
        texts = self["text"]
        return None if None in texts else "".join(map(str, texts))


_VERDICT: Final = 16
_INDENT: Final = " " * _VERDICT


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
        lines = [f"{'verdict':<{_VERDICT}}name"] if len(self) else ["(no rows)"]
        for row in self[:rows]:
            lines += _wrapped(f"{row['verdict']:<{_VERDICT}}", row["name"], width)
            lines += [line for note in _notes(row) for line in _wrapped(_INDENT, note, width)]
        return lines + self._omissions(rows)

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
