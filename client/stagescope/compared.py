"""A comparison of dumps, as the service or `stagescope compare` says it: verdict first.

The text is readable at 80 columns: the verdict, the first difference, likely causes and what the
evidence excludes; then every section with a line a tensor, and below it one a rank and microbatch.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from stagescope.answers import Record
from stagescope.changes import change_lines
from stagescope.render import counted, format_bytes, printable, wrapped
from stagescope.wire import nonfinite
from stagescope.wire.errors import InvalidInput

SHOWN: Final = 8
"""Places, samples or items of a list that are shown, unless all are asked for."""
SIDES: Final = "ABC"
ALONE: Final = ("only", "section")
"""Kinds of findings that name what one side alone has."""
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
"""Fields whose strings are non-finite numbers, spelled."""
_PART: Final = ("occurrence", "epoch", "minibatch", "microbatch")
_WEIGHT: Final = {verdict: at for at, verdict in enumerate(MARKS)}
_Mapping = Mapping[str, Any]


class Line(NamedTuple):
    """A line, and whether it is a 'title', 'good', 'bad' or plain ('')."""

    text: str
    tone: str = ""


class Compared(Record):
    """Two or three dumps held against each other; see the schema of `stagescope compare`.

    Usage:
        >>> found = session.compare("qwen3-8b@1:5", "qwen3-8b@2:5")
        >>> found.verdict                # 'same', 'within noise', 'different', 'not comparable'
        >>> found.first                  # where they first differ, in the order of the data's flow
        >>> found.save("report.html")    # one page with pictures, readable anywhere
    """

    __slots__ = ("_save",)

    def __init__(self, said: _Mapping, *, save: Callable[[Path], None] | None = None) -> None:
        super().__init__(_numbers(said), title=f"comparison: {said.get('verdict')}")
        self._save = save

    @property
    def verdict(self) -> str:
        """Of everything that was compared: one of `MARKS`."""
        return str(self["verdict"])

    @property
    def first(self) -> _Mapping | None:
        """The first thing that differs, in the order in which data flows; None where none does."""
        return next((pair["first"] for pair in self["pairs"] if pair["first"] is not None), None)

    @property
    def exit_status(self) -> int:
        """0 same or within noise, 1 different, 2 could not be compared."""
        return int(self["exit_status"])

    def lines(self, *, width: int = 80) -> list[str]:
        """Return it as lines of at most `width` columns (where words are not longer)."""
        return [line.text for line in as_lines(self, width=width, full=False)]

    def save(self, path: str | Path) -> Path:
        """Write it, and return the path: `.json` as JSON, else as one page of HTML with pictures.

        Raises:
            InvalidInput: a page of what did not come from a service, which draws the pictures.
        """
        found = Path(path)
        if found.suffix == ".json":
            found.write_text(nonfinite.dumps(dict(self)) + "\n", encoding="utf-8")
            return found
        if self._save is None:
            raise InvalidInput(
                "this comparison came from no service", advice="stagescope compare --html FILE"
            )
        self._save(found)
        return found

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def as_lines(
    said: _Mapping, *, width: int = 80, everything: bool = False, full: bool = True
) -> list[Line]:
    """Return a comparison as lines, each with its tone.

    Args:
        said: the comparison, with numbers as floats (see `nonfinite`).
        width: columns.
        everything: whether long lists are shown whole.
        full: whether what follows the likely causes is shown: what is excluded, and each tensor.
    """
    return list(_Writer(said, width, None if everything else SHOWN, full or everything).lines())


def deciding_changes(said: _Mapping) -> list[_Mapping]:
    """Return what differs in the fingerprints of two attempts and may decide numbers."""
    rows = (said.get("changes") or {}).get("rows", ())
    return [row for row in rows if row["weight"] == "numbers"]


def title_of(said: _Mapping) -> str:
    """Return the verdict, and that it is not of everything where one side alone has something."""
    verdict = str(said["verdict"])
    kinds = {finding["kind"] for pair in said["pairs"] for finding in pair["findings"]}
    is_part = not kinds.isdisjoint(ALONE) and verdict in ("same", "within noise")
    return f"{verdict} in what both sides have" if is_part else verdict


def place_text(place: _Mapping) -> str:
    """Return a place in short: rank 3, microbatch 1."""
    if place["rank"] is not None:
        return f"{place['role'] or 'rank'} {place['rank']}, {part_text(place)}"
    return part_text(place) if any(place[name] for name in _PART) else "whole step"


def places_text(place: _Mapping) -> str:
    """Return where a place of a tensor lies on the first side, and on the other if elsewhere."""
    one, other = (place_text(place[side]) for side in "ab")
    return one if one == other else f"{one} against {other}"


def part_text(place: _Mapping) -> str:
    """Return the part of a stage in short: epoch 1, microbatch 0."""
    named = [name for name in _PART if place[name] or name == "microbatch"]
    return ", ".join(f"{name} {place[name]}" for name in named)


def findings_of(pair: _Mapping) -> Iterator[tuple[str, list[str], str]]:
    """Yield (text, items that are not named yet, verdict) of findings, the weightiest first."""
    listed = []
    for finding in sorted(pair["findings"], key=lambda each: -_WEIGHT[each["verdict"]]):
        side, message = finding["side"], finding["message"]
        where = "" if side is None else f"{SIDES[pair['sides'][side]]}: "
        items = finding["items"]
        if not message.startswith(f"{len(items)} "):  # what counts its items names none of them
            items = [item for item in items if item not in message]
        if (side, items) in listed:  # a file may hold several sections
            items = []
        listed.append((side, items))
        yield f"{where}{message}", items, finding["verdict"]


def worst_first(places: Sequence[_Mapping]) -> list[_Mapping]:
    """Return a tensor's places, those that differ most first."""
    return sorted(places, key=lambda each: (-_WEIGHT[each["verdict"]], -_difference(each)))


