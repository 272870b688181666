"""Comparisons as text: titles, locations, findings, and the lines of a report."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from stagescope_wire import nonfinite, render
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import Line, counted, format_bytes, printable, ranges_text, wrapped


def change_lines(row: JsonObject, width: int) -> Iterator[str]:
    """Yield the two values of one change, as lines of at most `width` columns."""
    label = f"  {row['area']} {row['name']}: "
    missing = "unknown" if row["weight"] == "unknown" else render.MISSING
    values = [missing if row[side] is None else _value(row[side]) for side in ("a", "b")]
    line = printable(f"{label}{values[0]} -> {values[1]}")
    if len(line) <= width:
        yield line
        return
    yield printable(label).rstrip()
    for side, value in zip("ab", values, strict=True):
        yield from textwrap.wrap(
            printable(value), width, initial_indent=f"    {side} ", subsequent_indent=" " * 6
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
    most = None if everything else MAX_SHOWN
    return _TextWriter(comparison, width, most, full or everything).write()


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


def location_text(location: JsonObject) -> str:
    """Return a location as short text: rank 3, microbatch 1."""
    if location["rank"] is not None:
        return f"{location['role'] or 'rank'} {location['rank']}, {part_text(location)}"
    return part_text(location) if any(location[name] for name in _PART) else "whole step"


def step_text(location: JsonObject) -> str:
    """Return the step and stage of a location, before its rank: 'step 4, actor_update, '."""
    step = "" if location["step"] is None else f"step {location['step']}, "
    return f"{step}{location['stage']}, " if location["stage"] else step


def locations_text(location: JsonObject) -> str:
    """Return a tensor's location on the first side, and that on the other if it differs."""
    one, other = (location_text(location[side]) for side in "ab")
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
    """Writes the lines of a comparison.

    Args:
        comparison: what to write.
        width: columns.
        most: items of a list that are shown; None: all.
        full: also show what follows the likely causes.
    """

    def __init__(self, comparison: JsonObject, width: int, most: int | None, full: bool) -> None:
        self.comparison, self.width, self.most, self.full = comparison, width, most, full
        self.lines: list[Line] = []

    def write(self) -> list[Line]:
        """Return the lines of the whole comparison."""
        comparison = self.comparison
        verdict = comparison["verdict"]
        self._add("", f"{MARKS[verdict]} {title_of(comparison).upper()}", _tone(verdict))
        for letter, side in zip(SIDES, comparison["sides"], strict=False):
            self._add(f"{letter}  ", side["name"])
            steps = ranges_text("step", sorted(side["steps"])) or "no step"
            entries = counted(side["entries"], "entry", "entries")
            ranks, size = counted(len(side["ranks"]), "rank"), format_bytes(side["bytes"])
            self._add("   ", f"{side['kind']}, {steps}, {ranks}, {entries}, {size}")
        self._add("", comparison["reason"])
        for remark in comparison.get("remarks", ()):  # only of `compare-dumps`
            self._add("", remark)
        if rows := deciding_changes(comparison):
            self._title("Changed between the attempts (stagescope diff lists all)")
            self._cut([Line(line) for row in rows for line in change_lines(row, self.width)])
        for pair in comparison["pairs"]:
            self._pair(pair)
        self.lines.append(Line(""))
        self._add("", f"{format_bytes(comparison['bytes'])} read in {comparison['seconds']:.2f} s")
        return self.lines

    def _pair(self, pair: JsonObject) -> None:
        a, b = (SIDES[side] for side in pair["sides"])
        if len(self.comparison["pairs"]) > 1:
            self.lines += [Line(""), Line("=" * self.width)]
            self._add("", f"{a} and {b}: {pair['verdict']}", _tone(pair["verdict"]))
            self._add("", pair["reason"])
        if pair["first"] is not None:
            self._first(pair["first"], a, b)
        self._causes(pair)
        self._findings(pair)
        if not self.full:
            self._count_tensors(pair)
            return
        if (floor := pair["noise_floor"]) is not None:
            text = f"mean |d| {floor['mean']:.3g}, max {floor['max']:.3g}: {floor['source']}"
            self._add("noise floor ", text)
        for section in pair["sections"]:
            keys = pair["keys"].get(section["section"], ())
            paired = f" (rows paired by {', '.join(keys)})" if keys else ""
            self._title(f"{TITLES.get(section['section'], section['section'])}{paired}")
            for tensor in section["tensors"]:
                self._tensor(tensor)

    def _count_tensors(self, pair: JsonObject) -> None:
        verdicts = [each["verdict"] for section in pair["sections"] for each in section["tensors"]]
        if verdicts:
            counts = ", ".join(f"{verdicts.count(v)} {v}" for v in MARKS if v in verdicts)
            tensors = counted(len(verdicts), "tensor")
            sections = counted(len(pair["sections"]), "section")
            self.lines.append(Line(""))
            self._add("", f"{tensors} in {sections}: {counts} (--full shows each)")

    def _first(self, first: JsonObject, a: str, b: str) -> None:
        self._title("First difference")
        self._add("  ", f"at the {first['station']}: {first['section']}/{first['name']}")
        self._add("  ", first["reason"])
        if (location := first["location"]) is None:
            return
        if location["sample"] is not None:
            position = location["position"]
            self._add("  ", f"sample {location['sample']}, its value {position} (from 0)")
        for letter, side in ((a, location["a"]), (b, location["b"])):
            at = f", at {list(side['coordinate'])}" if side["coordinate"] else ""
            where = f"{step_text(side['place'])}{location_text(side['place'])}{at}"
            self._add("  ", f"{letter} {number_text(side['value'])}  ({where})")

    def _causes(self, pair: JsonObject) -> None:
        if pair["causes"]:
            self._title("Likely causes")
        for at, cause in enumerate(pair["causes"], 1):
            self._add(f"  {at}. ", cause["title"])
            self._add("     because ", cause["evidence"])
            for check in cause["checks"]:
                self._add("     - ", check)
        if pair["excluded"] and self.full:
            self._title("Excluded by what agrees")
            for text in pair["excluded"]:
                self._add("  - ", text)

    def _findings(self, pair: JsonObject) -> None:
        if pair["findings"]:
            self._title("Not compared, or worth knowing")
        found = [*findings_of(pair)]
        shown = found if self.full else found[:_FINDINGS]
        for text, items, verdict in shown:
            self._add(f"  {'-' if verdict == 'same' else MARKS[verdict]} ", text)
            if self.full:
                self._cut([Line(f"      {printable(item)}") for item in items])
        if len(found) > len(shown):
            self._add("  ", f"... {len(found) - len(shown)} more (--full)")

    def _tensor(self, tensor: JsonObject) -> None:
        several = len(self.comparison["sides"][0]["steps"]) > 1
        step = f" of step {tensor['step']}" if several else ""
        stats, verdict = tensor["statistics"], tensor["verdict"]
        rows, total = (tensor["samples"].get(name) for name in ("compared", "total"))
        share = "" if total in (None, rows) else f"{rows} of "
        count = counted(stats["pairs"], "value")
        count += "" if rows is None else f" of {share}{counted(total or rows, 'sample')}"
        text = f"{tensor['name']}{step}: {verdict}, {count}"
        self._add(f"  {MARKS[verdict]} ", text, _tone(verdict))
        if tensor["reason"]:
            self._add("      ", tensor["reason"])
        if verdict == "same" or not stats["finite"]:
            return
        if tensor["station"] not in ("tokens", "masks"):  # ids have no distance
            self._statistics(stats, tensor["tolerance"]["reason"])
        if len(tensor["places"]) > 1:
            self._places(tensor["places"])
        self._cut([
            Line(
                f"      sample {printable(each['sample'])}: {each['unequal']} of {each['pairs']} "
                f"values, max |d| {each['max_abs']:.4e}"
            )
            for each in tensor["differing_samples"]
        ])  # fmt: skip

    def _statistics(self, stats: JsonObject, allowed: str) -> None:
        self._add(
            "      ",
            f"max |d| {stats['max_abs']:.6e}, mean |d| {stats['mean_abs']:.6e}, relative error "
            f"{stats['relative']:.3g}, cosine {stats['cosine']:.9g}",
        )
        a, b = stats["a"], stats["b"]
        means = f"mean {a['mean']:.6g} and {b['mean']:.6g}"
        self._add("      ", f"{means}, std {a['std']:.4g} and {b['std']:.4g}; allowed: {allowed}")

    def _places(self, locations: Sequence[JsonObject]) -> None:
        self._cut([
            Line(
                f"      {MARKS[each['verdict']]} {locations_text(each)}: {largest_text(each)}"
                + (f" ({each['problem']})" if each["problem"] else ""),
                _tone(each["verdict"]),
            )
            for each in worst_first(locations)
        ])  # fmt: skip
        values = [_difference(each) for each in locations]
        least, mean = min(values), statistics.fmean(values)
        text = f"over {len(values)}: max {max(values):.6e}, min {least:.6e}, mean {mean:.6e}"
        self._add("      ", text)

    def _title(self, text: str) -> None:
        self.lines.append(Line(""))
        self._add("", text, "title")

    def _cut(self, lines: Sequence[Line]) -> None:
        most = len(lines) if self.most is None else self.most
        for line in lines[:most]:
            text = line.text.lstrip()
            self._add(" " * (len(line.text) - len(text)), text, line.tone)
        if len(lines) > most:
            self._add("      ", f"... {len(lines) - most} more (--all)")

    def _add(self, indent: str, text: str, tone: str = "") -> None:
        self.lines += [Line(line, tone) for line in wrapped(indent, text, self.width)]


def with_numbers(value: Json, name: str = "") -> Json:
    """Return a comparison with numbers where its JSON has texts for non-finite ones."""
    if isinstance(value, Mapping):
        return {key: with_numbers(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [with_numbers(item, name) for item in value]
    return nonfinite.number(value) if name in _NUMBERS else value


def _difference(location: JsonObject) -> float:
    stats = location["statistics"]
    return float(stats["max_abs"]) if stats["finite"] else 0.0


def _tone(verdict: str) -> str:
    return "good" if verdict in ("same", "within noise") else "bad"
