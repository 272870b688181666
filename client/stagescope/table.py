"""`Table`: the rows of an answer, stored by column; displays as text or HTML, converts to frames.

pandas, polars and pyarrow are imported on demand (extra `notebook`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, overload

from stagescope import convert
from stagescope.convert import Kinds
from stagescope_wire import nonfinite, render
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import unknown_name
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import context
from stagescope_wire.render_html import html_table

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

_Table = TypeVar("_Table", bound="Table")

Row: TypeAlias = dict[str, Json]
"""Column -> value of one row."""

SHOWN_ROWS: Final = 20
RAISE_LIMIT: Final = " (raise --limit; in Python: limit=)"
"""How to see rows that the limit left out."""


class Table:
    """Rows of one kind, stored by column; immutable.

    Missing values are None. Non-finite numbers are floats. `about` holds the answer's other fields
    (run, attempt, completeness, ...). `truncated` is true if the service has more rows than the
    limit.

    Usage:
        >>> table = session.step(5).rounds()
        >>> table[0]                    # first row, a dict
        >>> table["abs_diff_mean"]      # a column, a tuple
        >>> table.where(comparable="comparable").to_pandas()
    """

    __slots__ = (
        "_about", "_columns", "_declared_kinds", "_length", "_title", "_truncated", "_units",
    )  # fmt: skip

    def __init__(
        self, columns: Mapping[str, Sequence[Json]], *, title: str = "",
        units: Mapping[str, str] | None = None, about: JsonObject | None = None,
        truncated: bool = False, kinds: Kinds = MappingProxyType({}),
    ) -> None:  # fmt: skip
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidInput(f"columns of lengths {lengths}", expected="one length")
        self._columns = {name: tuple(values) for name, values in columns.items()}
        self._length = next(iter(lengths.values()), 0)
        self._title = title
        self._units = {name: unit for name in columns if (unit := render.unit_of(name))}
        self._units.update(units or {})
        self._about = dict(about or {})
        self._truncated = truncated
        self._declared_kinds = kinds

    @classmethod
    def from_rows(
        cls, rows: Iterable[JsonObject], *, order: Sequence[str] = (),
        columns: Kinds = MappingProxyType({}), title: str = "", about: JsonObject | None = None,
        truncated: bool = False,
    ) -> Table:  # fmt: skip
        """Return a table of `rows` as the service sends them, with the columns of `order` first.

        Missing fields become None. In columns of numbers the strings "nan", "inf" and "-inf" become
        floats. `columns` are those that every row has: a table without rows has them, too.
        """
        rows = list(rows)
        present = dict.fromkeys(name for row in rows for name in row) if rows else dict(columns)
        names = [name for name in dict.fromkeys((*order, *columns)) if name in present]
        names += [name for name in present if name not in names]
        values = {name: nonfinite.column(name, [row.get(name) for row in rows]) for name in names}
        return cls(values, kinds=columns, title=title, about=about, truncated=truncated)

    @classmethod
    def from_table(cls: type[_Table], table: Table, *, title: str | None = None) -> _Table:
        """Return the rows of `table` as a table of this class, with `title` if it is given."""
        columns = {name: table[name] for name in table.names}
        name = table.title if title is None else title
        return cls(
            columns, title=name, about=table.about, truncated=table.truncated, kinds=table._kinds
        )

    @property
    def title(self) -> str:
        """The title of the rows."""
        return self._title

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(self._columns)

    @property
    def units(self) -> Mapping[str, str]:
        """Units of columns that have one: `B`, `s`, `unix` (seconds since 1970, UTC)."""
        return MappingProxyType(self._units)

    @property
    def about(self) -> JsonObject:
        """The fields of the answer besides its rows."""
        return MappingProxyType(self._about)

    @property
    def truncated(self) -> bool:
        """Whether the service has more rows than the limit."""
        return self._truncated

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Row]:
        return (self._row(index) for index in range(self._length))

    @overload
    def __getitem__(self, key: int) -> Row: ...
    @overload
    def __getitem__(self, key: slice) -> Table: ...
    @overload
    def __getitem__(self, key: str) -> tuple[Json, ...]: ...
    def __getitem__(self, key: int | slice | str) -> Row | Table | tuple[Json, ...]:
        if isinstance(key, str):
            if key not in self._columns:
                raise unknown_name(key, self.names)
            return self._columns[key]
        if isinstance(key, slice):
            return self._with({name: values[key] for name, values in self._columns.items()})
        if not -self._length <= key < self._length:
            raise IndexError(f"row {key} of a table of {self._length} rows")
        return self._row(key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return self._columns == other._columns and self._about == other._about

    def _ipython_key_completions_(self) -> list[str]:
        return [*self._columns]

    def select(self, *names: str) -> Table:
        """Return the table with these columns only."""
        return self._with({name: self[name] for name in names})

    def where(self, **equal: object) -> Table:
        """Return the rows whose columns have these values."""
        for name in equal:
            # A table without rows may have no columns: then nothing matches.
            if name not in self._columns and (self._columns or self._length):
                raise unknown_name(name, self.names)
        kept = [
            row
            for row in range(self._length)
            if all(self._columns[name][row] == value for name, value in equal.items())
        ]
        return self._with({n: [v[row] for row in kept] for n, v in self._columns.items()})

    def to_dicts(self) -> list[Row]:
        """Return the rows as dicts."""
        return list(self)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas DataFrame.

        A column of ints with missing values is `Int64`, of bools `boolean`. In a column of floats a
        missing value becomes NaN; polars and arrow distinguish the two.
        """
        return convert.to_pandas(self._columns, self._kinds)

    def to_polars(self) -> polars.DataFrame:
        """Return a polars DataFrame; lists and records (`begun_again`) stay what they are.

        Other nested values are JSON text.
        """
        return convert.to_polars(self._columns, self._kinds)

    def to_arrow(self) -> pyarrow.Table:
        """Return a pyarrow Table; lists and records (`begun_again`) stay what they are.

        Other nested values are JSON text.
        """
        return convert.to_arrow(self._columns, self._kinds)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Export by the Arrow PyCapsule interface: `polars.DataFrame(table)`, duckdb and others."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    @property
    def _kinds(self) -> Mapping[str, str]:
        """Types of the columns that are known without their values."""
        return self._declared_kinds

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return the table as lines of text of at most `width` columns, without its title."""
        columns = self._displayed_columns(rows)
        foot = [piece for line in self._foot(rows) for piece in textwrap.wrap(line, width)]
        if not columns or not self._length:
            return ["(no rows)", *foot]
        return [*render.text_table(columns, units=self._units, width=width), *foot]

    @property
    def heading(self) -> str:
        """Title, run and attempt on one line."""
        return ", ".join(part for part in (self._title, context(self._about)) if part)

    def __repr__(self) -> str:
        count = render.counted(self._length, "row")
        heading = f"{self.heading} ({count})" if self.heading else count
        return "\n".join([render.clip(heading, 80), *self.lines(rows=SHOWN_ROWS)])

    def _repr_html_(self) -> str:
        rows = 5 * SHOWN_ROWS
        columns, foot = self._displayed_columns(rows), self._foot(rows)
        if not columns or not self._length:
            columns, foot = {}, ["(no rows)", *foot]
        return html_table(columns, units=self._units, caption=self.heading, foot=foot)

    def _displayed_columns(self, rows: int | None) -> dict[str, tuple[Json, ...]]:
        # A value that is the same in every row and in the heading needs no column.
        in_heading = {
            name
            for name, value in self._about.items()
            if name in ("run", "attempt", "step") and set(self._columns.get(name, ())) == {value}
        }
        columns = {n: v[:rows] for n, v in self._columns.items() if n not in in_heading}
        if self._has_step_verdicts:
            of_steps = columns.pop("step_comparable")
            columns["comparable"] = tuple(
                f"{own}{MARK}" if is_misleading(own, step) else own
                for own, step in zip(columns["comparable"], of_steps, strict=True)
            )
        return columns

    @property
    def _has_step_verdicts(self) -> bool:
        """Whether rows have their own verdict beside the step's."""
        return {"comparable", "step_comparable"} <= self._columns.keys()

    def _foot(self, rows: int | None) -> list[str]:
        foot = self._omissions(rows)
        about = self._about
        if "coverage" in about and about.get("complete") not in (None, "complete"):
            foot.append(f"the step is {render.format_value(about['complete'])}")
        if "coverage" in about and (notes := coverage_notes(about["coverage"])):
            foot += notes
        elif about.get("gap"):
            foot.append(str(about["gap"]))
        foot += comparability_notes(about)
        if self._has_step_verdicts:
            pairs = zip(self["comparable"], self["step_comparable"], strict=True)
            steps = dict.fromkeys(step for own, step in pairs if is_misleading(own, step))
            foot += [
                f"{MARK} judged by the tokens of this row alone; the whole step is {step}"
                for step in steps
            ]
        foot += turns_note(about)
        foot += begun_again(about)
        if "begun_again" in self._columns and "step" in self._columns:
            foot += begun_again_steps(self)
        if about.get("note"):
            foot.append(str(about["note"]))
        if about.get("superseded_by") is not None:
            foot.append(f"superseded by attempt {render.format_value(about['superseded_by'])}")
        return foot

    def _omissions(self, rows: int | None) -> list[str]:
        """Return which rows a text of the first `rows` lacks, a line for each reason."""
        notes = []
        if rows is not None and self._length > rows:
            notes.append(f"... {self._length - rows} more rows")
        if self._truncated:
            shown = render.counted(self._length, "row")
            notes.append(f"truncated at {shown}: the service has more{RAISE_LIMIT}")
        return notes

    def _row(self, index: int) -> Row:
        return {name: values[index] for name, values in self._columns.items()}

    def _with(self, columns: Mapping[str, Sequence[Json]]) -> Table:
        lost_all_rows = self._length and not any(map(len, columns.values()))
        # A selection without rows keeps the column types of the table it was selected from.
        kinds = convert.kinds(self._columns, self._kinds) if lost_all_rows else self._kinds
        units = {name: unit for name, unit in self._units.items() if name in columns}
        return Table(
            columns, title=self._title, units=units, about=self._about,
            truncated=self._truncated, kinds=kinds,
        )  # fmt: skip


