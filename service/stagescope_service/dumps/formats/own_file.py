"""Reading this project's own files: a section of one, a payload, or payload files as a dump.

`store.kept` documents the metadata; files of the ring have no `sections` and are read the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stagescope_service.dumps.formats.columns import Columns, unique_samples
from stagescope_service.dumps.formats.listing import FileDump, entry_order
from stagescope_service.dumps.formats.odd_values import number_of
from stagescope_service.dumps.records import (
    SECTIONS,
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
    mapping,
)
from stagescope_service.rows.ragged import unpack
from stagescope_service.store.tensorfile import describe_file, disk_errors, map_tensors
from stagescope_wire import nonfinite
from stagescope_wire.errors import InvalidTensor, StagescopeError
from stagescope_wire.keep import family, sections_of
from stagescope_wire.schema import PART_FIELDS, Part
from stagescope_wire.tensors import ROUTING_FLIPS, ROUTING_TENSORS

KIND: Final = "own"
ROW_OFFSETS: Final = ".row_offsets"

_RENAMED: Final = {"ref_log_prob": "ref_log_probs"}
_MASKS: Final = ("response_mask", "loss_mask")
ROW_SECTIONS: Final = (
    "trajectories", "batch_inputs", "old_log_probs", "forward_data", "advantages", "is_loss",
    "other",
)  # fmt: skip
_FAMILIES: Final = ("parameter/*", "gradient/*", "datums/*")
_OF_NO_ROW: Final = frozenset(ROUTING_TENSORS) - {ROUTING_FLIPS}
"""Tensors of a payload that hold nothing of its rows."""
_IDS: Final = ("sample_ids", "group_ids")


def read_section(entry: DumpEntry) -> DumpContents:
    """Read one section of one file; see `records.Dump.read`."""
    file = map_tensors(entry.path)
    tensors, metadata = unpack(file.tensors), file.metadata
    sections = sections_in(metadata, tensors)
    names = sections.get(entry.section, [])
    scalars = mapping(metadata, "scalars")
    found = Columns(about=_about(metadata))
    for name in names:
        if name in scalars:
            found.numbers[name] = nonfinite.number(scalars[name])
        elif name in tensors and tensors[name][1] == ():
            found.numbers[name_in_record(name)] = number_of(tensors[name][0], tensors[name][2])
        elif name in tensors:
            found.tensors[name_in_record(name)] = tensors[name]
    samples, groups = None, None
    if entry.section in ROW_SECTIONS:
        samples, groups = _ids(metadata, found)
    found.texts = _texts(metadata, entry.section, sections)
    return found.contents(entry, samples=samples, groups=groups, masks=masks_of(entry.section))


def holds_sample(path: Path, sample_uid: str) -> bool:
    """Return whether a file has a row of this sample; reads only its header.

    Return True for a file that cannot be read: reading it later shows the error.
    """
    try:
        ids = _strings(describe_file(path).metadata).get("sample_ids", ())
    except StagescopeError:
        return True
    return sample_uid in ids


def place_of_job(job: object) -> Location:
    """Return the place in the `job` metadata of a file.

    Raises:
        InvalidTensor: the metadata are missing, or of other types.
    """
    if not isinstance(job, Mapping):
        raise InvalidTensor("its metadata has no job, so its step, stage and rank are unknown")
    counts = [job.get(name) or 0 for name in PART_FIELDS]
    numbers = [job.get(name) for name in ("step", "rank", "data_rank", "attempt_id", "seq")]
    texts = [job.get(name) for name in ("stage", "role", "incarnation")]
    are_numbers = all(type(number) in (int, type(None)) for number in (*counts, *numbers))
    are_texts = all(isinstance(text, str | None) for text in texts)
    if not are_numbers or not are_texts or min(counts) < 0:
        raise InvalidTensor(f"its job is {str(dict(job))[:200]}", expected="names and ints")
    return Location(numbers[0], texts[0], texts[1], numbers[1], Part(*counts))


def complete_place(location: Location, job: object) -> Location:
    """Fill the unknown fields of a place from the `job` metadata of its file, if they are whole."""
    try:
        other = place_of_job(job)
    except InvalidTensor:
        return location
    return Location(
        step=other.step if location.step is None else location.step,
        stage=location.stage or other.stage,
        role=location.role or other.role,
        rank=other.rank if location.rank is None else location.rank,
        part=other.part if location.part == Part() else location.part,
    )


def sections_in(metadata: Mapping[str, object], names: Iterable[str]) -> dict[str, list[str]]:
    """Return section -> names of tensors and numbers, as the file or else its stage lists them."""
    listed = metadata.get("sections")
    if isinstance(listed, dict) and all(isinstance(group, list) for group in listed.values()):
        return {str(n): [*map(str, group)] for n, group in listed.items() if n in SECTIONS}
    stage = mapping(metadata, "job").get("stage")
    scalars = mapping(metadata, "scalars")
    return sections_of(stage if isinstance(stage, str) else None, names, scalars)


def _about(metadata: Mapping[str, object]) -> dict[str, object]:
    meta, job = dict(mapping(metadata, "meta")), dict(mapping(metadata, "job"))
    shards = {
        name_in_record(name): {"global_shape": shard.get("shape"), "offset": shard.get("offset")}
        for name, shard in mapping(meta, "shards").items()
        if isinstance(shard, dict)
    }
    about = {"meta": meta, "job": job, "shards": shards}
    return {name: value for name, value in about.items() if value}


def masks_of(section: str) -> tuple[str, ...]:
    """Return the names that the mask of a section may have, the first that exists counts."""
    return ("effective_valid", *_MASKS) if section == "is_loss" else _MASKS


def name_in_record(name: str) -> str:
    """Return the name in the record: a parameter's own, with `#n` from the second update on."""
    first, slash, rest = name.partition("/")
    if not slash or family(name) not in _FAMILIES:
        return _RENAMED.get(name, name)
    if first == "datums":
        return rest.replace(".", "/")
    number = first.partition(".")[2]
    return f"{rest}#{number}" if number else rest


