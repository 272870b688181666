"""Pages of lists: the requested rows and the cursor of the next page."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from stagescope_service.views.encoding import JsonObject
from stagescope_wire.errors import InvalidInput

StepName: TypeAlias = int | Literal["latest", "measured", "captured"]
"""A step by its number, or the newest one, that with numbers, that with captured operators."""
_STEP_WORDS: Final[tuple[StepName, ...]] = ("latest", "measured", "captured")
STEP_PATTERN: Final = "^(latest|measured|captured|[0-9]{1,18})$"


def parse_step(text: str) -> StepName:
    """Return the step that a text names.

    Raises:
        InvalidInput: it names none.
    """
    for word in _STEP_WORDS:
        if text == word:
            return word
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        expected = "an integer from 0 of at most 18 digits, 'latest', 'measured' or 'captured'"
        raise InvalidInput(f"step is {text!r:.50}", expected=expected)
    return int(text)


# --- pages ----------------------------------------------------------------------------------
_CURSOR: Final = re.compile(r"s1((?:\.-?[0-9]{1,18}){1,3})\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """The requested part of a list: `limit` rows from the position of a cursor."""

    limit: int
    position: tuple[int, ...] = ()

    @property
    def offset(self) -> int:
        """Number of rows of the list before the page."""
        return max(self.position[0], 0) if self.position else 0

    def answer(self, rows: Sequence[Mapping[str, object]], more: bool) -> JsonObject:
        """Return `rows` and the cursor of those that follow (null: there are none)."""
        return {"rows": list(rows), "next": cursor(self.offset + len(rows)) if more else None}

    def first_of(self, rows: Sequence[Mapping[str, object]]) -> JsonObject:
        """Return the page whose rows are the first of `rows`, one more than it needs."""
        return self.answer(rows[: self.limit], more=len(rows) > self.limit)

    def cut(self, rows: Sequence[Mapping[str, object]]) -> JsonObject:
        """Return this page of the complete list `rows`."""
        return self.first_of(rows[self.offset : self.offset + self.limit + 1])


def cursor(*position: int) -> str:
    """Return the opaque text of a position in a list."""
    text = "s1." + ".".join(map(str, position))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def parse_cursor(text: str) -> tuple[int, ...]:
    """Return the position that `cursor` encoded.

    Raises:
        InvalidInput: this service did not make the cursor.
    """
    try:
        padded = text + "=" * (-len(text) % 4)
        decoded = base64.b64decode(padded, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        decoded = ""
    match = _CURSOR.match(decoded)
    if match is None:
        raise InvalidInput(f"cursor {text!r:.50} is not one of this service", expected="a `next`")
    return tuple(int(number) for number in match[1].split(".")[1:])
