"""A step's batch in one file (`stagescope batch --output`, `Batch.save`), as a dump.

The file holds each part of a stage as it was recorded, and each section of a part is an entry, as
in this project's own files. A batch can thus be compared with its run and with any other dump.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope_service.dumps.formats.columns import Columns, unique_samples
from stagescope_service.dumps.formats.content import damage_of
from stagescope_service.dumps.formats.listing import (
    FileDump,
    Format,
    ListedFile,
    entry_order,
    files_of,
    unknown_file,
)
from stagescope_service.dumps.formats.odd_values import number_of
from stagescope_service.dumps.formats.own_file import ROW_SECTIONS, masks_of, name_in_record
from stagescope_service.dumps.records import (
    SECTIONS,
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
    mapping,
)
from stagescope_service.rows.ragged import unpadded
from stagescope_service.store.tensorfile import describe_file
from stagescope_wire.batch import Batch, BatchPart
from stagescope_wire.errors import InvalidInput, NotFound, StagescopeError
from stagescope_wire.keep import sections_of
from stagescope_wire.schema import Part

KIND: Final = "batch"

_NO_PARTS: Final = "whole"
"""Key of a batch that has no parts: a microbatch, or selected rows."""


def _is_batch(found: ListedFile) -> bool:
    if found.path.suffix != ".safetensors":
        return False
    try:
        return "stagescope_batch" in describe_file(found.path).metadata
    except StagescopeError:
        return False


def open_batch(path: Path, step: int | None) -> FileDump:
    """List the parts of a saved batch, or of the only one in a directory."""
    found, problems = files_of(path)
    batches = [each for each in found if _is_batch(each)]
    if not batches:
        raise NotFound(
            f"{path} holds no saved batch", expected="what stagescope batch --output wrote"
        )
    if len(batches) > 1:
        raise InvalidInput(
            f"{path} holds {len(batches)} batches: {', '.join(each.name for each in batches[:5])}",
            expected="one of these files",
        )
    problems += [_problem_of(each) for each in found if each not in batches]
    file = batches[0].path
    batch = _loaded(file)
    entries = (
        [] if step not in (None, batch.step) else sorted(_entries(batch, file), key=entry_order)
    )
    problems += [DumpProblem(file, "gap", f"the batch lacks: {gap.message}") for gap in batch.gaps]
    about = {"settings": batch.meta.get("settings") or {}, "source": _source(batch)}
    about = {name: value for name, value in about.items() if value}
    return FileDump(str(path), KIND, entries, problems, read_entry, about)


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one section of one part; see `records.Dump.read`."""
    batch = _loaded(entry.path)
    micro, about = batch, dict[str, object]()
    if entry.key != _NO_PARTS:
        part = batch.parts[int(entry.key)]
        names = _sections(part.stage, part.names, part.numbers)[entry.section]
        micro = _only(batch, names).microbatch(part)
        settings = mapping(batch.meta, "settings")
        stages = mapping(batch.meta, "stages")
        about = {"meta": mapping(stages, part.stage), "job": {"settings": settings, **part.about}}
    else:
        names = _sections(_text(batch, "stage"), [*batch], batch.numbers)[entry.section]
    found = Columns(about={name: value for name, value in about.items() if value})
    for name in names:
        _add_value(found, micro, name)
    samples = groups = None
    if entry.section in ROW_SECTIONS and micro.rows:
        ids = micro.sample_ids
        samples = None if ids is None else unique_samples(ids, found)
        groups = micro.strings.get("group_ids")
    texts = dict(micro.strings) if entry.section == "trajectories" and micro.rows else {}
    found.texts = {n: each for n, each in texts.items() if n not in ("sample_ids", "group_ids")}
    return found.contents(
        entry,
        samples=samples,
        groups=groups if groups and all(groups) else None,
        masks=masks_of(entry.section),
    )


def _problem_of(found: ListedFile) -> DumpProblem:
    error = damage_of(found.path) if found.path.suffix == ".safetensors" else None
    if error is not None:
        return DumpProblem.from_error(found.path, error)
    return unknown_file(found, "a saved batch")


def _loaded(path: Path) -> Batch:
    try:
        status = path.stat()
    except OSError as error:
        raise NotFound(f"there is no file {path}") from error
    return _load(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=3)
def _load(path: Path, _modified: int, _bytes: int) -> Batch:
    """Open a file once for all of its entries; its tensors are not copied from the file."""
    return Batch.load(path)


def _entries(batch: Batch, path: Path) -> Iterator[DumpEntry]:
    if not batch.parts:
        text = _text(batch, "part")
        part = Part(*map(int, text.split("."))) if text else Part()
        rank = batch.source.get("rank")
        location = Location(batch.step, _text(batch, "stage"), _text(batch, "role"), rank, part)
        size = sum(batch.tensor(name).values.nbytes for name in batch)
        for section in _sections(location.stage, [*batch], batch.numbers):
            yield DumpEntry(section, location, path, size, _NO_PARTS)
    for index, recorded in enumerate(batch.parts):
        # A batch joined from another project's dump has sections instead of stages.
        stage = None if recorded.stage in SECTIONS else recorded.stage
        location = Location(batch.step, stage, recorded.role, recorded.rank, recorded.part)
        size = sum(_bytes_of(batch, recorded, name) for name in recorded.names)
        for section in _sections(recorded.stage, recorded.names, recorded.numbers):
            yield DumpEntry(section, location, path, size, str(index))


def _sections(
    stage: str | None, names: Sequence[str], numbers: Mapping[str, float]
) -> dict[str, list[str]]:
    """Return section -> names; a part whose stage is a section has only that one."""
    if stage in SECTIONS:
        return {str(stage): [*names, *numbers]}
    return sections_of(stage, names, numbers)


def _bytes_of(batch: Batch, part: BatchPart, name: str) -> int:
    if name in part.own:
        return part.own[name].values.nbytes
    values = batch[name]
    shape = (part.widths.get(name, 1), *values.shape[2:])
    return int(len(part.rows) * math.prod(shape) * values.itemsize)


def _only(batch: Batch, names: Sequence[str]) -> Batch:
    """Return a batch with these tensors alone, so that only they are cut to a part's rows."""
    return dataclasses.replace(
        batch,
        tensors={n: each for n, each in batch.tensors.items() if n in names},
        lengths={n: each for n, each in batch.lengths.items() if n in names},
    )


def _add_value(found: Columns, micro: Batch, name: str) -> None:
    if name in micro.numbers:
        found.numbers[name] = micro.numbers[name]
    elif name in micro:
        tag, values = micro.tensor(name)
        target = name_in_record(name)
        if values.ndim == 0:
            found.numbers[target] = number_of(tag, values)
        elif name in micro.lengths and values.ndim > 1:
            flat, offsets = unpadded(values, micro.lengths[name], micro.side(name))
            found.tensors[target] = (tag, flat.shape, flat, offsets)
        else:
            found.tensors[target] = (tag, values.shape, values, None)


def _source(batch: Batch) -> dict[str, object]:
    return {name: value for name, value in batch.source.items() if name != "files"}


def _text(batch: Batch, name: str) -> str | None:
    value = batch.source.get(name)
    return value if isinstance(value, str) else None


FORMAT: Final = Format(
    KIND,
    "a batch (stagescope batch --output FILE)",
    lambda found: any(map(_is_batch, found)),
    open_batch,
)
