"""Shared by the readers: the files below a directory, and a dump made of files."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stagescope_service.dumps.formats.content import SUFFIXES, damage_of, first_values
from stagescope_service.dumps.records import (
    SECTIONS,
    Dump,
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
    RankDump,
)
from stagescope_service.store.artifacts import confine
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import NotFound, StagescopeError, TooLarge
from stagescope_wire.schema import Part

MAX_FILES: Final = 200_000
_SECTION_INDEX: Final = {section: index for index, section in enumerate(SECTIONS)}


class ListedFile(NamedTuple):
    """A file below a directory."""

    path: Path
    name: str
    """Relative to the directory, with forward slashes."""
    bytes: int


@dataclasses.dataclass(frozen=True)
class FileDump:
    """A `records.Dump` of files; `reader` reads one entry and is a function of a module.

    `ranks` are its directories with msprobe's statistics of operators; each has its own place.
    """

    name: str
    kind: str
    entries: Sequence[DumpEntry]
    problems: Sequence[DumpProblem]
    reader: Callable[[DumpEntry], DumpContents]
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)
    ranks: Sequence[RankDump] = ()

    def read(self, entry: DumpEntry) -> DumpContents:
        """Read one entry; see `records.Dump.read`."""
        return self.reader(entry)


class Format(NamedTuple):
    """A layout of dumps that is recognised by all files together.

    Attributes:
        kind: its name, `Dump.kind`.
        layout: what its files look like, for messages.
        holds: whether any of some files is of the format.
        open: lists the entries of a directory or file, of one step or, with None, of all. It raises
            as `discover.open_dump`.
    """

    kind: str
    layout: str
    holds: Callable[[Sequence[ListedFile]], bool]
    open: Callable[[Path, int | None], Dump]


@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A layout of dumps whose files are recognised one by one, by their name and first values.

    Attributes:
        kind, layout: as of `Format`.
        title: what the files are called in messages.
        section: the section of the files that have one.
        place_of: the place that a file's name gives; None if the name is not of the format.
        read: reads one entry; a function of a module.
        marks: texts among the first `peeked` values of each file.
        entries_of: the entries of a file with these first values, if it may have several sections.
    """

    kind: str
    layout: str
    title: str
    section: str
    place_of: Callable[[ListedFile], Location | None]
    read: Callable[[DumpEntry], DumpContents]
    marks: Sequence[str] = ()
    peeked: int = 64
    entries_of: Callable[[ListedFile, Location, Sequence[str | int]], list[DumpEntry]] | None = None

    def holds(self, found: Sequence[ListedFile]) -> bool:
        """Return whether any of the files is of the format."""
        return any(self._entries(each) for each in found)

    def open(self, path: Path, step: int | None) -> FileDump:
        """List the entries of a directory or file; see `Format`."""
        found, problems = files_of(path)
        names = {each.name for each in found}
        entries: list[DumpEntry] = []
        for each in found:
            of_file = self._entries(each)
            entries += of_file
            if not of_file and not is_companion(each, names):
                problems.append(self._problem(each))
        if not entries:
            raise NotFound(f"{path} holds none of {self.title}", expected=self.layout)
        of_step = [
            each for each in problems
            if each.entry is None or step in (None, each.entry.location.step)
        ]  # fmt: skip
        return file_dump(path, self.kind, entries, of_step, self.read, step)

    def _entries(self, found: ListedFile) -> list[DumpEntry]:
        if (location := self.place_of(found)) is None:
            return []
        values = first_values(found.path, self.peeked)
        if self.entries_of is not None:
            return self.entries_of(found, location, values)
        if not all(mark in values for mark in self.marks):
            return []
        return [DumpEntry(self.section, location, found.path, found.bytes)]

    def _problem(self, found: ListedFile) -> DumpProblem:
        location = self.place_of(found)
        if location is None or (error := damage_of(found.path)) is None:
            return unknown_file(found, self.title)
        entry = DumpEntry(self.section, location, found.path, found.bytes)
        return DumpProblem.from_error(found.path, error, entry if location != Location() else None)


