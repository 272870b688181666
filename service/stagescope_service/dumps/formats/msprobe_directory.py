"""msprobe's dump directories: full tensors by operator.

`{dump_path}/step{N}/{rankR | procPID}/` holds `dump.json`, its sidecars and, where tensors were
dumped, `dump_tensor_data/{operator}.{direction}.{which}.pt`, one tensor a file. In captures of
ours and in verl's the step and the stage are directories above: `step_{N}/{stage}[/part]/step0`.
Operator statistics are read by `stagescope_service.dumps.msprobe` (`stagescope operators`).
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
    Found,
    entry_order,
    files_below,
    unknown,
)
from stagescope_service.dumps.records import Dump, Entry, Place, Record

KIND: Final = "msprobe"
MARKS: Final = ("dump.json", "debug.json")
OPERATOR_FILES: Final = (*MARKS, "stack.json", "construct.json", "DONE.json")
"""Of a rank's directory: what statistics of its operators are read from."""
TENSOR_FOLDER: Final = "dump_tensor_data"

_TABLE: Final = "operators.parquet"
_RANK: Final = re.compile(r"rank(\d{1,9})\Z")
_OWN_STEP: Final = re.compile(r"step(\d{1,18})\Z")
_STAGE_STEP: Final = re.compile(r"step_(\d{1,18})\Z")
_PART: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\Z")
_GRADIENT: Final = ".parameters_grad."


def rank_directories(names: Iterable[str]) -> list[str]:
    """Return the directories that msprobe wrote for a rank, by the names of the files in them."""
    found = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in MARKS}
    return sorted(found)


def operator_files(names: Iterable[str]) -> set[str]:
    """Return those of the names that belong to a dump of msprobe's, or to its operator table."""
    names = [*names]
    directories = set(rank_directories(names))
    found = {name for name in names if name.rpartition("/")[2] == _TABLE}
    for name in names:
        folder = name.rpartition("/")[0]
        inner = folder.removesuffix(TENSOR_FOLDER).removesuffix("/")
        if folder in directories or (folder.endswith(TENSOR_FOLDER) and inner in directories):
            found.add(name)
    return found


def holds_msprobe(found: Sequence[Found]) -> bool:
    """Say whether any of the files is one of msprobe's."""
    return bool(rank_directories(each.name for each in found))


def open_msprobe(path: Path, *, step: int | None = None) -> FileDump:
    """List the full tensors of a dump of msprobe's; `about` says which ranks have statistics.

    Args:
        path: a directory at any height: of a rank, a step, a stage or all.
        step: only this step.

    Raises:
        NotFound: no such directory, or no dump of msprobe's in it.
        TooLarge: more files than a dump has.
        StoreError: the disk refused.
    """
    found, problems = files_below(path)
    directories = rank_directories(each.name for each in found)
    if not directories:
        raise NotFound(
            f"{path} holds no dump of msprobe's", expected="dump.json in directories of ranks"
        )
    known = operator_files(each.name for each in found)
    problems += [unknown(each, "a dump of msprobe's") for each in found if each.name not in known]
    tensors = [
        each
        for each in found
        if each.name in known and each.path.parent.name == TENSOR_FOLDER
        and each.path.suffix in (".pt", ".json")
    ]  # fmt: skip
    entries = [_entry_of(each) for each in tensors]
    chosen = [entry for entry in entries if step in (None, entry.place.step)]
    about = {
        "operators": [str(path / each) for each in directories],
        "operators_are_read_by": "stagescope operators, and the comparison of operators",
    }
    return FileDump(str(path), KIND, sorted(chosen, key=entry_order), problems, read_entry, about)


def rank_dumps(dump: Dump, *, step: int | None = None) -> list[tuple[Path, Place]]:
    """Return the ranks' directories that hold statistics of operators, each with its place.

    A process without a distributed group wrote `procPID`, which says no rank: of several in a step
    the first by name is rank 0.
    """
    said = dump.about.get("operators") if dump.kind == KIND else None
    directories = [Path(each) for each in said] if isinstance(said, list) else []
    found: list[tuple[Path, Place]] = []
    unnamed: collections.Counter[Place] = collections.Counter()
    for directory in directories:
        place = _place(directory)
        if step not in (None, place.step) or not (directory / MARKS[0]).is_file():
            continue
        if place.rank is None:
            rank = unnamed[place]
            unnamed[place] += 1
            place = place._replace(rank=rank)
        found.append((directory, place))
    return found


def _entry_of(found: Found) -> Entry:
    section = "gradients" if _GRADIENT in found.path.stem else "other"
    place = _place(found.path.parent.parent)
    return Entry(section, place, found.path, found.bytes, found.path.stem)


def _place(directory: Path) -> Place:
    """Return the place that the directories above a rank's files tell."""
    step: int | None = None
    stage, part, rank = None, Part(), _RANK.match(directory.name)
    names = directory.absolute().parts
    if own := _OWN_STEP.match(names[-2] if len(names) > 1 else ""):
        step = int(own[1])
    for at, name in enumerate(names[:-2]):
        if match := _STAGE_STEP.match(name):
            step, stage = int(match[1]), names[at + 1]
            numbers = _PART.match(names[at + 2])
            part = Part(*map(int, numbers.groups())) if numbers else Part()
    return Place(step, stage, None, int(rank[1]) if rank else None, part)


def read_entry(entry: Entry) -> Record:
    """Read one tensor; see `records.Dump.read`."""
    found = Columns()
    found.add(entry.key, read_content(entry.path))
    return Record(entry, found.tensors, found.numbers, about=found.remarks())
