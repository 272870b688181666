"""This project's own files: what captures, configuration and the ring kept of payloads.

`{run}/{attempt key}/step_N/{stage}[/part]/{role}_rank{r}_{identity}_{seq}.safetensors`, one file a
payload, or the files that the catalogue lists. Each section of a file is an entry: those that the
file names (`store.kept`), or those of its stage (`stagescope.keeping`); masks are in each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from stagescope import nonfinite
from stagescope.errors import InvalidInput, NotFound, StagescopeError
from stagescope.keeping import family, sections_of
from stagescope.schema import PART_FIELDS, Part
from stagescope_service.dumps.formats.columns import Columns, number_of, unique_samples
from stagescope_service.dumps.formats.listing import (
    FileDump,
    Found,
    entry_order,
    files_of,
    missing_places,
    unknown,
)
from stagescope_service.dumps.formats.msprobe_directory import operator_files
from stagescope_service.dumps.records import SECTIONS, Entry, Place, Problem, Record
from stagescope_service.store.tensorfile import (
    WireTensor,
    describe_file,
    map_tensors,
)

KIND: Final = "own"

_RENAMED: Final = {"ref_log_prob": "ref_log_probs"}
_MASKS: Final = ("response_mask", "loss_mask")
_OF_ROWS: Final = (
    "trajectories", "batch_inputs", "old_log_probs", "forward_data", "advantages", "is_loss",
    "other",
)  # fmt: skip
_FAMILIES: Final = ("parameter/*", "gradient/*", "datums/*")
_IDS: Final = ("sample_ids", "group_ids")
_CU_SEQLENS: Final = "cu_seqlens"
_OFFSETS: Final = ".row_offsets"
_FILE: Final = re.compile(r"(.{1,150})_rank(\d{1,9})_[0-9a-f]{12}_\d+\Z")
_STEP: Final = re.compile(r"step_(\d{1,18}|unknown)\Z")
_PART: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\Z")


def is_own(name: str) -> bool:
    """Say whether a file's name is one of ours."""
    return name.endswith(".safetensors") and _FILE.match(Path(name).stem) is not None


def holds_own(found: Sequence[Found]) -> bool:
    """Say whether any of the files is one of ours."""
    return any(is_own(each.name) for each in found)


def open_own(path: Path, *, step: int | None = None) -> FileDump:
    """List a directory of kept files, at any height from a stage's to a run's; reads headers only.

    Args:
        path: the directory, or one file.
        step: only this step.

    Raises:
        NotFound: no such directory, or no kept file in it.
        InvalidInput: it holds several runs or attempts.
        TooLarge: more files than a dump has.
        StoreError: the disk refused.
    """
    found, problems = files_of(path)
    ours = [each for each in found if is_own(each.name)]
    known = {each.name for each in ours} | operator_files(each.name for each in found)
    problems += [unknown(each, "this project's dumps") for each in found if each.name not in known]
    if not ours:
        raise NotFound(f"{path} holds no kept tensors", expected="*.safetensors of a run's steps")
    places = ((each.path, place_in(each.path)) for each in ours)
    dump = open_files(str(path), [each for each in places if step in (None, each[1].step)])
    attempts = dump.about.get("attempts", [])
    if len(attempts) > 1:
        raise InvalidInput(
            f"{path} holds {len(attempts)} attempts: {', '.join(attempts[:5])}",
            expected="the directory of one attempt",
        )
    problems += [*dump.problems, *_missing(dump.entries)]
    return dataclasses.replace(dump, problems=problems)