def file_dump(
    path: Path,
    kind: str,
    entries: Iterable[DumpEntry],
    problems: Sequence[DumpProblem],
    reader: Callable[[DumpEntry], DumpContents],
    step: int | None,
) -> FileDump:
    """Return the dump of a step's entries, or of all; keep one entry per place."""
    of_step = [entry for entry in entries if step in (None, entry.location.step)]
    chosen, alike = distinct(sorted(of_step, key=entry_order))
    return FileDump(str(path), kind, chosen, [*problems, *alike], reader)


def distinct(
    entries: Sequence[DumpEntry], location: Location | None = None
) -> tuple[list[DumpEntry], list[DumpProblem]]:
    """Return the entries of one file per place, and the files left out.

    If several files have one place, the one with the shortest name is read: `1` before `01`.

    Args:
        entries: sections of files.
        location: the place of all of them; None if it is their own.
    """

    def place(entry: DumpEntry) -> tuple[object, ...]:
        return entry.section, entry.location if location is None else location, entry.key

    first: dict[tuple[object, ...], DumpEntry] = {}
    for entry in sorted(entries, key=_by_name):
        first.setdefault(place(entry), entry)
    chosen: list[DumpEntry] = []
    refused: dict[Path, DumpProblem] = {}
    for entry in entries:
        other = first[place(entry)]
        if other.path == entry.path:
            chosen.append(entry)
            continue
        message = (
            f"{entry.path} and {other.path} are both of "
            f"{entry.location if location is None else location}. Only {other.path.name} is read. "
            f"Rename {entry.path.name}, or import it into another run"
        )
        refused.setdefault(entry.path, DumpProblem(entry.path, "refused", message, entry))
    return chosen, [*refused.values()]


def _by_name(entry: DumpEntry) -> tuple[object, ...]:
    path = entry.path
    suffix = SUFFIXES.index(path.suffix) if path.suffix in SUFFIXES else len(SUFFIXES)
    return len(path.stem), str(path.with_suffix("")), suffix


def rank_dumps(dump: Dump) -> Sequence[RankDump]:
    """Return the directories in a dump that hold msprobe's statistics of operators."""
    return dump.ranks if isinstance(dump, FileDump) else ()


def entry_order(entry: DumpEntry) -> tuple[object, ...]:
    """Return the sort key of an entry: step, section, rank, part."""
    location = entry.location
    return (
        location.step is not None, location.step or 0, _SECTION_INDEX[entry.section],
        location.stage or "", location.role or "", location.rank is not None, location.rank or 0,
        location.part, entry.key,
    )  # fmt: skip


def files_below(root: Path) -> tuple[list[ListedFile], list[DumpProblem]]:
    """Return every file below a directory, sorted by name, and the problems met.

    Symbolic links out of the directory are refused. Links to themselves are skipped. Hidden files
    are skipped, since they are still being written. A hidden directory with files is a problem.

    Raises:
        NotFound: there is no such directory.
        TooLarge: it holds more than MAX_FILES files.
        StoreError: the disk reported an error.
    """
    if not root.is_dir():
        raise NotFound(f"there is no directory {root}")
    found: list[ListedFile] = []
    problems: list[DumpProblem] = []
    with disk_errors(root):
        for path in _walk(root):
            if len(found) + len(problems) >= MAX_FILES:
                raise TooLarge(
                    f"{root} holds more than {MAX_FILES} files",
                    advice="give the directory of one dump, or of one of its steps",
                )
            if (wrong := _reason_to_skip(path, root)) is not None:
                problems.append(DumpProblem(path, *wrong))
            else:
                size = path.stat().st_size
                found.append(ListedFile(path, path.relative_to(root).as_posix(), size))
    return found, problems


