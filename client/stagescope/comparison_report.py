"""The report of a comparison of dumps, and `Changes`: what differs between two attempts.

The text fits 80 columns. It begins with the verdict, the first difference, and likely and excluded
causes. Every section follows, with one line per tensor, and below it one per rank and microbatch.
"""

from __future__ import annotations

import html
import json
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope.answers import Record
from stagescope.table import Table
from stagescope_wire import nonfinite, render
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import Line, counted, format_bytes, printable, wrapped
from stagescope_wire.schema import Target

_HEADINGS: Final[Mapping[str, str]] = {
    "numbers": "may change numbers",
    "place": "another place",
    "start": "differs at every start",
    "unknown": "one side does not know it",
}


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
        a, b = (Target(side["run"], side["attempt"]) for side in self._sides())
        unknown = sum(row["weight"] == "unknown" for row in self)
        differ = len(self) - unknown
        text = f"{a} (a) against {b} (b): {render.counted(differ, 'thing')} "
        text += "differs" if differ == 1 else "differ"
        verb = "is" if unknown == 1 else "are"
        return render.printable(f"{text}, {unknown} {verb} unknown" if unknown else text)

    def lines(self, *, width: int = 80, rows: int | None = None) -> list[str]:
        """Return a block of lines for each weight; long values are on separate lines."""
        lines = [
            f"side {name} has no fingerprint: only what is known of its ranks is compared"
            for name in self.about.get("unknown") or []
        ]
        shown = self[:rows]
        weight = None
        for row in shown:
            if row["weight"] != weight:
                weight = row["weight"]
                lines.append(f"{_HEADINGS.get(weight, weight)}:")
            lines += change_lines(row, width)
        if not len(self):
            lines.append("nothing that is known differs")
        rest = len(self) - len(shown)
        if rest:
            lines.append(f"... {rest} more thing{'' if rest == 1 else 's'}")
        if note := self.about.get("note"):
            lines += textwrap.wrap(f"not compared: {note}", width, subsequent_indent="  ")
        return lines

    def _sides(self) -> Iterator[JsonObject]:
        yield from (self.about["a"], self.about["b"])


def change_lines(row: JsonObject, width: int) -> Iterator[str]:
    """Yield the two values of one change, as lines of at most `width` columns."""
    label = f"  {row['area']} {row['name']}: "
    missing = "unknown" if row["weight"] == "unknown" else render.MISSING
    values = [missing if row[side] is None else _value(row[side]) for side in ("a", "b")]
    line = render.printable(f"{label}{values[0]} -> {values[1]}")
    if len(line) <= width:
        yield line
        return
    yield render.printable(label).rstrip()
    for side, value in zip("ab", values, strict=True):
        yield from textwrap.wrap(
            render.printable(value), width, initial_indent=f"    {side} ", subsequent_indent=" " * 6
        )


def _value(value: object) -> str:
    """Return a value as text; different values have different texts."""
    return value if isinstance(value, str) else json.dumps(value)


MAX_SHOWN: Final = 8
"""Most locations, samples or items of a list that are shown, unless all are requested."""
SIDES: Final = "ABC"
ONE_SIDED_KINDS: Final = ("only", "section")
"""Kinds of findings about something that only one side has."""
MARKS: Final = {"same": "✓", "within noise": "≈", "not comparable": "?", "different": "✗"}
TITLES: Final = {
    "trajectories": "Trajectories", "batch_inputs": "Batch inputs",
    "old_log_probs": "Old log-probs", "forward_data": "Forward data", "advantages": "Advantages",
    "is_loss": "Importance-sampling loss", "loss": "Loss", "gradients": "Gradients",
    "parameters": "Parameters", "datums": "Datums", "metrics": "Training metrics",
    "other": "Other tensors",
}  # fmt: skip

_NUMBERS: Final = frozenset({
    "max_abs", "mean_abs", "mean_difference", "relative", "cosine", "correlation", "min", "max",
    "mean", "std", "value",
})  # fmt: skip
"""Fields whose strings are spelled non-finite numbers."""
_PART: Final = ("occurrence", "epoch", "minibatch", "microbatch")
_SEVERITY: Final = {verdict: severity for severity, verdict in enumerate(MARKS)}


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
        super().__init__(_numbers(comparison), title=f"comparison: {comparison.get('verdict')}")
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