def _ids(
    metadata: Mapping[str, object], found: Columns
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    ids, groups = (_strings(metadata).get(name) for name in _IDS)
    return None if ids is None else unique_samples(ids, found), groups


def _texts(
    metadata: Mapping[str, object], section: str, sections: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return a section's row texts: datums have theirs, the first row section has all others."""
    first = next((each for each in sections if each in ROW_SECTIONS), None)
    found: dict[str, tuple[str, ...]] = {}
    for name, texts in _strings(metadata).items():
        is_of_datums = name.startswith("datums/")
        is_in_section = section == "datums" if is_of_datums else section == first
        if is_in_section and name not in _IDS:
            found[name_in_record(name)] = texts
    return found


def _strings(metadata: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    return {
        str(name): tuple(map(str, texts))
        for name, texts in mapping(metadata, "strings").items()
        if isinstance(texts, list)
    }


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
    """The step that consumed some of the samples, for a rollout without a step."""


def open_payloads(files: Iterable[PayloadFile], name: str) -> FileDump:
    """Make a dump of files of any steps: one entry a file, with its tensors as they were recorded.

    `about` of an entry holds the metadata `meta`, `job` and `settings`, and the catalogue's.
    """
    by_path = {file.path: file for file in files}
    entries: list[DumpEntry] = []
    problems: list[DumpProblem] = []
    for path, file in by_path.items():
        try:
            with disk_errors(path):
                size = path.stat().st_size
            location = place_of_job(describe_file(path).metadata.get("job"))
        except StagescopeError as error:
            problems.append(DumpProblem(path, "damaged", str(error)))
            continue
        if file.consumed_step is not None:
            location = location._replace(step=file.consumed_step)
        entries.append(DumpEntry("other", location, path, size, key=str(path)))
    read = functools.partial(_read_payload, by_path)
    return FileDump(name, KIND, sorted(entries, key=entry_order), problems, read)


def _read_payload(files: Mapping[Path, PayloadFile], entry: DumpEntry) -> DumpContents:
    file, payload = files[entry.path], map_tensors(entry.path)
    metadata, job = payload.metadata, mapping(payload.metadata, "job")
    strings = _strings(metadata)
    scalars = nonfinite.numbers(mapping(metadata, "scalars"))
    numbers = {name: v for name, v in scalars.items() if type(v) in (int, float)}
    return DumpContents(
        entry,
        {n: tensor for n, tensor in payload.tensors.items() if n not in _OF_NO_ROW},
        numbers={**numbers, **file.numbers},
        samples=strings.pop("sample_ids", None),
        groups=strings.pop("group_ids", None),
        row_texts=strings,
        mask="response_mask" if "response_mask" in payload.tensors else None,
        about={
            "meta": mapping(metadata, "meta"),
            "settings": mapping(metadata, "settings") or mapping(job, "settings"),
            "job": job,
            # In a ring's file: the tensors that the service added from the rollout's payload.
            "joined_tensors": metadata.get("joined_tensors") or [],
            "wall": file.wall or entry.path.stat().st_mtime,
            "path": file.original_path or str(entry.path),
            "checksum": file.checksum,
            "is_consumed": file.consumed_step is not None,
        },
    )
