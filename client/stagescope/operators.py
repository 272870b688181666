"""Answers about operators: the content of a dump, the first non-finite result, and divergences.

Names of operators are long (`Module.model.layers.27.self_attn.o_proj.Linear.forward.0`). In text
each has its own line and is never shortened.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from stagescope.answers import Record
from stagescope.table import Row, Table
from stagescope_wire import nonfinite, render
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import wrapped
from stagescope_wire.render_html import html_block, html_text

SIDE_FIELDS: Final = (
    "run", "attempt", "step", "stage", "role", "rank", "ranks", "layout", "part", "capture_id",
)  # fmt: skip
"""The fields that identify one side of a comparison."""

_UNREAD: Final = "announced"
"""State of a dump that the service has yet to read."""
_INTEGERS: Final = ("attempt", "step", "rank")
_NUMBERS: Final = ("min", "max", "mean", "norm")
_ARGUMENT: Final = 15
_TENSOR: Final = 22
_NUMBER: Final = 9
"""Widths of columns, in characters."""

_IGNORED_ROWS: Final = {
    "not_read": "in memory that no call read left out",
    "zero_gradients": "gradients zero but for rounding left out",
    "identifiers": "that identify a group, a peer or a recomputation left out",
    "near_counts": "counts that differ by what rounding moves left out",
    "not_joined": "that cannot be put together left out",
    "other_checksums": "with equal statistics but other checksums (see --exact)",
}
"""Rows of a divergence that differ but do not count as a difference."""

_EVIDENCE: Final = {
    "replicas": "differs from the ranks that hold the same",
    "non_finite": "holds what is not finite",
    "values": "holds the elements that differ",
    "sum": "holds a part of the sum that differs",
    "extremes": "holds numbers that exceed those of the other side",
}
"""How the rank of a differing shard was found -> words after its name."""
_UNKNOWN_RANK: Final = (
    "the rank is not known: all ranks have a part in it, or only full tensors show it (stagescope "
    "capture --task tensor; an import copies statistics alone)"
)
_SHARDS_SHOWN: Final = 8
_UNJOINED_SHOWN: Final = 5


class Operators(Table):
    """Operator calls in execution order: one row per argument, result, parameter or gradient.

    Usage:
        >>> operators = session.step("captured").operators(rank=0, name="*lm_head*")
        >>> operators.to_pandas()
        >>> operators.about["tables"]    # the tables read: state, truncated, done, ...
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return each call's name, source and arguments as lines of at most `width` columns."""
        shown = list(self)[:rows]
        titles = f"{'argument':<{_ARGUMENT}} {'tensor':<{_TENSOR}}{_number_titles()}"
        lines = wrapped("  ", titles, width) if shown else ["(no rows)"]
        dump = ""
        for (name, _), group in groupby(shown, key=lambda row: (_dump_name(row), row["order"])):
            call = list(group)
            first = call[0]
            if name != dump:
                dump = name
                lines.append(dump)
            lines += wrapped(f"{first['order']:>5}  ", first["name"], width)
            if first["source"]:
                lines += wrapped("       ", first["source"], width)
            lines += [line for argument in call for line in _argument(argument, width)]
        return [*lines, *self._table_notes(width, len(shown))]

    def _table_notes(self, width: int, shown: int) -> list[str]:
        notes = [note for table in self.about.get("tables") or () for note in _notes_of(table)]
        notes += self._omissions(shown)
        return [line for note in notes for line in wrapped("", note, width)]