def files_of(path: Path) -> tuple[list[ListedFile], list[DumpProblem]]:
    """Return the files below a directory, or a file itself; see `files_below`."""
    if path.is_file():
        return [ListedFile(path, path.name, path.stat().st_size)], []
    return files_below(path)


def saved_place(found: ListedFile) -> Location | None:
    """Return an unknown place for a file of torch.save or a converted one, else None."""
    return Location() if found.path.suffix in (".pt", ".json") else None


def is_companion(found: ListedFile, names: Container[str]) -> bool:
    """Return whether a file holds the tensors of a converted file."""
    stem, _, suffix = found.name.rpartition(".")
    return suffix == "safetensors" and f"{stem}.json" in names


def _walk(root: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        here = Path(directory)
        hidden = sorted(each for each in folders if each.startswith("."))
        for each in hidden:
            if any(files for _, _, files in os.walk(here / each)):
                yield here / each
        folders[:] = sorted({*folders} - {*hidden})
        yield from (here / each for each in folders if (here / each).is_symlink())
        yield from (here / each for each in sorted(names) if not each.startswith("."))


def _reason_to_skip(path: Path, root: Path) -> tuple[str, str] | None:
    """Return the kind and the message of the problem of what is no file below `root`, else None."""
    if path.name.startswith("."):
        return "unknown", f"{path} has a hidden directory's name and is left out: rename it"
    if path.is_symlink():
        try:
            path.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                return "unknown", f"{path} is a link to itself"
        if root.resolve().is_relative_to(path.resolve()):
            return "unknown", f"{path} leads to a directory above it, and is not followed"
        try:
            confine(path.absolute(), [root])
        except StagescopeError as error:
            return "refused", f"{path} leads out of {root}: {error}"
        if path.is_dir():
            return "unknown", f"{path} is a link to a directory, and is not followed"
    return None if path.is_file() else ("unknown", f"{path} is no file")


def missing_parts(
    kinds: Mapping[str, set[tuple[int, Part]]], *, every_rank: bool = False
) -> Iterator[tuple[str, tuple[int, Part]]]:
    """Yield the (kind, (rank, part)) that are missing from an otherwise complete grid.

    Ranks may have different numbers of microbatches in each mini-batch (dynamic batches). A rank is
    therefore expected to have a part that it has in another kind, and every part before one of the
    same mini-batch. If it has a later mini-batch and nothing of this one, it lacks all parts of
    this one. Every rank needs a part that most ranks have.

    Args:
        kinds: kind -> its (rank, part) that exist. Every rank of any kind is expected in all kinds.
        every_rank: also expect all ranks below the highest.
    """
    everything: set[tuple[int, Part]] = set().union(*kinds.values())
    ranks = sorted({rank for rank, _ in everything})
    ranks = list(range(ranks[-1] + 1)) if every_rank else ranks
    parts = sorted({part for _, part in everything})
    common = {p for p in parts if 2 * sum((rank, p) in everything for rank in ranks) > len(ranks)}
    for kind, present in kinds.items():
        for rank in ranks:
            of_rank = sorted(part for other, part in everything if other == rank)
            last = {_first_of(part): part for part in of_rank}  # of each mini-batch
            end = max(last, default=_first_of(parts[0]))
            for part in parts:
                first = _first_of(part)
                expected = part in common or (first <= end and part <= last.get(first, first))
                if expected and (rank, part) not in present:
                    yield kind, (rank, part)


def _first_of(part: Part) -> Part:
    return part._replace(microbatch=0)


def unknown_file(found: ListedFile, kind: str) -> DumpProblem:
    """Return the problem of a file that is not part of a format."""
    return DumpProblem(found.path, "unknown", f"{found.name} is none of {kind}, and is left out")


def modified_at(path: Path) -> float:
    """Return when a file was written, in Unix seconds; 0 if it no longer exists."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
