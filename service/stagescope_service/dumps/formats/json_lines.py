"""The rows of a file that has a JSON object in each line.

A line that cannot be read loses only its own row: the others are read, and a problem names it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from stagescope_service.dumps.formats.content import json_lines, parse_line
from stagescope_service.dumps.formats.odd_values import listed
from stagescope_service.dumps.pickles.torch_file import FileValue
from stagescope_service.dumps.records import DumpEntry, DumpProblem
from stagescope_wire.errors import InvalidTensor

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class ObjectLines:
    """The rows of a file.

    Attributes:
        path: the file.
        rows: number of a line, from 1 -> its object.
        unread: number of a line -> why it is no row.
    """

    path: Path
    rows: Mapping[int, dict[str, FileValue]]
    unread: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def has_holes(self) -> bool:
        """Whether a row comes after an unread line: its position among the rows is not known."""
        return bool(self.rows) and min(self.unread, default=max(self.rows)) < max(self.rows)

    @property
    def naming(self) -> str:
        """How the rows are named by the prompts that they answer, as a sentence of a record."""
        if self.has_holes:
            return (
                "not named: lines were not read, and a name has the position among the answers of "
                "its prompt"
            )
        return "named by a hash of their prompt and their position among its answers"

    def names(self) -> list[str]:
        """Return what the rows are called in a problem."""
        return [f"line {number}" for number in self.rows]

    def convert(self, read: Callable[[dict[str, FileValue]], _T]) -> tuple[ObjectLines, list[_T]]:
        """Return the result of `read` for each row, and the lines without the refused ones.

        Raises:
            InvalidTensor: it refuses every row.
        """
        found: dict[int, _T] = {}
        refused: dict[int, str] = {}
        for number, row in self.rows.items():
            try:
                found[number] = read(row)
            except InvalidTensor as error:  # noqa: PERF203 - the other rows are still read
                refused[number] = f"is left out: {error.wrong}"
        rows = {number: self.rows[number] for number in found}
        lines = _checked(ObjectLines(self.path, rows, {**self.unread, **refused}))
        return lines, [*found.values()]

    def problems(self, entry: DumpEntry) -> list[DumpProblem]:
        """Return the problem of the lines that are no rows, if there are any."""
        if not self.unread:
            return []
        return [lines_problem(self.path, self.unread, f"the other {len(self.rows)}", entry)]


def numbered(groups: Iterable[str]) -> tuple[str, ...]:
    """Return a name for each row: its group, and how many rows of the group come before."""
    seen: Counter[str] = Counter()
    names: list[str] = []
    for group in groups:
        names.append(f"{group}_{seen[group]}")
        seen[group] += 1
    return tuple(names)


def lines_problem(
    path: Path,
    unread: Mapping[int, str],
    others: str = "the others",
    entry: DumpEntry | None = None,
) -> DumpProblem:
    """Return the problem of lines that were not read: number of a line -> why."""
    return DumpProblem(path, "damaged", f"{path}: {_named(unread)}; {others} were read", entry)


def read_object_lines(path: Path) -> ObjectLines:
    """Read a file with a JSON object in each line; skip blank lines.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: no line is an object, or the file is too large.
        StoreError: the disk reported an error.
    """
    rows: dict[int, dict[str, FileValue]] = {}
    unread: dict[int, str] = {}
    for line in json_lines(path):
        try:
            found = parse_line(line)
        except InvalidTensor as error:
            unread[line.number] = error.wrong
            continue
        if isinstance(found, dict):
            rows[line.number] = found
        else:
            unread[line.number] = f"holds a {type(found).__name__}, not an object"
    return _checked(ObjectLines(path, rows, unread))


def _checked(lines: ObjectLines) -> ObjectLines:
    if not lines.rows:
        raise InvalidTensor(
            f"{lines.path} holds no row: {_named(lines.unread) or 'it has no line'}",
            expected="a JSON object in each line",
        )
    return lines


def _named(unread: Mapping[int, str]) -> str:
    return listed([f"line {line} {why}" for line, why in sorted(unread.items())])
