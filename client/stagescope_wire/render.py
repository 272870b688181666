"""Render values and tables as text: columns in, strings out; no I/O and no colours.

Text fits a width (default: 80 columns): the widest cells are shortened first, then the last columns
are left out and listed. `render_html` does the same for notebooks.
"""

from __future__ import annotations

import json
import math
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final, NamedTuple, TypeVar

from stagescope_wire.nonfinite import Json, JsonObject

MISSING: Final = "-"
"""The text of an unknown value (null); a NaN is nan."""
GAP: Final = "  "
_MIN_WIDTH: Final = 24
"""Cells of up to this width are never shortened: a time, an id, a stage's name."""
_MAX_WIDTH: Final = 48
_LEAST_PERCENT: Final = 1e-6
_MAX_RANGES: Final = 6
"""Most ranges of numbers that a text lists."""
WIDE_ENOUGH: Final = 1000
"""From this width on nothing is shortened: the user requested all of it."""
_WALLS: Final = frozenset({
    "begun", "created", "ended", "since", "started", "waited_since", "wall",
})  # fmt: skip
_CALENDAR_END: Final = 253_402_300_800.0
"""First second of the year 10000, which a datetime cannot represent."""

Columns = Mapping[str, Sequence[Json]]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def unit_of(name: str) -> str:
    """Return the unit that a column's name implies: `B`, `s`, `unix` (a wall clock) or ""."""
    if name == "bytes" or name.endswith("_bytes"):
        return "B"
    if name.endswith(("_wall", "_at")) or name in _WALLS:
        return "unix"
    if name == "seconds" or name.endswith("_seconds"):
        return "s"
    return ""