def open_files(name: str, files: Iterable[tuple[Path, Place]]) -> FileDump:
    """Make a dump of files that are known, as the catalogue lists them; reads headers only.

    Args:
        name: of the dump, such as `run@attempt:step`.
        files: each with its place; what a file itself says of its place fills what is unknown.
            Of two files of one place the later written is read.
    """
    entries: dict[tuple[str, Place], Entry] = {}
    problems: list[Problem] = []
    attempts: dict[str, None] = {}
    settings: Mapping[str, Any] = {}
    for path, place in sorted(files, key=lambda file: _written(file[0])):
        try:
            description = describe_file(path)
        except StagescopeError as error:
            problems.append(_problem(path, place, error))
            continue
        job = _mapping(description.metadata, "job")
        if job.get("run") is not None:
            attempts[f"{job['run']}@{job.get('attempt_key')}"] = None
        place = _completed(place, job)
        settings = settings or _mapping(job, "settings")
        shapes = (name for name in description.shapes if not name.endswith(_OFFSETS))
        for section in _sections(description.metadata, shapes):
            entry = Entry(section, place, path, path.stat().st_size, section)
            older = entries.get((section, place))
            if older is not None:
                problems.append(_superseded(older, entry))
            entries[section, place] = entry
    said = {"attempts": [*attempts], "settings": dict(settings)}
    about = {name: value for name, value in said.items() if value}
    found = sorted(entries.values(), key=entry_order)
    return FileDump(name, KIND, found, problems, read_entry, about)


def place_in(path: Path) -> Place:
    """Return what the path of a kept file says of its place; see `store.artifacts`."""
    match = _FILE.match(path.stem)
    role, rank = (match[1], int(match[2])) if match else (None, None)
    step, stage, part = None, None, Part()
    names = path.parts[:-1]
    for at, name in enumerate(names):
        if found := _STEP.match(name):
            step = None if found[1] == "unknown" else int(found[1])
            stage = names[at + 1] if at + 1 < len(names) else None
    if names and (numbers := _PART.match(names[-1])):
        part = Part(*map(int, numbers.groups()))
    return Place(step, stage, role, rank, part)