def as_lines(
    comparison: JsonObject, *, width: int = 80, everything: bool = False, full: bool = True
) -> list[Line]:
    """Return a comparison as lines with tones.

    Args:
        comparison: the comparison, with numbers as floats (see `nonfinite`).
        width: columns.
        everything: show long lists completely.
        full: also show what follows the likely causes: excluded causes, and each tensor.
    """
    return list(
        _TextWriter(
            comparison, width, None if everything else MAX_SHOWN, full or everything
        ).lines()
    )


def deciding_changes(comparison: JsonObject) -> list[JsonObject]:
    """Return the differences between the fingerprints of two attempts that may change numbers."""
    rows = (comparison.get("changes") or {}).get("rows", ())
    return [row for row in rows if row["weight"] == "numbers"]


def title_of(comparison: JsonObject) -> str:
    """Return the verdict, qualified if only one side has some of the data."""
    verdict = str(comparison["verdict"])
    kinds = {finding["kind"] for pair in comparison["pairs"] for finding in pair["findings"]}
    is_part = not kinds.isdisjoint(ONE_SIDED_KINDS) and verdict in ("same", "within noise")
    return f"{verdict} in what both sides have" if is_part else verdict


def place_text(location: JsonObject) -> str:
    """Return a location as short text: rank 3, microbatch 1."""
    if location["rank"] is not None:
        return f"{location['role'] or 'rank'} {location['rank']}, {part_text(location)}"
    return part_text(location) if any(location[name] for name in _PART) else "whole step"


def step_text(location: JsonObject) -> str:
    """Return the step and stage of a location, before its rank: 'step 4, actor_update, '."""
    step = "" if location["step"] is None else f"step {location['step']}, "
    return f"{step}{location['stage']}, " if location["stage"] else step


def places_text(location: JsonObject) -> str:
    """Return a tensor's location on the first side, and that on the other if it differs."""
    one, other = (place_text(location[side]) for side in "ab")
    return one if one == other else f"{one} against {other}"


def part_text(location: JsonObject) -> str:
    """Return the part of a stage as short text: epoch 1, microbatch 0."""
    named = [name for name in _PART if location[name] or name == "microbatch"]
    return ", ".join(f"{name} {location[name]}" for name in named)


def findings_of(pair: JsonObject) -> Iterator[tuple[str, list[str], str]]:
    """Yield (text, items that the text does not name, verdict) of findings, most severe first."""
    listed = []
    for finding in sorted(pair["findings"], key=lambda each: -_SEVERITY[each["verdict"]]):
        side, message = finding["side"], finding["message"]
        where = "" if side is None else f"{SIDES[pair['sides'][side]]}: "
        items = finding["items"]
        if not message.startswith(f"{len(items)} "):  # such a message counts items, naming none
            items = [item for item in items if item not in message]
        if (side, items) in listed:  # a file may hold several sections
            items = []
        listed.append((side, items))
        yield f"{where}{message}", items, finding["verdict"]


def worst_first(locations: Sequence[JsonObject]) -> list[JsonObject]:
    """Return a tensor's locations, those that differ most first."""
    return sorted(locations, key=lambda each: (-_SEVERITY[each["verdict"]], -_difference(each)))


def largest_text(location: JsonObject) -> str:
    """Return the largest |d| at a location of a tensor, and how many values are non-finite."""
    stats = location["statistics"]
    text = f"max |d| {stats['max_abs']:.6e}" if stats["finite"] else "no finite pair"
    if disagree := stats["non_finite"]["disagree"]:
        of_finite = " of the finite pairs" if stats["finite"] else ""
        text += f"{of_finite}, {disagree} disagree in being NaN or infinite"
    return text


def number_text(value: object) -> str:
    """Return a number with all digits that matter: integers exactly, floats with 9 digits."""
    if value is None:
        return "nothing"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


_FINDINGS: Final = 5
"""Findings of a pair that are shown unless all of it is asked for."""


