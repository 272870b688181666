"""Files of payloads, kept ones and those of a ring, as a dump: each says itself whose it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from stagescope.errors import InvalidTensor, StagescopeError
from stagescope.nonfinite import numbers
from stagescope.schema import PART_FIELDS, Part
from stagescope_service.dumps.records import Entry, Place, Problem, Record
from stagescope_service.store.tensorfile import describe_file, disk_errors, map_tensors

_OF_ROWS: Final = ("sample_ids", "group_ids")


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
        file = self._files[entry.path]
        tensors, said = map_tensors(entry.path)
        strings = {
            str(name): tuple(map(str, texts))
            for name, texts in _mapping(said, "strings").items()
            if isinstance(texts, list)
        }
        job, scalars = _mapping(said, "job"), numbers(_mapping(said, "scalars"))
        plain = {n: v for n, v in scalars.items() if type(v) in (int, float)}
        return Record(
            entry,
            tensors,
            numbers={**plain, **file.numbers},
            samples=strings.get("sample_ids"),
            groups=strings.get("group_ids"),
            row_texts={n: texts for n, texts in strings.items() if n not in _OF_ROWS},
            mask="response_mask" if "response_mask" in tensors else None,
            about={
                "meta": _mapping(said, "meta"),
                "settings": _mapping(said, "settings") or _mapping(job, "settings"),
                "job": job,
                "wall": file.wall or entry.path.stat().st_mtime,
                "path": file.where or str(entry.path),
                "checksum": file.checksum,
                "is_consumed": file.consumed_step is not None,
            },
        )

    def _entry(self, file: PayloadFile) -> Entry | None:
        try:
            with disk_errors(file.path):
                size = file.path.stat().st_size
            job = describe_file(file.path).metadata.get("job")
            place = _place(job)
        except StagescopeError as error:
            self._problems.append(Problem(file.path, "damaged", str(error)))
            return None
        assert isinstance(job, Mapping)
        if file.consumed_step is not None:
            place = place._replace(step=file.consumed_step)
        self.jobs[file.path] = job
        return Entry("other", place, file.path, size)


def _place(job: object) -> Place:
    """Return where a file says that it was made.

    Raises:
        InvalidTensor: it does not say it.
    """
    if not isinstance(job, Mapping):
        raise InvalidTensor("it does not say of which work it is")
    counts = [job.get(name) or 0 for name in PART_FIELDS]
    whole = [
        *counts,
        *(job.get(name) for name in ("step", "rank", "data_rank", "attempt_id", "seq")),
    ]
    texts = [job.get(name) for name in ("stage", "role", "incarnation")]
    if any(type(number) not in (int, type(None)) for number in whole) or any(
        not isinstance(text, str | None) for text in texts
    ):
        raise InvalidTensor(
            f"it says {str(dict(job))[:200]} of its work", expected="names and ints"
        )
    return Place(job.get("step"), texts[0], texts[1], job.get("rank"), Part(*counts))


def _mapping(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = said.get(name)
    return found if isinstance(found, Mapping) else {}


def _order(entry: Entry) -> tuple[Any, ...]:
    place = entry.place
    return (
        place.step is None, place.step or 0, place.stage or "", place.role or "", place.rank or 0,
        place.part, str(entry.path),
    )  # fmt: skip
