"""`Exact`: what `/exact` says: which steps agree in every bit, and where the first does not."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from stagescope.answers import Record
from stagescope.frames import Table


class Exact(Record):
    """Which steps of a run are exact; `ranges` is a table of it."""

    __slots__ = ()

    def __init__(self, said: Mapping[str, Any]) -> None:
        attempt = said.get("attempt")
        of = "" if attempt is None else f", attempt {attempt}"
        super().__init__(said, title=f"exact: run {said.get('run')}{of}")

    @property
    def text(self) -> str:
        """All of it in a sentence."""
        return str(self["text"])

    @property
    def first(self) -> dict[str, Any] | None:
        """The first step that differs, and its first token by sample and position."""
        return None if self["first"] is None else dict(self["first"])

    @property
    def is_exact(self) -> bool:
        """Whether every measured step is proved to be exact."""
        return bool(self["rows"]) and {row["verdict"] for row in self["rows"]} == {"exact"}

    def ranges(self) -> Table:
        """Return a row for each range of steps of one verdict."""
        return Table.from_rows(self["rows"], title="ranges of steps")

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the sentence, wrapped."""
        return textwrap.wrap(self.text, width)

    def _repr_html_(self) -> str:
        return Record({"text": self.text}, title=self.heading)._repr_html_()
