"""The answer of a comparison: a verdict, the first difference, likely causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stagescope.answers import Record
from stagescope.compared import as_lines

Save = Callable[[Path], None]


class Comparison(Record):
    """Two or three sides held against each other; every field of the answer is in it.

    Usage:
        >>> found = session.compare("qwen3-8b@1:5", "qwen3-8b@2:5")
        >>> found.verdict                # 'same', 'within noise', 'different', 'not comparable'
        >>> found["first"]               # where they first differ, in the order of the data's flow
        >>> found.save("report.html")    # one page with pictures, readable anywhere
    """

    __slots__ = ("_save",)

    def __init__(self, answer: Mapping[str, Any], *, save: Save) -> None:
        super().__init__(answer, title="comparison")
        self._save = save

    @property
    def verdict(self) -> str:
        """Of everything that was compared: 'same', 'within noise', 'different' or
        'not comparable'."""
        return str(self["verdict"])

    @property
    def exit_status(self) -> int:
        """What the command exits with: 0 same or within noise, 1 different, 2 not comparable."""
        return {"different": 1, "not comparable": 2}.get(self.verdict, 0)

    @property
    def heading(self) -> str:
        """The verdict."""
        return f"comparison: {self.verdict}"

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the report as lines of at most `width` columns, the verdict first."""
        return [line.text for line in as_lines(self, width=width)]

    def save(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML page; return its path."""
        found = Path(path)
        self._save(found)
        return found
