"""What the readers share: the files below a directory, and a dump made of files."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from stagescope.wire.errors import NotFound, StagescopeError, TooLarge
from stagescope.wire.schema import Part
from stagescope_service.dumps.formats.content import damage_of
from stagescope_service.dumps.records import SECTIONS, Entry, Problem, Record
from stagescope_service.store.artifacts import confine
from stagescope_service.store.tensorfile import disk_errors

MOST_FILES: Final = 200_000
_ORDER: Final = {section: order for order, section in enumerate(SECTIONS)}


class Found(NamedTuple):
    """A file below a directory."""

    path: Path
    name: str
    """Relative to the directory, with forward slashes."""
    bytes: int


@dataclasses.dataclass(frozen=True)
class FileDump:
    """A `records.Dump` of files; `reader` reads one entry and is a function of a module."""

    name: str
    kind: str
    entries: Sequence[Entry]
    problems: Sequence[Problem]
    reader: Callable[[Entry], Record]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, entry: Entry) -> Record:
        """Read one entry; see `records.Dump.read`."""
        return self.reader(entry)


def entry_order(entry: Entry) -> tuple[Any, ...]:
    """Return what entries are sorted by: step, section, rank, part."""
    place = entry.place
    step = (place.step is not None, place.step or 0)
    rank = (place.role or "", place.rank is not None, place.rank or 0)
    return (*step, _ORDER[entry.section], place.stage or "", *rank, place.part, entry.key)


def files_below(root: Path) -> tuple[list[Found], list[Problem]]:
    """Return every file below a directory in the order of their names, and what was refused.

    Symbolic links that lead out of the directory are refused. Those in a circle are passed over,
    and so are hidden files, which are those that are still being written.

    Raises:
        NotFound: there is no such directory.
        TooLarge: it holds more files than a dump has.
        StoreError: the disk refused.
    """
    if not root.is_dir():
        raise NotFound(f"there is no directory {root}")
    found: list[Found] = []
    problems: list[Problem] = []
    with disk_errors(root):
        for path in _walk(root):
            if len(found) + len(problems) >= MOST_FILES:
                raise TooLarge(
                    f"{root} holds more than {MOST_FILES} files",
                    advice="give the directory of one dump, or of one of its steps",
                )
            if path.is_symlink() and _leads_nowhere(path):
                problems.append(Problem(path, "unknown", f"{path} is a link to itself"))
            elif path.is_symlink() and (problem := _leads_out(path, root)):
                problems.append(problem)
            elif path.is_file():
                found.append(Found(path, path.relative_to(root).as_posix(), path.stat().st_size))
            elif path.is_symlink() and path.is_dir():
                problems.append(
                    Problem(path, "unknown", f"{path} is a link to a directory: not followed")
                )
            else:
                problems.append(Problem(path, "unknown", f"{path} is no file"))
    return found, problems


def files_of(path: Path) -> tuple[list[Found], list[Problem]]:
    """Return the files below a directory, or a file itself; see `files_below`."""
    if path.is_file():
        return [Found(path, path.name, path.stat().st_size)], []
    return files_below(path)


def is_saved(found: Found) -> bool:
    """Say whether a file may be one that torch.save wrote, or a converted one, by its name."""
    return found.path.suffix in (".pt", ".json")


def is_companion(found: Found, names: Container[str]) -> bool:
    """Say whether a file holds the tensors of a converted one."""
    stem, _, suffix = found.name.rpartition(".")
    return suffix == "safetensors" and f"{stem}.json" in names


def _walk(root: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        here = Path(directory)
        yield from (here / each for each in folders if (here / each).is_symlink())
        yield from (here / each for each in sorted(names) if not each.startswith("."))


def _leads_nowhere(path: Path) -> bool:
    """Say whether a link leads to itself: no file can lie behind it, so nothing is left out."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _leads_out(path: Path, root: Path) -> Problem | None:
    try:
        confine(path.absolute(), [root])
    except StagescopeError as error:
        return Problem(path, "refused", f"{path} leads out of {root}: {error}")
    return None


def missing_places(
    kinds: Mapping[str, set[tuple[int, Part]]], *, every_rank: bool = False
) -> Iterator[tuple[str, tuple[int, Part]]]:
    """Yield (kind, (rank, part)) of what a grid lacks that is whole otherwise.

    Ranks may have different numbers of microbatches in each mini-batch (dynamic batches), so a
    part of a rank is expected where that rank has a later one of its mini-batch, or has it in
    another kind, or is in a later mini-batch without any of this one; or most ranks have it.

    Args:
        kinds: kind -> the (rank, part) of it that are there. Every rank of any kind is expected in
            all of them.
        every_rank: ranks below the highest are expected, too.
    """
    everything: set[tuple[int, Part]] = set().union(*kinds.values())
    ranks = sorted({rank for rank, _ in everything})
    ranks = list(range(ranks[-1] + 1)) if every_rank else ranks
    parts = sorted({part for _, part in everything})
    common = {p for p in parts if 2 * sum((rank, p) in everything for rank in ranks) > len(ranks)}
    for kind, places in kinds.items():
        for rank in ranks:
            mine = sorted(part for at, part in everything if at == rank)
            last = {_first_of(part): part for part in mine}  # of each mini-batch
            end = max(last, default=_first_of(parts[0]))
            for part in parts:
                first = _first_of(part)
                expected = part in common or (first <= end and part <= last.get(first, first))
                if expected and (rank, part) not in places:
                    yield kind, (rank, part)


def _first_of(part: Part) -> Part:
    """Return the first microbatch of a part's mini-batch."""
    return dataclasses.replace(part, microbatch=0)


def unknown(found: Found, kind: str) -> Problem:
    """Return the problem of a file that a format does not have."""
    return Problem(
        found.path, "unknown", f"{found.name} is no file of {kind}: it is left out of everything"
    )


def untold(found: Found, kind: str) -> Problem:
    """Return the problem of a file that does not say that it is of a format told by content.

    A saved one that is damaged may be a file of it: it is never passed over as one of others.
    """
    error = damage_of(found.path) if is_saved(found) else None
    return unknown(found, kind) if error is None else Problem.of(found.path, error)
