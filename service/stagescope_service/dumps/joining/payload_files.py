"""Files of payloads, kept ones and those of a ring, as a dump: each says itself whose it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stagescope.wire.errors import StagescopeError
from stagescope_service.dumps.formats.own_file import place_of, read_whole
from stagescope_service.dumps.records import Entry, Problem, Record
from stagescope_service.store.tensorfile import describe_file, disk_errors


class PayloadFile(NamedTuple):
    """A file, and what the catalogue knows of it."""

    path: Path
    where: str = ""
    """Where it lies for a reader, if `path` is a copy of it."""
    checksum: str | None = None
    wall: float | None = None
    """When it was written; default: the file's own time."""
    numbers: Mapping[str, float] = {}
    consumed_step: int | None = None
    """Of a rollout of no step: the step that consumed some of its samples."""


class PayloadFiles:
    """Payload files of any steps; one entry a file."""

    def __init__(self, files: Iterable[PayloadFile], *, name: str) -> None:
        self.name = name
        self.kind = "own"
        self.about: Mapping[str, Any] = {}
        self._files = {file.path: file for file in files}
        self.jobs: dict[Path, Mapping[str, Any]] = {}
        """What each file says of its work."""
        self._problems: list[Problem] = []
        found = [entry for file in self._files.values() if (entry := self._entry(file)) is not None]
        self._entries = sorted(found, key=_order)

    @property
    def entries(self) -> Sequence[Entry]:
        """The files, by step, stage, rank and part."""
        return self._entries

    @property
    def problems(self) -> Sequence[Problem]:
        """Files that cannot be read."""
        return self._problems

    def read(self, entry: Entry) -> Record:
        """Read a file; see `records.Dump.read`."""
        file, record = self._files[entry.path], read_whole(entry)
        catalogued = {
            "wall": file.wall or entry.path.stat().st_mtime,
            "path": file.where or str(entry.path),
            "checksum": file.checksum,
            "is_consumed": file.consumed_step is not None,
        }
        return dataclasses.replace(
            record,
            numbers={**record.numbers, **file.numbers},
            about={**record.about, **catalogued},
        )

    def _entry(self, file: PayloadFile) -> Entry | None:
        try:
            with disk_errors(file.path):
                size = file.path.stat().st_size
            job = describe_file(file.path).metadata.get("job")
            place = place_of(job)
        except StagescopeError as error:
            self._problems.append(Problem(file.path, "damaged", str(error)))
            return None
        assert isinstance(job, Mapping)
        if file.consumed_step is not None:
            place = place._replace(step=file.consumed_step)
        self.jobs[file.path] = job
        return Entry("other", place, file.path, size)


def _order(entry: Entry) -> tuple[Any, ...]:
    place = entry.place
    return (
        place.step is None, place.step or 0, place.stage or "", place.role or "", place.rank or 0,
        place.part, str(entry.path),
    )  # fmt: skip