def largest_text(place: _Mapping) -> str:
    """Return the largest |d| at a place of a tensor, and how many values have none."""
    found = place["statistics"]
    text = f"max |d| {found['max_abs']:.6e}" if found["finite"] else "no finite pair"
    if apart := found["non_finite"]["disagree"]:
        of_finite = " of the finite pairs" if found["finite"] else ""
        text += f"{of_finite}, {apart} disagree in being NaN or infinite"
    return text


def number_text(value: Any) -> str:
    """Return a value as it is told apart from its neighbour: integers whole, floats to 9 digits."""
    if value is None:
        return "nothing"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


class _Writer:
    def __init__(self, said: _Mapping, width: int, most: int | None, full: bool) -> None:
        self.said = said
        self.width = width
        self.most = most
        self.full = full

    def lines(self) -> Iterator[Line]:
        said = self.said
        yield Line(f"{MARKS[said['verdict']]} {title_of(said).upper()}", _tone(said["verdict"]))
        for letter, side in zip(SIDES, said["sides"], strict=False):
            yield from self._wrap(f"{letter}  ", side["name"])
            steps = f"step {', '.join(map(str, side['steps']))}" if side["steps"] else "no step"
            yield from self._wrap(
                "   ",
                f"{side['kind']}, {steps}, {counted(len(side['ranks']), 'rank')}, "
                f"{counted(side['entries'], 'entry', 'entries')}, {format_bytes(side['bytes'])}",
            )
        yield from self._wrap("", said["reason"])
        for remark in said.get("remarks", ()):  # of `compare-dumps` alone
            yield from self._wrap("", remark)
        yield from self._changes(deciding_changes(said))
        for pair in said["pairs"]:
            yield from self._pair(pair)
        yield Line("")
        yield Line(f"{format_bytes(said['bytes'])} read in {said['seconds']:.2f} s")

    def _changes(self, rows: Sequence[_Mapping]) -> Iterator[Line]:
        if rows:
            yield from self._title("Changed between the attempts (stagescope diff lists all)")
        yield from self._cut([Line(line) for row in rows for line in change_lines(row, self.width)])

    def _pair(self, pair: _Mapping) -> Iterator[Line]:
        a, b = (SIDES[side] for side in pair["sides"])
        if len(self.said["pairs"]) > 1:
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

    def _rest(self, pair: _Mapping) -> Iterator[Line]:
        """Say what is not shown: how many tensors came to which verdict."""
        verdicts = [
            tensor["verdict"] for section in pair["sections"] for tensor in section["tensors"]
        ]
        counts = [f"{verdicts.count(each)} {each}" for each in MARKS if each in verdicts]
        if counts:
            yield Line("")
            sections = counted(len(pair["sections"]), "section")
            yield from self._wrap(
                "", f"{counted(len(verdicts), 'tensor')} in {sections}: {', '.join(counts)}"
                " (--full shows each)",
            )  # fmt: skip

    def _first(self, first: _Mapping, a: str, b: str) -> Iterator[Line]:
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
            text = f"{letter} {number_text(side['value'])}  ({place_text(side['place'])}{at})"
            yield from self._wrap("  ", text)

    def _causes(self, pair: _Mapping) -> Iterator[Line]:
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

    def _findings(self, pair: _Mapping) -> Iterator[Line]:
        if pair["findings"]:
            yield from self._title("Not compared, or worth knowing")
        for text, items, verdict in findings_of(pair):
            mark = "-" if verdict == "same" else MARKS[verdict]
            yield from self._wrap(f"  {mark} ", text)
            yield from self._cut([Line(f"      {printable(item)}") for item in items])

    def _tensor(self, tensor: _Mapping) -> Iterator[Line]:
        several = len(self.said["sides"][0]["steps"]) > 1
        step = f" of step {tensor['step']}" if several else ""
        found, verdict = tensor["statistics"], tensor["verdict"]
        rows, total = (tensor["samples"].get(name) for name in ("compared", "total"))
        share = "" if total in (None, rows) else f"{rows} of "
        count = counted(found["pairs"], "value")
        count += "" if rows is None else f" of {share}{counted(total or rows, 'sample')}"
        text = f"{tensor['name']}{step}: {verdict}, {count}"
        yield from self._wrap(f"  {MARKS[verdict]} ", text, _tone(verdict))
        if tensor["reason"]:
            yield from self._wrap("      ", tensor["reason"])
        if verdict == "same" or not found["finite"]:
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

    def _numbers(self, tensor: _Mapping) -> Iterator[Line]:
        found = tensor["statistics"]
        yield from self._wrap(
            "      ",
            f"max |d| {found['max_abs']:.6e}, mean |d| {found['mean_abs']:.6e}, relative error "
            f"{found['relative']:.3g}, cosine {found['cosine']:.9g}",
        )
        a, b = found["a"], found["b"]
        yield from self._wrap(
            "      ",
            f"mean {a['mean']:.6g} and {b['mean']:.6g}, std {a['std']:.4g} and {b['std']:.4g}; "
            f"allowed: {tensor['tolerance']['reason']}",
        )

    def _places(self, places: Sequence[_Mapping]) -> Iterator[Line]:
        yield from self._cut(
            [
                Line(
                    f"      {MARKS[each['verdict']]} {places_text(each)}: {largest_text(each)}"
                    + (f" ({each['problem']})" if each["problem"] else ""),
                    _tone(each["verdict"]),
                )
                for each in worst_first(places)
            ]
        )
        values = [_difference(each) for each in places]
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


def _numbers(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item, name) for item in value]
    return nonfinite.number(value) if name in _NUMBERS else value


def _difference(place: _Mapping) -> float:
    found = place["statistics"]
    return float(found["max_abs"]) if found["finite"] else 0.0


def _tone(verdict: str) -> str:
    return "good" if verdict in ("same", "within noise") else "bad"