def read_entry(entry: Entry) -> Record:
    """Read one section of one file; see `records.Dump.read`."""
    file = map_tensors(entry.path)
    tensors, metadata = _packed(file.tensors), file.metadata
    sections = _sections(metadata, tensors)
    names = sections.get(entry.section, [])
    scalars = _mapping(metadata, "scalars")
    found = Columns(about=_about(metadata))
    for name in names:
        if name in scalars:
            found.numbers[name] = nonfinite.number(scalars[name])
        elif name in tensors and tensors[name][1] == ():
            found.numbers[_name(name)] = number_of(tensors[name][0], tensors[name][2])
        elif name in tensors:
            found.tensors[_name(name)] = tensors[name]
    samples, groups = None, None
    if entry.section in _OF_ROWS:
        samples, groups = _ids(metadata, found)
    masks = ("effective_valid", *_MASKS) if entry.section == "is_loss" else _MASKS
    mask = next((each for each in masks if each in found.tensors), None)
    return Record(
        entry, found.tensors, found.numbers, samples, groups,
        _texts(metadata, entry.section, sections), mask, found.remarks(),
    )  # fmt: skip


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _mapping(metadata: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = metadata.get(name)
    return found if isinstance(found, dict) else {}


def _completed(place: Place, job: Mapping[str, Any]) -> Place:
    """Fill what is unknown of a place by what the file says."""

    def said(name: str, kind: type) -> Any:
        value = job.get(name)
        return value if type(value) is kind else None

    numbers = [job.get(name) or 0 for name in PART_FIELDS]
    whole = all(type(number) is int and number >= 0 for number in numbers)
    return Place(
        step=said("step", int) if place.step is None else place.step,
        stage=place.stage or said("stage", str),
        role=place.role or said("role", str),
        rank=said("rank", int) if place.rank is None else place.rank,
        part=Part(*numbers) if place.part == Part() and whole else place.part,
    )


def _sections(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """Return section -> names of tensors and numbers, as the file says it, else by its stage."""
    said = metadata.get("sections")
    if isinstance(said, dict) and all(isinstance(held, list) for held in said.values()):
        return {str(n): [*map(str, held)] for n, held in said.items() if n in SECTIONS}
    stage = _mapping(metadata, "job").get("stage")
    return sections_of(stage, names, _mapping(metadata, "scalars"))


def _about(metadata: Mapping[str, Any]) -> dict[str, Any]:
    meta, job = dict(_mapping(metadata, "meta")), dict(_mapping(metadata, "job"))
    shards = {
        _name(name): {"global_shape": place.get("shape"), "offset": place.get("offset")}
        for name, place in _mapping(meta, "shards").items()
        if isinstance(place, dict)
    }
    said = {"meta": meta, "job": job, "shards": shards}
    return {name: value for name, value in said.items() if value}


def _packed(tensors: Mapping[str, WireTensor]) -> dict[str, WireTensor]:
    """Give the tensors of a packed payload the row offsets that `cu_seqlens` tells."""
    found = dict(tensors)
    offsets = found.pop(_CU_SEQLENS, None)
    if offsets is None or offsets[2].size == 0:
        return found
    rows = offsets[2].reshape(-1).astype(np.int64)
    for name, (tag, shape, values, own) in found.items():
        if own is None and shape == (int(rows[-1]),):
            found[name] = (tag, shape, values, rows)
    return found


def _name(name: str) -> str:
    """Return the name in the record: of a parameter its own, `#n` from the second update on."""
    first, slash, rest = name.partition("/")
    if not slash or family(name) not in _FAMILIES:
        return _RENAMED.get(name, name)
    if first == "datums":
        return rest.replace(".", "/")
    number = first.partition(".")[2]
    return f"{rest}#{number}" if number else rest


def _ids(
    metadata: Mapping[str, Any], found: Columns
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    ids, groups = (_mapping(metadata, "strings").get(name) for name in _IDS)
    samples = unique_samples(list(map(str, ids)), found) if isinstance(ids, list) else None
    return samples, tuple(map(str, groups)) if isinstance(groups, list) else None


def _texts(
    metadata: Mapping[str, Any], section: str, sections: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the texts of rows: datums have theirs, the first section of rows all others."""
    first = next((each for each in sections if each in _OF_ROWS), None)
    found: dict[str, tuple[str, ...]] = {}
    for name, texts in _mapping(metadata, "strings").items():
        of_datums = name.startswith("datums/")
        mine = section == "datums" if of_datums else section == first
        if mine and name not in _IDS and isinstance(texts, list):
            found[_name(name)] = tuple(map(str, texts))
    return found


def _problem(path: Path, place: Place, error: StagescopeError) -> Problem:
    kind = "missing" if isinstance(error, NotFound) else "damaged"
    return Problem(path, kind, str(error), Entry("other", place, path))


def _superseded(older: Entry, newer: Entry) -> Problem:
    return Problem(
        older.path,
        "superseded",
        f"{older.path.name} and {newer.path.name} are both of {newer.place}: the later written, "
        f"{newer.path.name}, is read",
        older,
    )


def _missing(entries: Iterable[Entry]) -> list[Problem]:
    kinds: dict[tuple[Any, ...], dict[str, dict[tuple[int, Part], Entry]]] = {}
    for entry in entries:
        place = entry.place
        if place.rank is not None:
            work = (place.step, place.stage, place.role)
            of_section = kinds.setdefault(work, {}).setdefault(entry.section, {})
            of_section[place.rank, place.part] = entry
    problems: list[Problem] = []
    for sections in kinds.values():
        seen = {section: set(places) for section, places in sections.items()}
        for section, (rank, part) in missing_places(seen):
            like = next(iter(sections[section].values()))
            place = like.place._replace(rank=rank, part=part)
            path = like.path.with_name(f"{place.role}_rank{rank}")
            entry = Entry(section, place, path, 0, section)
            problems.append(Problem(path, "missing", f"{place} has no {section} here", entry))
    return problems
