"""Files of torch.distributed's flight recorder, one a rank: of NCCL, HCCL, or saved by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from stagescope_wire.collectives.records import MAX_BYTES, RankRecord, parse, recorded
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.nonfinite import JsonObject

MAX_FILES: Final = 16_384
_RANK: Final = re.compile(r"(\d{1,6})(?:\.(?:json|pickle|pkl|bin|pt))?\Z")
"""The end of a file's name, such as `nccl_trace_rank_3`, `hccl_trace_rank_3` or `3.json`."""


class RecordedFiles(NamedTuple):
    """What the files of a directory hold."""

    ranks: dict[int, RankRecord]
    """Global rank -> what it recorded."""
    problems: dict[str, str]
    """Path of a file that could not be read -> why."""


def read_directory(directory: Path) -> RecordedFiles:
    """Return the records of the files below a directory; a bad file loses no other one.

    Raises:
        NotFound: no file's name ends with a rank.
    """
    documents: dict[int, list[JsonObject]] = {}
    problems: dict[str, str] = {}
    found = [
        (int(named[1]), path)
        for path in sorted(directory.rglob("*"))
        if (named := _RANK.search(path.name)) is not None and path.is_file()
    ]
    if not found:
        raise NotFound(
            f"no file in {directory} is of a flight recorder",
            expected="names that end with the rank, such as nccl_trace_rank_0",
        )
    for rank, path in found[:MAX_FILES]:
        read = _read(path)
        if isinstance(read, str):
            problems[str(path)] = read
        else:
            documents.setdefault(rank, []).append(read)
    ranks = {rank: recorded(each, rank=rank) for rank, each in sorted(documents.items())}
    return RecordedFiles(ranks, problems)


def _read(path: Path) -> JsonObject | str:
    """Return what a file holds, or why it could not be read."""
    try:
        with path.open("rb") as file:
            return parse(file.read(MAX_BYTES + 1))
    except (OSError, StagescopeError) as error:
        return str(error)