def format_value(value: object, unit: str = "") -> str:
    """Return one value as text for a reader, on one line, without control characters."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _format_number(value, unit)
    if isinstance(value, Mapping):
        return _format_mapping(value)
    if isinstance(value, list | tuple):
        if ranks := _format_ranks(value):
            return ranks
        return ", ".join(format_value(item, unit) for item in value) or MISSING
    return printable(str(value))


def _format_ranks(value: Sequence[Json]) -> str:
    """Return [[role, rank], ...] as `actor ranks 1, 3, critic rank 0`; empty for anything else."""
    for item in value:
        if not (isinstance(item, list | tuple) and [*map(type, item)] == [str, int]):
            return ""
    return ", ".join(
        printable(f"{role} rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
        for role, ranks in grouped(value).items()
    )


def _format_mapping(value: JsonObject) -> str:
    if value.keys() == {"role", "ranks", "stages"}:  # ranks that began a step again
        return printable(f"{value['role']} {ranges_text('rank', value['ranks'])}")
    if "role" in value and "rank" in value:  # a rank that has not arrived
        parts = (f"{value['role']}/{value['rank']}", value.get("stage"), value.get("status"))
        return printable(" ".join(str(part) for part in parts if part))
    return f"{{{len(value)} fields}}" if len(value) > 3 else printable(as_json(value))


def _format_number(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return str(float(value))
    if unit == "unix" and 0 <= value < _CALENDAR_END:
        return f"{datetime.fromtimestamp(value, timezone.utc):%Y-%m-%d %H:%M:%S}Z"
    if unit == "B":
        return format_bytes(value)
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def format_share(value: float) -> str:
    """Return a share of 1 as per cent: three digits, and never in powers of ten."""
    percent = 100.0 * value
    size = abs(percent)
    if not math.isfinite(percent):
        return "nan" if math.isnan(percent) else f"{percent} %"
    if 0.0 < size < _LEAST_PERCENT:
        return f"below {_LEAST_PERCENT:.6f} %"
    digits = 2 if size < 0.01 else 3
    decimals = max(digits - 1 - math.floor(math.log10(size)), 0) if size else 0
    text = f"{percent:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


def format_bytes(count: float) -> str:
    """Return `count` bytes with a decimal prefix: 301000000000 is `301 GB`."""
    for prefix in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or prefix == "TB":
            return f"{count:.3g} {prefix}"
        count /= 1000
    raise AssertionError("unreachable")


class Line(NamedTuple):
    """A line of text with its style: title, good, bad, dim or plain ('')."""

    text: str
    tone: str = ""


def printable(text: str) -> str:
    """Return `text` with control characters escaped, so that it cannot control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def width_of(text: str) -> int:
    """Return the width of `text` in terminal columns (wide characters need two)."""
    if text.isascii():
        return len(text)
    widths = (
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
    return sum(widths)


def clip(text: str, width: int) -> str:
    """Return `text` in at most `width` columns; a shortened text ends in `..`."""
    if width_of(text) <= width:
        return text
    kept = ""
    for character in text:
        if width_of(kept + character) > width - 2:
            break
        kept += character
    return kept + ".."


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 file`, `2 files`."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return each key of (key, value) pairs with its values, in the order of the pairs."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def ranges_text(noun: str, numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as `steps 10-12, 15 and 4 more`; "" for none."""
    if not numbers:
        return ""
    return f"{noun if len(numbers) == 1 else f'{noun}s'} {numbers_text(numbers)}"


def numbers_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as `10-12, 15 and 4 more`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_MAX_RANGES]]
    rest = sum(b - a + 1 for a, b in ranges[_MAX_RANGES:])
    return ", ".join(texts) + (f" and {rest} more" if rest else "")


def ranks_text(ranks: Iterable[tuple[str, int]]) -> str:
    """Return (role, rank) pairs as text, such as `actor ranks 0-3, 7, critic rank 0`."""
    by_role = grouped(ranks).items()
    return ", ".join(f"{role} {ranges_text('rank', sorted({*own}))}" for role, own in by_role)


_MARKS: Final = ("-> ", "=> ", "+ ", "- ", "* ", "# ")
"""What lines of answers begin with: a text inside one begins no line with it."""


def wrapped(indent: str, text: str, width: int) -> list[str]:
    """Return `text` wrapped to `width` columns, its first line after `indent`.

    Lines break only at spaces: a path or id that is longer than a line stays in one piece, so that
    it can be copied.
    """
    text = printable(text)
    room = max(width - len(indent), 20)
    pieces: list[str] = []
    while len(text) > room:
        cut = text.rfind(" ", room // 2, room + 1)
        cut = text.rfind(" ", 0, room // 2) if cut <= 0 else cut
        while cut > 0 and text.startswith(_MARKS, cut + 1):
            cut = text.rfind(" ", 0, cut)
        # The text may itself begin with spaces as its indent: do not break there.
        cut = cut if text[: max(cut, 0)].strip() else text.find(" ", room)
        if cut < 0:
            break
        pieces.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    first, *more = [*pieces, text]
    return [f"{indent}{first}", *(" " * len(indent) + piece for piece in more)]


def aligned(facts: Mapping[str, str], width: int) -> list[str]:
    """Return a line for each fact, its name first; long texts are wrapped."""
    left = max(map(width_of, facts), default=0)
    labelled = [(f"{name:<{left}}{GAP}", text) for name, text in facts.items()]
    return [line for label, text in labelled for line in wrapped(label, text, width)]


def text_table(columns: Columns, *, units: Mapping[str, str], width: int = 80) -> list[str]:
    """Return the lines of a table: a header, a rule, and one line per row.

    The last line lists the columns that did not fit.
    """
    cells = {
        name: [format_value(value, units.get(name, "")) for value in values]
        for name, values in columns.items()
    }
    # A shortened path is useless: paths of a column that does not fit have lines of their own.
    paths = [name for name in cells if _are_paths(columns[name])]
    widths, left_out = _fit(cells, width, uncut=paths)
    below = [name for name in paths if name not in widths]
    left_out = [name for name in left_out if name not in map(printable, below)]
    numeric = {name for name in widths if is_numeric(columns[name])}

    def line(texts: Mapping[str, str]) -> str:
        parts = (_pad(clip(texts[n], widths[n]), widths[n], right=n in numeric) for n in widths)
        return GAP.join(parts).rstrip()

    lines = [line({name: name for name in widths}), GAP.join("-" * w for w in widths.values())]
    count = len(next(iter(cells.values()), []))
    for row in range(count):
        lines.append(line({name: cells[name][row] for name in widths}))
        lines += [f"{GAP}{cells[n][row]}" for n in below if columns[n][row] is not None]
    if left_out:
        text = f"more columns with --wide (in Python: select): {', '.join(left_out)}"
        lines += textwrap.wrap(text, width=width, subsequent_indent="  ")
    return lines


def _are_paths(values: Sequence[Json]) -> bool:
    """Return whether a column holds paths or addresses."""
    texts = [value for value in values if isinstance(value, str)]
    return (
        bool(texts)
        and all("/" in text and " " not in text for text in texts)
        and (max(map(len, texts)) > _MIN_WIDTH)
    )


def _fit(
    cells: Mapping[str, Sequence[str]], width: int, *, uncut: Sequence[str] = ()
) -> tuple[dict[str, int], list[str]]:
    """Return the width of each column that fits, and the names of the other columns.

    Long cells are shortened down to `_MIN_WIDTH`, which keeps names, times and ids complete. Then
    columns are left out: first those of `uncut` if not everything fits, then those without any
    value, then the last. A column of `uncut` is never shortened.
    """
    names = {name: printable(name) for name in cells}
    full = {name: max(map(width_of, (names[name], *cells[name]))) for name in cells}
    natural = {
        name: needed if name in uncut or width > WIDE_ENOUGH else min(_MAX_WIDTH, needed)
        for name, needed in full.items()
    }
    kept = list(cells)
    if uncut and sum(natural.values()) + len(GAP) * (len(kept) - 1) > width:
        kept = [name for name in kept if name not in uncut] or kept
    while kept:
        widths = {name: natural[name] for name in kept}
        excess = sum(widths.values()) + len(GAP) * (len(kept) - 1) - width
        least = _MIN_WIDTH if len(kept) > 1 else 1
        while excess > 0 and max(widths.values()) > least:
            widest = max(widths, key=lambda name: widths[name])
            widths[widest] -= 1
            excess -= 1
        if excess <= 0:
            return widths, [names[name] for name in cells if name not in widths]
        empty = [name for name in kept if all(cell == MISSING for cell in cells[name])]
        kept.remove((empty or kept)[-1])
    return {}, list(names.values())


def is_numeric(values: Sequence[Json]) -> bool:
    """Return whether a column holds numbers, and nothing else."""
    present = [value for value in values if value is not None]
    return bool(present) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in present
    )


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - width_of(text))
    return space + text if right else text + space


def as_json(value: Json, indent: int | None = None) -> str:
    """Return `value` as JSON for a reader: what JSON cannot hold is a text."""
    return json.dumps(value, ensure_ascii=False, default=str, indent=indent)


def context(about: JsonObject) -> str:
    """Return run, attempt and step as text; a run by the name that people see."""
    shown = {**about, "run": about.get("display_name") or about.get("run")}
    parts = [
        f"{name} {shown[name]}"
        for name in ("run", "attempt", "step")
        if shown.get(name) is not None
    ]
    return ", ".join(map(printable, parts))