MARK: Final = "*"
"""Suffix of a verdict that would mislead without the step's verdict."""
_TRUSTED: Final = ("comparable", "exact")


def is_misleading(own: Json, step: Json) -> bool:
    """Return whether a row or slice can be compared alone, although its step cannot."""
    return own in _TRUSTED and step is not None and step not in _TRUSTED


def step_verdict_notes(about: JsonObject) -> list[str]:
    """Return the verdict on the whole step if the verdict on the answer's numbers misleads."""
    step, cause = about.get("step_comparable"), about.get("step_cause")
    if not is_misleading(about.get("comparable"), step):
        return []
    return [f"the whole step is {step}{f': {cause}' if cause else ''}; see its metrics"]


def comparability_notes(about: JsonObject) -> list[str]:
    """Return why the numbers of an answer cannot be trusted, the most likely cause first."""
    verdict = about.get("comparable")
    if verdict in (None, "comparable"):
        return step_verdict_notes(about)
    reasons = [
        reason_text(item)
        for item in about.get("comparability") or ()
        if verdict == "unknown" or item.get("verdict") != "unknown"
    ]
    own = [f"comparable: {verdict}", *(f"  {reason}" for reason in reasons)]
    return [*own, *step_verdict_notes(about)]


def reason_text(item: JsonObject) -> str:
    """Return a reason against a comparison: its code, verdict and text."""
    return ": ".join(str(item[name]) for name in ("code", "verdict", "text") if item.get(name))


