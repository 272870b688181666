"""Compares texts of findings, losses and firings that differ only in values, and merges them.

A value is a number, a list of numbers, a quoted name with a digit, or an id of hex digits.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Final

from stagescope_wire.render import ranges_text

_MAX_TEXTS: Final = 1000
"""Most different texts of a group that are merged into one."""
_MAX_NAMES: Final = 3
"""Most ids that the text of a group lists in one place."""

# Patterns of a text in which every digit is a zero.
_DIGITS: Final = str.maketrans("123456789", "0" * 9)
_NUMBERS: Final = r"(?:(?<!\w)-)?0+(?:\.0+)?(?:e[-+]?0+)?"
_IDS: Final = r"""'[^']*0[^']*'|"[^"]*0[^"]*"|\b(?=[a-f-]*0)[0a-f]{6}[0a-f-]*\b"""
_ID: Final = re.compile(_IDS)
_NUMBER: Final = re.compile(_NUMBERS)
_PLURAL: Final = re.compile(r"(\b0 [a-z]+?)s\b")
_LIST: Final = re.compile(r"\b(rank|step)s\b|0(?:(?:, ?| and | ?- ?)0)+\b")
_VALUE: Final = re.compile(rf"{_IDS}|{_NUMBERS}(?:(?:, ?| and | ?- ?){_NUMBERS})*")

_LISTED: Final = re.compile(r"(, ?| and )")
_NAMED: Final = re.compile(r"\b(rank|step)s? $")
_VERB: Final = re.compile(r"^((?: of [\w.-]+)?(?:, [^,:;]+,)? )(does|has|is|was)\b")
_OBJECT: Final = re.compile(r"\b(at|by|for|from|in|of|on)( \w+)? $")
"""Before ranks that are no subject: `a sample on actor ranks 1-2 is off`."""
_OF_MANY: Final = {"does": "do", "has": "have", "is": "are", "was": "were"}
_COUNTED: Final = re.compile(r"^( [a-z]+?)s\b")


def without_values(text: str | None) -> str:
    """Return a text without its values, which differ between texts of one cause."""
    return _without_numbers((text or "").translate(_DIGITS))


@functools.lru_cache(maxsize=4096)  # texts of one cause often differ in their digits alone
def _without_numbers(text: str) -> str:
    plain = _PLURAL.sub(r"\1", _NUMBER.sub("0", _ID.sub("0", text)))
    return _LIST.sub(lambda match: match[1] or "0", plain)


def text_of_all(texts: Iterable[str | None]) -> str | None:
    """Return one text that is true of all; they differ in their values, or have one cause.

    Ranks and steps are listed, other numbers become their smallest and largest: `rank 0 waited 3 s`
    and `rank 1 waited 5 s` become `ranks 0-1 waited 3 to 5 s`. If more than values differs, or a
    part of a name (`float16`), it returns the first text, and says so.
    """
    distinct = [*dict.fromkeys(text for text in texts if text)]
    if len(distinct) < 2:
        return distinct[0] if distinct else None
    rest = f"{distinct[0]} (the first of {len(distinct)} that differ in this text)"
    if len(distinct) > _MAX_TEXTS:
        return rest
    parts = [_split(text) for text in distinct]
    if len({tuple(map(_plain, literals)) for literals, _ in parts}) > 1:
        return rest
    literals = [max(alike, key=len) for alike in zip(*(part[0] for part in parts), strict=True)]
    values = [[*dict.fromkeys(alike)] for alike in zip(*(part[1] for part in parts), strict=True)]
    out, is_plural = "", False
    for literal, alike in zip(literals, [*values, []], strict=True):
        if is_plural:
            literal = _VERB.sub(lambda match: match[1] + _OF_MANY[match[2]], literal)
        named = _NAMED.search(literal)
        if len(alike) > 1 and literal[-1:].isidentifier():
            return rest
        before = literal[: named.start()] if named else ""
        is_plural = named is not None and len(alike) > 1 and not _OBJECT.search(before)
        out += f"{before}{named[1]}s " if named and len(alike) > 1 else literal
        out += _joined(alike, listed=named is not None)
    return out


def _split(text: str) -> tuple[list[str], list[str]]:
    """Return the parts of a text around its values, one more than the values, and the values."""
    literals, values, end = [], [], 0
    for match in _VALUE.finditer(text.translate(_DIGITS)):
        literals.append(text[end : match.start()])
        values.append(text[match.start() : match.end()])
        end = match.end()
    return [*literals, text[end:]], values


def _plain(literal: str) -> str:
    return _COUNTED.sub(r"\1", _NAMED.sub(r"\1 ", literal))


def _joined(values: Sequence[str], *, listed: bool) -> str:
    """Return one text for the values of a place.

    Args:
        values: without repetitions.
        listed: whether they are ranks or steps, which are all named.
    """
    if len(values) < 2:
        return "".join(values)
    lists = [_LISTED.split(value) for value in values]
    if listed and all(each.isdecimal() for numbers in lists for each in numbers[::2]):
        return ranges_text(sorted({int(each) for numbers in lists for each in numbers[::2]}))
    try:
        columns = [
            sorted({*column}, key=float) for column in zip(*(n[::2] for n in lists), strict=True)
        ]
    except ValueError:  # names, ranges, or lists of different lengths
        more = len(values) - _MAX_NAMES
        return " or ".join(values[:_MAX_NAMES]) + (f" or {more} more" if more > 0 else "")
    spans = [
        column[0] if len(column) == 1 else f"{column[0]} to {column[-1]}" for column in columns
    ]
    return "".join(itertools.chain(*zip(spans, [*lists[0][1::2], ""], strict=True)))
