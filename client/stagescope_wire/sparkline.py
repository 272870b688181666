"""Numbers as a line of bars."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Final

_BARS: Final = "▁▂▃▄▅▆▇█"
_PLAIN: Final = "_.-=+*%#"
_NAN: Final = "!"
Value = float | None


def sparkline(
    values: Sequence[Value], width: int, *, bars: str = "", extremes: bool = False
) -> str:
    """Return the values as a line of at most `width` bars; each bar is the maximum of its steps.

    A space is a gap, `!` a value that is not finite. With `extremes`, if there are more steps than
    bars, two bars show a stretch: its minimum and its maximum, in their order. So both a drop and a
    spike are visible.
    """
    if extremes and len(values) > width:
        stretches = [
            _extremes(values[begin:end]) for begin, end in step_ranges(len(values), width // 2)
        ]
        return sparkline([value for both in stretches for value in both], width, bars=bars)
    bars = bars or (_BARS if _can_encode(_BARS) else _PLAIN)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    line = ""
    for begin, end in step_ranges(len(values), width):
        present = [value for value in values[begin:end] if value is not None]
        if not present:
            line += " "
        elif not all(map(math.isfinite, present)):
            line += _NAN
        else:
            share = (max(present) - low) / (high - low) if high > low else 0.0
            line += bars[min(int(share * len(bars)), len(bars) - 1)]
    return line


def _extremes(values: Sequence[Value]) -> tuple[Value, Value]:
    """Return the smallest and the largest value in their order; twice a non-finite one, if any.

    Return None twice if there is no value.
    """
    present = [(at, value) for at, value in enumerate(values) if value is not None]
    bad = [value for _, value in present if not math.isfinite(value)]
    if bad or not present:
        return (bad[0], bad[0]) if bad else (None, None)
    low = min(present, key=lambda each: each[1])
    high = max(present, key=lambda each: each[1])
    (_, first), (_, second) = sorted((low, high))
    return first, second


def step_ranges(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the steps that each character of a line of `width` represents."""
    width = max(min(width, count), 1)
    for position in range(width):
        yield position * count // width, (position + 1) * count // width


def _can_encode(text: str) -> bool:
    """Return whether the encoding of stdout can represent `text`."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
