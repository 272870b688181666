"""Directories of msprobe's dumps: full tensors by operator.

The directory of a rank holds `dump.json`, its sidecars and, where tensors were dumped,
`dump_tensor_data/{operator}.{direction}.{which}.pt`, one tensor a file.
At level debug it holds `debug.json`.
`msprobe_places` says of which step, stage and rank it is. `stagescope_service.dumps.msprobe` reads
the operator statistics (`stagescope operators`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope.wire.errors import NotFound
from stagescope_service.dumps.formats.columns import Columns
from stagescope_service.dumps.formats.content import read_content
from stagescope_service.dumps.formats.listing import (
    FileDump,
    ListedFile,
    file_dump,
    files_below,
    unknown_file,
)
from stagescope_service.dumps.formats.msprobe_places import find_places
from stagescope_service.dumps.records import DumpContents, DumpEntry, Location

KIND: Final = "msprobe"
DUMP_FILES: Final = ("dump.json", "debug.json")
OPERATOR_FILES: Final = (*DUMP_FILES, "stack.json", "construct.json", "DONE.json")
"""Files of a rank's directory from which the statistics of its operators are read."""
TENSOR_FOLDER: Final = "dump_tensor_data"

_SETTINGS: Final = re.compile(r"(?:.*[_-])?config(?:uration)?s?(?:[_-].*)?\.(?:json|ya?ml)\Z")
"""What msprobe was told to dump: users and collectors keep it beside its dump."""
_TABLE: Final = "operators.parquet"
_GRADIENT: Final = ".parameters_grad."


def rank_directories(names: Iterable[str]) -> list[str]:
    """Return the directories that hold a rank's dump, derived from file names."""
    found = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in DUMP_FILES}
    return sorted(found)


def operator_files(names: Iterable[str]) -> set[str]:
    """Return the names that belong to a dump of msprobe's: its settings and our table, too."""
    names = [*names]
    directories = set(rank_directories(names))
    found = set()
    for name in names:
        if name.rpartition("/")[2] == _TABLE or _SETTINGS.match(name.rpartition("/")[2]):
            found.add(name)
        folder = name.rpartition("/")[0]
        inner = folder.removesuffix(TENSOR_FOLDER).removesuffix("/")
        if folder in directories or (folder.endswith(TENSOR_FOLDER) and inner in directories):
            found.add(name)
    return found


def holds_msprobe(found: Sequence[ListedFile]) -> bool:
    """Return whether any of the files is one of msprobe's."""
    return bool(rank_directories(each.name for each in found))


def open_msprobe(path: Path, *, step: int | None = None) -> FileDump:
    """List the full tensors of a dump of msprobe's, and the ranks that have statistics.

    Args:
        path: a directory at any level: of a rank, a step, a stage or all.
        step: only this step.

    Raises:
        NotFound: no such directory, or no dump of msprobe's in it.
        TooLarge: more than `listing.MAX_FILES` files.
        StoreError: the disk reported an error.
    """
    found, problems = files_below(path)
    directories = rank_directories(each.name for each in found)
    if not directories:
        raise NotFound(
            f"{path} holds no dump of msprobe's", expected="dump.json in directories of ranks"
        )
    recognized = operator_files(each.name for each in found)
    problems += [
        unknown_file(each, "a dump of msprobe's") for each in found if each.name not in recognized
    ]
    places = find_places(path, (path / each for each in directories))
    of_directory = {each.directory: each.location for each in places.ranks}
    tensors = [
        each
        for each in found
        if each.name in recognized and each.path.parent.name == TENSOR_FOLDER
        and each.path.suffix in (".pt", ".json")
    ]  # fmt: skip
    entries = [*filter(None, (_entry_of(each, of_directory) for each in tensors))]
    about = {
        "operators_are_read_by": "stagescope operators, and the comparison of operators",
        **({"notes": places.notes} if places.notes else {}),
    }
    problems += places.problems
    ranks = [each for each in places.ranks if step in (None, each.location.step)]
    dump = file_dump(path, KIND, entries, problems, read_entry, step=step)
    return dataclasses.replace(dump, about=about, ranks=ranks)


def _entry_of(found: ListedFile, places: Mapping[Path, Location]) -> DumpEntry | None:
    """Return the entry of a tensor's file; None of a directory without a place."""
    location = places.get(found.path.parent.parent.absolute())
    if location is None:
        return None
    section = "gradients" if _GRADIENT in found.path.stem else "other"
    return DumpEntry(section, location, found.path, found.bytes, found.path.stem)


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one tensor; see `records.Dump.read`."""
    found = Columns()
    found.add(entry.key, read_content(entry.path))
    return DumpContents(entry, found.tensors, found.numbers, about=found.metadata())