class NonFiniteOperators(Table):
    """The first operator with a NaN or infinite result on each rank, and the earliest of all.

    Usage:
        >>> found = session.step("captured").non_finite()
        >>> found.about["earliest"]      # None if everything is finite
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the text, with the rows folded below it."""
        text = html_text("\n".join(map(render.printable, self.lines(width=100))))
        return html_block(
            self.heading,
            f"{text}<details><summary>as a table</summary>{super()._repr_html_()}</details>",
        )

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return them as lines of at most `width` columns, the earliest first."""
        lines: list[str] = []
        earliest = self.about.get("earliest")
        if earliest is None:
            measured = any(row["state"] == "digested" and row.get("measured") != 0 for row in self)
            unknown = sum(row.get("unmeasured") or 0 for row in self)
            known = f", as far as is known: {_of_unknown(unknown)}" if unknown else ""
            if measured or not len(self):
                text = f"no operator gave a NaN or an infinity (but for masks){known}"
            elif all(row["state"] == _UNREAD for row in self):
                text = "nothing is known yet of NaN and infinities"
            else:
                text = "nothing is known of NaN and infinities: no Min and Max were recorded"
            lines += wrapped("", text, width)
        else:
            together = [rank for rank in earliest["together"] if rank != earliest["rank"]]
            also = f" (and at the same place rank {_listed(together)})" if together else ""
            left_out = _not_read(earliest)
            lines += wrapped("", f"the earliest: {_dump_name(earliest)}{also}{left_out}", width)
            lines += _first(earliest, width)
        for row in self:
            if row["name"] is None and row.get("calls") != 0 and row["state"] != _UNREAD:
                masks = f", {row['masks']} masks" if row["masks"] else ""
                state = _finite(row) if row["state"] == "digested" else row["state"]
                lines += wrapped("", f"{_dump_name(row)}: {state}{masks}{_not_read(row)}", width)
            elif row["name"] is not None and (
                earliest is None or _dump_key(row) != _dump_key(earliest)
            ):
                order = ", in another order of calls" if row["order_differs"] else ""
                lines += wrapped("", f"{_dump_name(row)}{order}{_not_read(row)}:", width)
                lines += _first(row, width)
            if row["name"] is not None and (unknown := row.get("unmeasured")):
                lines += wrapped("", f"{_dump_name(row)}: {_of_unknown(unknown)}: not known", width)
            lines += [line for note in _notes_of(row) for line in wrapped("", note, width)]
        return lines


def _finite(row: Row) -> str:
    """Return how a dump without a non-finite result is; the counts are null of older tables."""
    unknown = row.get("unmeasured") or 0
    if row.get("measured") == 0:
        return f"not known, as its {row['calls']} calls have no Min and Max"
    if unknown:
        known = render.counted(row["measured"] or 0, "tensor")
        return f"finite in the {known} with Min and Max; {_of_unknown(unknown)}: not known"
    return "all finite"


def _of_unknown(count: int) -> str:
    return f"{render.counted(count, 'tensor has', 'tensors have')} no Min and Max"


def _not_read(row: Row) -> str:
    """Return how many calls the search skipped because they do not read their memory; or ""."""
    count = row.get("not_read")
    if not count:
        return ""
    calls = render.counted(
        count, "call that only passes memory on and never reads it",
        "calls that only pass memory on and never read it",
    )  # fmt: skip
    return f" (not searched: {calls})"


class Divergence(Record):
    """The comparison of two dumps; a mapping with the fields of the answer.

    Usage:
        >>> divergence = session.divergence({"step": 5, "rank": 0}, {"rank": 1})
        >>> divergence.same
        >>> divergence["first"]["a"]["name"], divergence["first"]["relative"]
    """

    __slots__ = ()

    @classmethod
    def from_answer(cls, answer: JsonObject) -> Divergence:
        """Return the divergence in an answer of `/operators/divergence`."""
        fields = {**answer, "rows": [_with_numbers(row) for row in answer["rows"]]}
        for name in ("first", "first_parameter", "first_gradient"):
            fields[name] = None if answer[name] is None else _with_numbers(answer[name])
        return cls(fields, title="divergence")

    @property
    def same(self) -> bool:
        """Whether nothing differs and both sides have the same operators."""
        return bool(self["same"])

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the answer as lines of at most `width` columns."""
        layouts = self.get("layouts") or (None, None)
        lines = []
        for name, layout in zip("ab", layouts, strict=True):
            lines += _side(name, self[name], layout, width)
        lines += wrapped("", self._summary(), width)
        if self["first"] is None and not self["compared"]:
            lines.append("nothing was compared: the two have no call in common")
        elif self["first"] is None:
            lines.append("no operator differs")
        else:
            sections = _listed(self["first_sections"])
            lines += wrapped("", f"the first that differs, in {sections}:", width)
            lines += _difference(self["first"], width)
            if self.get("first_note"):
                lines += wrapped("  ", self["first_note"], width)
        for name, what in (("parameter", "parameters"), ("gradient", "gradients")):
            lines += self._first_of(f"first_{name}", what, width)
        for name in ("a", "b"):
            lines += self._only_in(name, width)
        return [*lines, *self._unequal(width), *self._not_joined(width)]

    def _unequal(self, width: int) -> list[str]:
        """Return the parameters whose replicas differ."""
        rows = self.get("unequal_parameters") or []
        lines = ["parameters that differ between ranks that should hold the same:"] if rows else []
        for row in rows[:_UNJOINED_SHOWN]:
            lines += wrapped("  ", row["name"], width)
            ranks = ", ".join(f"rank {each['rank']} of {each['side']}" for each in row["shards"])
            lines += wrapped("    ", f"{_argument_name(row)}: {ranks or 'every rank'}", width)
        more = len(rows) - _UNJOINED_SHOWN
        return lines + ([f"  ... {more} more"] if more > 0 else [])

    def _not_joined(self, width: int) -> list[str]:
        """Return the tensors of several ranks that were not compared, and why."""
        rows = self.get("unjoined") or []
        if not rows:
            return []
        lines = ["not put together, and not compared:"]
        for row in rows[:_UNJOINED_SHOWN]:
            lines += wrapped("  ", row["name"], width)
            lines += wrapped("    ", f"{_argument_name(row)}: {row['reason']}", width)
        more = len(rows) - _UNJOINED_SHOWN
        return lines + ([f"  ... {more} more"] if more > 0 else [])

    def _summary(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self["counts"].items())
        threshold = "exactly" if self["exact"] else f"within {self['factor']:g} eps"
        for dtype, ratio in (self.get("by_dtype") or {}).items():
            threshold += f" ({dtype}: {float(ratio):.3g})"
        sharded = f", {self['sharded']} shards left out" if self["sharded"] else ""
        ignored = "".join(
            f", {self[name]} {text}" for name, text in _IGNORED_ROWS.items() if self.get(name)
        )
        if sums := self.get("sums_by_mean"):
            sharded += f", {render.counted(sums, 'sum')} by the mean alone"
        return (
            f"{self['compared']} values of {self['paired']} calls compared {threshold}"
            f"{sharded}{ignored}; different: {counts or 'none'}"
        )

    def _first_of(self, name: str, what: str, width: int) -> list[str]:
        compared = self[f"{what}_compared"]
        if self[name] is None:
            return [f"{compared} {what} are the same" if compared else f"no {what} recorded"]
        return [f"the first of the {what}:", *_difference(self[name], width)]

    def _only_in(self, name: str, width: int) -> list[str]:
        count = self[f"only_{name}_count"]
        if not count:
            return []
        lines = [f"{count} calls in {name} alone:"]
        for row in self[f"only_{name}"][:5]:
            lines += wrapped("  ", row["name"], width)
        return lines + ([f"  ... {count - 5} more"] if count > 5 else [])


