"""Directories of msprobe's dumps: full tensors by operator.

`{dump_path}/step{N}/{rankR | procPID}/` holds `dump.json`, its sidecars and, where tensors were
dumped, `dump_tensor_data/{operator}.{direction}.{which}.pt`, one tensor a file. In this project's
captures and in verl's the step and the stage are directories above:
`step_{N}/{stage}[/part]/step0`. `stagescope_service.dumps.msprobe` reads the operator statistics
(`stagescope operators`).
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from stagescope.wire.errors import NotFound
from stagescope.wire.schema import Part
from stagescope_service.dumps.formats.columns import Columns
from stagescope_service.dumps.formats.content import read_content
from stagescope_service.dumps.formats.listing import (
    FileDump,
    ListedFile,
    entry_order,
    files_below,
    unknown_file,
)
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, Location

KIND: Final = "msprobe"
DUMP_FILES: Final = ("dump.json", "debug.json")
OPERATOR_FILES: Final = (*DUMP_FILES, "stack.json", "construct.json", "DONE.json")
"""Files of a rank's directory from which the statistics of its operators are read."""
TENSOR_FOLDER: Final = "dump_tensor_data"

_SETTINGS: Final = "config.json"
"""What msprobe was told to dump: users keep it beside its dump."""
_TABLE: Final = "operators.parquet"
_RANK: Final = re.compile(r"rank(\d{1,9})\Z")
_OWN_STEP: Final = re.compile(r"step(\d{1,18})\Z")
_STAGE_STEP: Final = re.compile(r"step_(\d{1,18})\Z")
_PART: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\Z")
_GRADIENT: Final = ".parameters_grad."


def rank_directories(names: Iterable[str]) -> list[str]:
    """Return the directories that hold a rank's dump, derived from file names."""
    found = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in DUMP_FILES}
    return sorted(found)


def operator_files(names: Iterable[str]) -> set[str]:
    """Return the names that belong to a dump of msprobe's: its settings and our table, too."""
    names = [*names]
    directories = set(rank_directories(names))
    found = {name for name in names if name.rpartition("/")[2] in (_TABLE, _SETTINGS)}
    for name in names:
        folder = name.rpartition("/")[0]
        inner = folder.removesuffix(TENSOR_FOLDER).removesuffix("/")
        if folder in directories or (folder.endswith(TENSOR_FOLDER) and inner in directories):
            found.add(name)
    return found


def holds_msprobe(found: Sequence[ListedFile]) -> bool:
    """Return whether any of the files is one of msprobe's."""
    return bool(rank_directories(each.name for each in found))


def open_msprobe(path: Path, *, step: int | None = None) -> FileDump:
    """List the full tensors of a dump of msprobe's; `about` lists the ranks with statistics.

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
    tensors = [
        each
        for each in found
        if each.name in recognized and each.path.parent.name == TENSOR_FOLDER
        and each.path.suffix in (".pt", ".json")
    ]  # fmt: skip
    entries = [_entry_of(each) for each in tensors]
    chosen = [entry for entry in entries if step in (None, entry.location.step)]
    about = {
        "operators": [str(path / each) for each in directories],
        "operators_are_read_by": "stagescope operators, and the comparison of operators",
    }
    return FileDump(str(path), KIND, sorted(chosen, key=entry_order), problems, read_entry, about)


def rank_dumps(dump: Dump, *, step: int | None = None) -> list[tuple[Path, Location]]:
    """Return the ranks' directories that hold statistics of operators, each with its place.

    A process without a distributed group writes `procPID`, which names no rank: those of a step are
    numbered from 0 in the order of their names.
    """
    listed = dump.about.get("operators") if dump.kind == KIND else None
    directories = [Path(each) for each in listed] if isinstance(listed, list) else []
    found: list[tuple[Path, Location]] = []
    unnamed: collections.Counter[Location] = collections.Counter()
    for directory in directories:
        location = _place_of(directory)
        if step not in (None, location.step) or not (directory / DUMP_FILES[0]).is_file():
            continue
        if location.rank is None:
            rank = unnamed[location]
            unnamed[location] += 1
            location = location._replace(rank=rank)
        found.append((directory, location))
    return found


def _entry_of(found: ListedFile) -> DumpEntry:
    section = "gradients" if _GRADIENT in found.path.stem else "other"
    location = _place_of(found.path.parent.parent)
    return DumpEntry(section, location, found.path, found.bytes, found.path.stem)


def _place_of(directory: Path) -> Location:
    """Return the place that the names of a rank's directory and those above it give."""
    step: int | None = None
    stage, part, rank = None, Part(), _RANK.match(directory.name)
    names = directory.absolute().parts
    if own := _OWN_STEP.match(names[-2] if len(names) > 1 else ""):
        step = int(own[1])
    for index, name in enumerate(names[:-2]):
        if match := _STAGE_STEP.match(name):
            step, stage = int(match[1]), names[index + 1]
            numbers = _PART.match(names[index + 2])
            part = Part(*map(int, numbers.groups())) if numbers else Part()
    return Location(step, stage, None, int(rank[1]) if rank else None, part)


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one tensor; see `records.Dump.read`."""
    found = Columns()
    found.add(entry.key, read_content(entry.path))
    return DumpContents(entry, found.tensors, found.numbers, about=found.metadata())
