"""Payload files, kept ones and those of a ring, as a dump: their metadata say what wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stagescope.wire.errors import StagescopeError
from stagescope_service.dumps.formats.own_file import place_of_job, read_payload
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem, mapping
from stagescope_service.store.tensorfile import describe_file, disk_errors


class PayloadFile(NamedTuple):
    """A file, with what the catalogue records about it."""

    path: Path
    original_path: str = ""
    """The path to report, if `path` is a copy."""
    checksum: str | None = None
    wall: float | None = None
    """When it was written; default: the file's own time."""
    numbers: Mapping[str, float] = {}
    consumed_step: int | None = None
    """Of a rollout without a step: the step that consumed some of its samples."""


class PayloadFiles:
    """Payload files of any steps; one entry a file."""

    def __init__(self, files: Iterable[PayloadFile], *, name: str) -> None:
        self.name = name
        self.kind = "own"
        self.about: Mapping[str, object] = {}
        self._files = {file.path: file for file in files}
        self.jobs: dict[Path, Mapping[str, object]] = {}
        """The `job` metadata of each file."""
        self._problems: list[DumpProblem] = []
        found = [entry for file in self._files.values() if (entry := self._entry(file)) is not None]
        self._entries = sorted(found, key=_sort_key)

    @property
    def entries(self) -> Sequence[DumpEntry]:
        """The files, by step, stage, rank and part."""
        return self._entries

    @property
    def problems(self) -> Sequence[DumpProblem]:
        """Files that cannot be read."""
        return self._problems

    def read(self, entry: DumpEntry) -> DumpContents:
        """Read a file; see `records.Dump.read`."""
        file, record = self._files[entry.path], read_payload(entry)
        catalogued = {
            "wall": file.wall or entry.path.stat().st_mtime,
            "path": file.original_path or str(entry.path),
            "checksum": file.checksum,
            "is_consumed": file.consumed_step is not None,
        }
        return dataclasses.replace(
            record,
            numbers={**record.numbers, **file.numbers},
            about={**record.about, **catalogued},
        )

    def _entry(self, file: PayloadFile) -> DumpEntry | None:
        try:
            with disk_errors(file.path):
                size = file.path.stat().st_size
            metadata = describe_file(file.path).metadata
            location = place_of_job(metadata.get("job"))
        except StagescopeError as error:
            self._problems.append(DumpProblem(file.path, "damaged", str(error)))
            return None
        if file.consumed_step is not None:
            location = location._replace(step=file.consumed_step)
        self.jobs[file.path] = mapping(metadata, "job")
        return DumpEntry("other", location, file.path, size)


def _sort_key(entry: DumpEntry) -> tuple[object, ...]:
    location = entry.location
    return (
        location.step is None,
        location.step or 0,
        location.stage or "",
        location.role or "",
        location.rank or 0,
        location.part,
        str(entry.path),
    )
