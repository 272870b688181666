"""Answers about operators: what a dump holds, what was first not finite, where two first differ.

Names of operators are long (`Module.model.layers.27.self_attn.o_proj.Linear.forward.0`): as text
each stands on a line of its own and is never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from stagescope import render
from stagescope.answers import Record
from stagescope.frames import Table
from stagescope.render import wrapped
from stagescope.wire import nonfinite
from stagescope.wire.errors import InvalidInput

SIDE_FIELDS: Final = ("run", "attempt", "step", "stage", "role", "rank", "part", "capture_id")
"""What names one side of a comparison."""

_INTEGERS: Final = ("attempt", "step", "rank")
_NUMBERS: Final = ("min", "max", "mean", "norm")
_ARGUMENT: Final = 15
_TENSOR: Final = 22
_NUMBER: Final = 9


_LEFT_OUT: Final = {
    "not_read": "in memory that no call read left out",
    "zero_gradients": "gradients zero but for rounding left out",
}
"""Rows of a divergence that differ and are no difference."""


class Operators(Table):
    """Operator calls, a row an argument, result, parameter or gradient, in execution order.

    Usage:
        >>> operators = session.step(5).operators(rank=0, name="*lm_head*")
        >>> operators.to_pandas()
        >>> operators.about["tables"]    # what there is: state, truncated, done, ...
    """

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return each call's name, source and arguments as lines of at most `width` columns."""
        shown = [self[at] for at in range(len(self) if rows is None else min(rows, len(self)))]
        words = f"{'argument':<{_ARGUMENT}} {'tensor':<{_TENSOR}}{_words()}"
        lines = wrapped("  ", words, width) if shown else ["(no rows)"]
        dump = ""
        for row, call in _calls(shown):
            if _dump_of(row) != dump:
                dump = _dump_of(row)
                lines.append(dump)
            lines += wrapped(f"{row['order']:>5}  ", row["name"], width)
            if row["source"]:
                lines += wrapped("       ", row["source"], width)
            lines += [line for argument in call for line in _argument(argument, width)]
        return [*lines, *self._table_notes(width, len(shown))]

    def _table_notes(self, width: int, shown: int) -> list[str]:
        notes = [note for table in self.about.get("tables") or () for note in _notes_of(table)]
        if shown < len(self):
            notes.append(f"... {len(self) - shown} more rows")
        if self.truncated:
            notes.append(f"truncated at {len(self)} rows: the service has more (see limit)")
        return [line for note in notes for line in wrapped("", note, width)]