class _TextWriter:
    def __init__(self, comparison: JsonObject, width: int, most: int | None, full: bool) -> None:
        self.comparison = comparison
        self.width = width
        self.most = most
        self.full = full

    def lines(self) -> Iterator[Line]:
        comparison = self.comparison
        yield Line(
            f"{MARKS[comparison['verdict']]} {title_of(comparison).upper()}",
            _tone(comparison["verdict"]),
        )
        for letter, side in zip(SIDES, comparison["sides"], strict=False):
            yield from self._wrap(f"{letter}  ", side["name"])
            steps = f"step {', '.join(map(str, side['steps']))}" if side["steps"] else "no step"
            yield from self._wrap(
                "   ",
                f"{side['kind']}, {steps}, {counted(len(side['ranks']), 'rank')}, "
                f"{counted(side['entries'], 'entry', 'entries')}, {format_bytes(side['bytes'])}",
            )
        yield from self._wrap("", comparison["reason"])
        for remark in comparison.get("remarks", ()):  # only of `compare-dumps`
            yield from self._wrap("", remark)
        yield from self._changes(deciding_changes(comparison))
        for pair in comparison["pairs"]:
            yield from self._pair(pair)
        yield Line("")
        yield Line(f"{format_bytes(comparison['bytes'])} read in {comparison['seconds']:.2f} s")

    def _changes(self, rows: Sequence[JsonObject]) -> Iterator[Line]:
        if rows:
            yield from self._title("Changed between the attempts (stagescope diff lists all)")
        yield from self._cut([Line(line) for row in rows for line in change_lines(row, self.width)])

    def _pair(self, pair: JsonObject) -> Iterator[Line]:
        a, b = (SIDES[side] for side in pair["sides"])
        if len(self.comparison["pairs"]) > 1:
            yield Line("")
            yield Line("=" * self.width)
            yield Line(f"{a} and {b}: {pair['verdict']}", _tone(pair["verdict"]))
            yield from self._wrap("", pair["reason"])
        if pair["first"] is not None:
            yield from self._first(pair["first"], a, b)
        yield from self._causes(pair)
        yield from self._findings(pair)
        if not self.full:
            yield from self._rest(pair)
            return
        if (floor := pair["noise_floor"]) is not None:
            text = f"mean |d| {floor['mean']:.3g}, max {floor['max']:.3g}: {floor['source']}"
            yield from self._wrap("noise floor ", text)
        for section in pair["sections"]:
            yield Line("")
            keys = pair["keys"].get(section["section"], ())
            paired = f" (rows paired by {', '.join(keys)})" if keys else ""
            title = TITLES.get(section["section"], section["section"])
            yield from self._wrap("", f"{title}{paired}", "title")
            for tensor in section["tensors"]:
                yield from self._tensor(tensor)

    def _rest(self, pair: JsonObject) -> Iterator[Line]:
        """Yield the number of tensors per verdict, for the tensors that are not listed."""
        verdicts = [
            tensor["verdict"] for section in pair["sections"] for tensor in section["tensors"]
        ]
        counts = [f"{verdicts.count(mark)} {mark}" for mark in MARKS if mark in verdicts]
        if counts:
            yield Line("")
            sections = counted(len(pair["sections"]), "section")
            yield from self._wrap(
                "", f"{counted(len(verdicts), 'tensor')} in {sections}: {', '.join(counts)}"
                " (--full shows each)",
            )  # fmt: skip

    def _first(self, first: JsonObject, a: str, b: str) -> Iterator[Line]:
        yield from self._title("First difference")
        yield from self._wrap(
            "  ", f"at the {first['station']}: {first['section']}/{first['name']}"
        )
        yield from self._wrap("  ", first["reason"])
        if (location := first["location"]) is None:
            return
        if location["sample"] is not None:
            text = f"sample {location['sample']}, its value {location['position']} (from 0)"
            yield from self._wrap("  ", text)
        for letter, side in ((a, location["a"]), (b, location["b"])):
            at = f", at {list(side['coordinate'])}" if side["coordinate"] else ""
            where = f"{step_text(side['place'])}{place_text(side['place'])}{at}"
            text = f"{letter} {number_text(side['value'])}  ({where})"
            yield from self._wrap("  ", text)

    def _causes(self, pair: JsonObject) -> Iterator[Line]:
        if pair["causes"]:
            yield from self._title("Likely causes")
        for at, cause in enumerate(pair["causes"], 1):
            yield from self._wrap(f"  {at}. ", cause["title"])
            yield from self._wrap("     because ", cause["evidence"])
            for check in cause["checks"]:
                yield from self._wrap("     - ", check)
        if pair["excluded"] and self.full:
            yield from self._title("Excluded by what agrees")
        for text in pair["excluded"] if self.full else ():
            yield from self._wrap("  - ", text)

    def _findings(self, pair: JsonObject) -> Iterator[Line]:
        if pair["findings"]:
            yield from self._title("Not compared, or worth knowing")
        found = [*findings_of(pair)]
        shown = found if self.full else found[:_FINDINGS]
        for text, items, verdict in shown:
            mark = "-" if verdict == "same" else MARKS[verdict]
            yield from self._wrap(f"  {mark} ", text)
            if self.full:
                yield from self._cut([Line(f"      {printable(item)}") for item in items])
        if len(found) > len(shown):
            yield Line(f"  ... {len(found) - len(shown)} more (--full)")

    def _tensor(self, tensor: JsonObject) -> Iterator[Line]:
        several = len(self.comparison["sides"][0]["steps"]) > 1
        step = f" of step {tensor['step']}" if several else ""
        stats, verdict = tensor["statistics"], tensor["verdict"]
        rows, total = (tensor["samples"].get(name) for name in ("compared", "total"))
        share = "" if total in (None, rows) else f"{rows} of "
        count = counted(stats["pairs"], "value")
        count += "" if rows is None else f" of {share}{counted(total or rows, 'sample')}"
        text = f"{tensor['name']}{step}: {verdict}, {count}"
        yield from self._wrap(f"  {MARKS[verdict]} ", text, _tone(verdict))
        if tensor["reason"]:
            yield from self._wrap("      ", tensor["reason"])
        if verdict == "same" or not stats["finite"]:
            return
        if tensor["station"] not in ("tokens", "masks"):  # ids have no distance
            yield from self._numbers(tensor)
        if len(tensor["places"]) > 1:
            yield from self._places(tensor["places"])
        yield from self._cut(
            [
                Line(
                    f"      sample {printable(each['sample'])}: {each['unequal']} of "
                    f"{each['pairs']} values, max |d| {each['max_abs']:.4e}"
                )
                for each in tensor["differing_samples"]
            ]
        )

    def _numbers(self, tensor: JsonObject) -> Iterator[Line]:
        stats = tensor["statistics"]
        yield from self._wrap(
            "      ",
            f"max |d| {stats['max_abs']:.6e}, mean |d| {stats['mean_abs']:.6e}, relative error "
            f"{stats['relative']:.3g}, cosine {stats['cosine']:.9g}",
        )
        a, b = stats["a"], stats["b"]
        yield from self._wrap(
            "      ",
            f"mean {a['mean']:.6g} and {b['mean']:.6g}, std {a['std']:.4g} and {b['std']:.4g}; "
            f"allowed: {tensor['tolerance']['reason']}",
        )

    def _places(self, locations: Sequence[JsonObject]) -> Iterator[Line]:
        yield from self._cut(
            [
                Line(
                    f"      {MARKS[each['verdict']]} {places_text(each)}: {largest_text(each)}"
                    + (f" ({each['problem']})" if each["problem"] else ""),
                    _tone(each["verdict"]),
                )
                for each in worst_first(locations)
            ]
        )
        values = [_difference(each) for each in locations]
        yield Line(
            f"      over {len(values)}: max {max(values):.6e}, min {min(values):.6e}, mean "
            f"{statistics.fmean(values):.6e}"
        )

    def _title(self, text: str) -> Iterator[Line]:
        yield Line("")
        yield Line(text, "title")

    def _cut(self, lines: Sequence[Line]) -> Iterator[Line]:
        most = len(lines) if self.most is None else self.most
        for line in lines[:most]:
            text = line.text.lstrip()
            yield from self._wrap(" " * (len(line.text) - len(text)), text, line.tone)
        if len(lines) > most:
            yield Line(f"      ... {len(lines) - most} more (--all)")

    def _wrap(self, indent: str, text: str, tone: str = "") -> Iterator[Line]:
        for line in wrapped(indent, text, self.width):
            yield Line(line, tone)


def _numbers(value: Json, name: str = "") -> Json:
    if isinstance(value, Mapping):
        return {key: _numbers(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item, name) for item in value]
    return nonfinite.number(value) if name in _NUMBERS else value


def _difference(location: JsonObject) -> float:
    stats = location["statistics"]
    return float(stats["max_abs"]) if stats["finite"] else 0.0


def _tone(verdict: str) -> str:
    return "good" if verdict in ("same", "within noise") else "bad"