class Stack(Record):
    """The Python frames that called an operator, the innermost first."""

    __slots__ = ()

    def lines(self, *, width: int = 80) -> list[str]:
        """Return each frame's location and code as lines of at most `width` columns."""
        lines = []
        for frame in self["frames"]:
            location, *code = (line.strip() for line in str(frame).split("\n"))
            lines += wrapped("", location.rstrip(", "), width)
            lines += [line for text in code for line in wrapped("    ", text, width)]
        return lines


def read_side(text: str) -> dict[str, str | int]:
    """Parse `step=5,rank=0`.

    Raises:
        InvalidInput: an unknown name, or a value that is not a number where one is required.
    """
    side: dict[str, str | int] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        name = {"capture": "capture_id"}.get(name, name)
        if not equals or name not in SIDE_FIELDS or not value:
            raise InvalidInput(
                f"{item!r} does not name a side",
                expected=f"NAME=VALUE, of {_listed(SIDE_FIELDS)}, such as step=5,rank=0",
            )
        try:
            side[name] = int(value) if name in _INTEGERS else value
        except ValueError:
            raise InvalidInput(f"{name} is {value!r}", expected="an integer") from None
    return side


def _dump_key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("capture_id", "stage", "part", "role", "rank"))


def _dump_name(row: Row) -> str:
    part = "" if row["part"] in (None, "0.0.0.0") else f" part {row['part']}"
    return render.printable(f"{row['stage']} {row['role']}/{row['rank']}{part}")


def _number_titles() -> str:
    return "".join(f"{name:>{_NUMBER + 1}}" for name in _NUMBERS)


def _argument(row: Row, width: int) -> list[str]:
    if row["section"] is None:
        return ["  (nothing recorded)"]
    name, line = _argument_name(row), _value(row)
    if len(name) > _ARGUMENT:
        return [*wrapped("  ", name, width), *wrapped(" " * (_ARGUMENT + 3), line, width)]
    return wrapped(f"  {name:<{_ARGUMENT}} ", line, width)


def _value(row: Row) -> str:
    """Return a tensor's statistics, or the value of an argument that is not a tensor."""
    if not row["dtype"]:
        value = "" if row["value"] is None else f" {row['value']}"
        return f"{row['type'] or 'None':<{_TENSOR}}{value}".rstrip()
    tensor = row["dtype"]
    tensor += "" if row["shape"] is None else f"[{','.join(map(str, row['shape']))}]"
    numbers = "".join(f"{_number(row[name]):>{_NUMBER + 1}}" for name in _NUMBERS)
    return f"{tensor:<{_TENSOR}}{numbers}"


def _number(value: float | str | None) -> str:
    return render.MISSING if value is None else f"{float(value):.3g}"