class NonFiniteOperators(Table):
    """The first operator with a NaN or infinite result of each rank, and the earliest."""

    __slots__ = ()

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return them as lines of at most `width` columns, the earliest first."""
        lines: list[str] = []
        earliest = self.about.get("earliest")
        if earliest is None:
            lines.append("no operator gave a NaN or an infinity (but for masks)")
        else:
            together = [rank for rank in earliest["together"] if rank != earliest["rank"]]
            also = f" (and at the same place rank {_listed(together)})" if together else ""
            left_out = _not_read(earliest)
            lines += wrapped("", f"the earliest: {_dump_of(earliest)}{also}{left_out}", width)
            lines += _first(earliest, width)
        for row in self:
            if row["name"] is None:
                masks = f", {row['masks']} masks" if row["masks"] else ""
                state = "all finite" if row["state"] == "digested" else row["state"]
                lines += wrapped("", f"{_dump_of(row)}: {state}{masks}{_not_read(row)}", width)
            elif not row["earliest"]:
                order = ", in another order of calls" if row["order_differs"] else ""
                lines += wrapped("", f"{_dump_of(row)}{order}{_not_read(row)}:", width)
                lines += _first(row, width)
            lines += [line for note in _notes_of(row) for line in wrapped("", note, width)]
        return lines


def _not_read(row: Mapping[str, Any]) -> str:
    """Return how many calls were left out of a search, as they read no memory."""
    count = row.get("not_read")
    if not count:
        return ""
    calls = "1 call that hands" if count == 1 else f"{count} calls that hand"
    return f", {calls} on memory without reading it left out"


class Divergence(Record):
    """Two dumps held against each other; a mapping with the fields of the answer.

    Usage:
        >>> found = session.divergence({"step": 5, "rank": 0}, {"rank": 1})
        >>> found.same
        >>> found["first"]["a"]["name"], found["first"]["relative"]
    """

    __slots__ = ()

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Divergence:
        """Return the divergence of an answer of `/operators/divergence`."""
        found = {**answer, "rows": [_verdict(row) for row in answer["rows"]]}
        for name in ("first", "first_parameter", "first_gradient"):
            found[name] = None if answer[name] is None else _verdict(answer[name])
        return cls(found, title="divergence")

    @property
    def same(self) -> bool:
        """Whether nothing differs and both sides have the same operators."""
        return bool(self["same"])

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the answer as lines of at most `width` columns."""
        lines = [line for name in ("a", "b") for line in _side(name, self[name], width)]
        lines += wrapped("", self._measure(), width)
        if self["first"] is None:
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
            lines += self._alone(name, width)
        return lines

    def _measure(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self["counts"].items())
        threshold = "exactly" if self["exact"] else f"within {self['factor']:g} eps"
        sharded = f", {self['sharded']} shards left out" if self["sharded"] else ""
        no_difference = "".join(
            f", {self[name]} {what}" for name, what in _LEFT_OUT.items() if self.get(name)
        )
        return (
            f"{self['compared']} values of {self['paired']} calls compared {threshold}"
            f"{sharded}{no_difference}; different: {counts or 'none'}"
        )

    def _first_of(self, name: str, what: str, width: int) -> list[str]:
        compared = self[f"{what}_compared"]
        if self[name] is None:
            said = f"{compared} {what} are the same" if compared else f"no {what} recorded"
            return [said]
        return [f"the first of the {what}:", *_difference(self[name], width)]

    def _alone(self, name: str, width: int) -> list[str]:
        count = self[f"only_{name}_count"]
        if not count:
            return []
        lines = [f"{count} calls in {name} alone:"]
        for row in self[f"only_{name}"][:5]:
            lines += wrapped("  ", row["name"], width)
        return lines + ([f"  ... {count - 5} more"] if count > 5 else [])


class Stack(Record):
    """The Python frames from which an operator was called, the innermost first."""

    __slots__ = ()

    def lines(self, *, width: int = 80) -> list[str]:
        """Return each frame's place and code as lines of at most `width` columns."""
        lines = []
        for frame in self["frames"]:
            place, *code = (line.strip() for line in str(frame).splitlines())
            lines += wrapped("", place.rstrip(", "), width)
            lines += [line for text in code for line in wrapped("    ", text, width)]
        return lines


def read_side(text: str) -> dict[str, Any]:
    """Read `step=5,rank=0`.

    Raises:
        InvalidInput: an unknown name, or a value that is no number where one belongs.
    """
    side: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        name = {"capture": "capture_id"}.get(name, name)
        if not equals or name not in SIDE_FIELDS or not value:
            raise InvalidInput(
                f"{word!r} does not name a side", expected=f"NAME=VALUE, of {_listed(SIDE_FIELDS)}"
            )
        try:
            side[name] = int(value) if name in _INTEGERS else value
        except ValueError:
            raise InvalidInput(f"{name} is {value!r}", expected="an integer") from None
    return side