def turns_note(about: JsonObject) -> list[str]:
    """Return where the true turns of rows by round are, if the step has any."""
    if about.get("by") != "round" or not about.get("turns"):
        return []
    count = render.counted(about["turns"], "true turn")
    return [f'this step has {count}: --by turn lists them (in Python: by="turn")']


def begun_again(about: JsonObject) -> list[str]:
    """Return a sentence on the ranks that repeated the answer's step within its attempt."""
    ranks = about.get("begun_again")
    if not ranks:
        return []
    return [f"repeated by {render.format_value(ranks)}: {_BOTH_PASSES_COUNT}"]


def begun_again_steps(table: Table, *, mark: str = "") -> list[str]:
    """Return a sentence on the steps of `table` that were repeated within their attempt.

    It names the ranks if they are the same for all of these steps. `mark` is its prefix.
    """
    repeated = [
        (step, render.format_value(ranks))
        for step, ranks in zip(table["step"], table["begun_again"], strict=True)
        if ranks
    ]
    if not repeated:
        return []
    steps, ranks_ = sorted({step for step, _ in repeated}), {ranks for _, ranks in repeated}
    by = f" by {ranks_.pop()}" if len(ranks_) == 1 else ""
    return [f"{mark}repeated in {render.ranges_text('step', steps)}{by}: {_BOTH_PASSES_COUNT}"]