def _argument_name(row: Row) -> str:
    return ".".join(str(row[part]) for part in ("section", "index") if row[part])


def _first(row: Row, width: int) -> list[str]:
    inputs = ", ".join(map(_argument_name, row["bad_inputs"] or ()))
    saved = row["direction"] == "debug"
    finite = "a value that was saved" if saved else "its inputs were finite"
    before = f"not finite before it: {inputs}" if inputs else finite
    doubt = "" if row["certain"] else "; it may be a mask"
    lines = wrapped("  ", row["name"] or "", width)
    if row["parent"]:
        lines += wrapped("  in ", row["parent"], width)
    found = f"{_argument_name(row)} is {row['non_finite']}; {before}{doubt}"
    lines += wrapped("  ", found, width)
    if row["source"]:
        lines += wrapped("  ", row["source"], width)
    return lines


def _with_numbers(row: JsonObject) -> Row:
    """Return a difference with spelled non-finite numbers as floats."""
    sides = {
        name: row[name]
        and {**row[name], **{number: nonfinite.number(row[name][number]) for number in _NUMBERS}}
        for name in ("a", "b")
    }
    return {**row, "relative": nonfinite.number(row["relative"]), **sides}


def _side(name: str, side: Row, layout: str | None, width: int) -> list[str]:
    parts = [f"run {side['run']}, attempt {side['attempt']}, step {side['step']}", _dump_name(side)]
    if (ranks := side.get("ranks")) and len(ranks) > 1:
        of_layout = f" ({layout})" if layout else ""
        several = render.counted(len(ranks), "rank")
        parts[1] = f"{side['stage']} {side['role']}, {several}{of_layout}"
    if side.get("device"):
        parts.append(str(side["device"]))
    lines = wrapped(f"{name}: ", ", ".join(parts), width)
    return lines + [line for note in _notes_of(side) for line in wrapped("   ", note, width)]


def _difference(row: Row, width: int) -> list[str]:
    operator = row["a"] or row["b"]
    assert operator is not None
    lines = wrapped("  ", operator["name"], width)
    if operator["parent"]:
        lines += wrapped("  in ", operator["parent"], width)
    verdict = row["verdict"]
    if row["relative"] is not None:
        verdict += f", relative {row['relative']:.3g} over {row['threshold']:.3g}"
    lines += wrapped("  ", f"{_argument_name(row)}: {verdict}", width)
    lines += _shards(row, width)
    if operator["source"]:
        lines += wrapped("  ", operator["source"], width)
    lines += wrapped("     ", f"{'tensor':<{_TENSOR}}{_number_titles()}", width)
    for name, side in (("a", row["a"]), ("b", row["b"])):
        lines += wrapped(f"  {name}  ", "not there" if side is None else _value(side), width)
        if side is not None and side.get("joined"):
            lines += wrapped("     ", f"put together: {side['joined']}", width)
    return lines


def _shards(row: Row, width: int) -> list[str]:
    """Return the ranks in which a row differs, or why they are not known."""
    shards = row.get("shards") or []
    lines = []
    for shard in shards[:_SHARDS_SHOWN]:
        place = ", ".join(f"{axis} {index}" for axis, index in shard["coordinates"].items())
        found = f"in rank {shard['rank']} of {shard['side']} ({place}), which "
        found += _EVIDENCE.get(shard["evidence"], str(shard["evidence"]))
        if shard["relative"] is not None:
            found += f" (relative {nonfinite.number(shard['relative']):.3g})"
        lines += wrapped("  ", found, width)
    if len(shards) > _SHARDS_SHOWN:
        lines.append(f"  ... {len(shards) - _SHARDS_SHOWN} more ranks")
    joined = any(row[side] and row[side].get("joined") for side in ("a", "b"))
    if joined and not shards:
        lines += wrapped("  ", _UNKNOWN_RANK, width)
    return lines


def _notes_of(table: Row) -> list[str]:
    if table["state"] == _UNREAD:
        return [f"{_dump_name(table)}: the service still reads this dump; ask again in a moment"]
    if table["state"] != "digested":
        reason = f": {table['reason']}" if table.get("reason") else ""
        return [f"{_dump_name(table)} is {table['state']}{reason}"]
    if table.get("calls") == 0 and not table["truncated"]:
        if table.get("task") == "structure":
            return [f"{_dump_name(table)} has the structure alone (task structure): no values"]
        return [f"{_dump_name(table)} is empty: msprobe recorded no call"]
    if not table["truncated"]:
        return []
    offset = table.get("truncated_at")
    where = "" if offset is None else f" at byte {offset}"
    done = "did not come to its end" if table["done"] is None else "broke off"
    return [f"{_dump_name(table)} is truncated{where}: the capture {done}"]


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