def _calls(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
    for _, group in groupby(rows, key=lambda row: (_dump_of(row), row["order"])):
        call = list(group)
        yield call[0], call


def _dump_of(row: Mapping[str, Any]) -> str:
    part = "" if row["part"] in (None, "0.0.0.0") else f" part {row['part']}"
    return render.printable(f"{row['stage']} {row['role']}/{row['rank']}{part}")


def _words() -> str:
    return "".join(f"{word:>{_NUMBER + 1}}" for word in _NUMBERS)


def _argument(row: Mapping[str, Any], width: int) -> list[str]:
    if row["section"] is None:
        return ["  (nothing recorded)"]
    name = ".".join(str(row[part]) for part in ("section", "index") if row[part])
    line = _value(row)
    if len(name) > _ARGUMENT:
        return [*wrapped("  ", name, width), *wrapped(" " * (_ARGUMENT + 3), line, width)]
    return wrapped(f"  {name:<{_ARGUMENT}} ", line, width)


def _value(row: Mapping[str, Any]) -> str:
    """Return what is known of an argument: a tensor's statistics, or the value itself."""
    if not row["dtype"]:
        value = "" if row["value"] is None else f" {row['value']}"
        return f"{row['type'] or 'None':<{_TENSOR}}{value}".rstrip()
    tensor = row["dtype"] + ("" if row["shape"] is None else _shape(row["shape"]))
    numbers = "".join(f"{_number(row[name]):>{_NUMBER + 1}}" for name in _NUMBERS)
    return f"{tensor:<{_TENSOR}}{numbers}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _number(value: Any) -> str:
    return render.MISSING if value is None else f"{float(value):.3g}"


def _first(row: Mapping[str, Any], width: int) -> list[str]:
    inputs = ", ".join(
        ".".join(word for word in (bad["section"], bad["index"]) if word)
        for bad in row["bad_inputs"] or ()
    )
    before = f"not finite before it: {inputs}" if inputs else "its inputs were finite"
    sure = "" if row["certain"] else "; it may be a mask"
    lines = wrapped("  ", row["name"], width)
    if row["parent"]:
        lines += wrapped("  in ", row["parent"], width)
    place = ".".join(word for word in (row["section"], row["index"]) if word)
    lines += wrapped("  ", f"{place} is {row['non_finite']}; {before}{sure}", width)
    if row["source"]:
        lines += wrapped("  ", row["source"], width)
    return lines


def _verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    sides = {name: _with_numbers(row[name]) for name in ("a", "b")}
    return {**row, "relative": nonfinite.number(row["relative"]), **sides}


def _with_numbers(side: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if side is None:
        return None
    return {**side, **{name: nonfinite.number(side[name]) for name in _NUMBERS}}


def _side(name: str, side: Mapping[str, Any], width: int) -> list[str]:
    words = [f"run {side['run']}, attempt {side['attempt']}, step {side['step']}", _dump_of(side)]
    if side.get("device"):
        words.append(str(side["device"]))
    lines = wrapped(f"{name}: ", ", ".join(words), width)
    return lines + [line for note in _notes_of(side) for line in wrapped("   ", note, width)]


def _difference(row: Mapping[str, Any], width: int) -> list[str]:
    known = row["a"] or row["b"]
    place = ".".join(word for word in (row["section"], row["index"]) if word)
    lines = wrapped("  ", known["name"], width)
    if known["parent"]:
        lines += wrapped("  in ", known["parent"], width)
    how = row["verdict"]
    if row["relative"] is not None:
        how += f", relative {row['relative']:.3g} over {row['threshold']:.3g}"
    lines += wrapped("  ", f"{place}: {how}", width)
    if known["source"]:
        lines += wrapped("  ", known["source"], width)
    lines += wrapped("     ", f"{'tensor':<{_TENSOR}}{_words()}", width)
    for name in ("a", "b"):
        side = row[name]
        lines += wrapped(f"  {name}  ", "not there" if side is None else _value(side), width)
    return lines


def _notes_of(table: Mapping[str, Any]) -> list[str]:
    if table["state"] != "digested":
        reason = f": {table['reason']}" if table.get("reason") else ""
        return [f"{_dump_of(table)} is {table['state']}{reason}"]
    if not table["truncated"]:
        return []
    at = table.get("truncated_at")
    where = "" if at is None else f" at byte {at}"
    done = "did not come to its end" if table["done"] is None else "broke off"
    return [f"{_dump_of(table)} is truncated{where}: the capture {done}"]


def _listed(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items))