_BOTH_PASSES_COUNT: Final = (
    "both executions count in the numbers, as passes of one step; see findings (step_begun_again)"
)


_NOT_READ: Final = ("refused", "lost", "dropped", "pending")
_GAP_TEXTS: Final = {
    "payloads_refused": "refused payloads", "payloads_lost": "lost payloads",
    "payloads_dropped": "dropped payloads", "payloads_pending": "payloads on their way",
    "parts_to_restate": "parts that overlap others", "tokens_unaccounted": "tokens unaccounted for",
}  # fmt: skip


def coverage_notes(coverage: JsonObject) -> list[str]:
    """Return data that was announced but is not in the numbers, and limits of the numbers."""
    gaps = [f"{coverage[name]} {text}" for name, text in _GAP_TEXTS.items() if coverage.get(name)]
    notes = [f"not in these numbers: {', '.join(gaps)}; see lost data and findings"] if gaps else []
    if pieces := coverage.get("fragmented_sequences"):
        notes.append(
            f"{pieces} pieces of samples have no round_ids: rounds and sequences are counted "
            "within each piece; see findings"
        )
    ignored = [*(coverage.get("ignored_tensors") or ())]
    if "response_mask" in ignored:
        ignored.remove("response_mask")
        notes.append(
            "rounds: the mask has more than 4096; from 4096 on they count as one, and total_rounds "
            "stops there"
        )
    if ignored:
        notes.append(f"not used, since more than 4096 values differ: {', '.join(ignored)}")
    return notes


def token_accounting(coverage: JsonObject) -> str | None:
    """Return how many of the sent tokens count and why others do not; None if unknown."""
    sent, left_out = coverage.get("tokens_sent"), coverage.get("tokens_left_out") or {}
    if sent is None:
        return None
    reasons = ", ".join(f"{tokens} {why}" for why, tokens in left_out.items() if tokens)
    is_partial = any(coverage.get(f"payloads_{state}") for state in _NOT_READ)
    what = "that were read" if is_partial else "sent"  # the content of the others is unknown
    text = f"tokens: {coverage['tokens']} of {sent} {what} count"
    if reasons:
        text += f"; left out: {reasons}"
    if coverage.get("tokens_unaccounted"):
        text += f"; {coverage['tokens_unaccounted']} unaccounted for (see findings)"
    return text
