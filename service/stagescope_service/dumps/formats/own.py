"""This project's own files: what captures, configuration and the ring kept of payloads.

`{run}/{attempt key}/step_N/{stage}[/part]/{role}_rank{r}_{identity}_{seq}.safetensors`, one file a
payload, or the files that the catalogue lists. Each section of a file is an entry: those that the
file names (`store.kept`), or those of its stage (`stagescope.wire.keep`); masks are in each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import InvalidInput, NotFound, StagescopeError
from stagescope.wire.schema import Part
from stagescope_service.dumps.formats.listing import (
    FileDump,
    Found,
    entry_order,
    files_of,
    missing_places,
    unknown,
)
from stagescope_service.dumps.formats.msprobe_directory import operator_files
from stagescope_service.dumps.formats.own_file import (
    ROW_OFFSETS,
    completed,
    mapping,
    read_section,
    sections_in,
)
from stagescope_service.dumps.records import Entry, Place, Problem
from stagescope_service.store.tensorfile import describe_file

KIND: Final = "own"

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
            problems.append(Problem.of(path, error, Entry("other", place, path)))
            continue
        job = mapping(description.metadata, "job")
        if job.get("run") is not None:
            attempts[f"{job['run']}@{job.get('attempt_key')}"] = None
        place = completed(place, job)
        settings = settings or mapping(job, "settings")
        shapes = (name for name in description.shapes if not name.endswith(ROW_OFFSETS))
        for section in sections_in(description.metadata, shapes):
            entry = Entry(section, place, path, path.stat().st_size, section)
            older = entries.get((section, place))
            if older is not None:
                problems.append(_superseded(older, entry))
            entries[section, place] = entry
    said = {"attempts": [*attempts], "settings": dict(settings)}
    about = {name: value for name, value in said.items() if value}
    found = sorted(entries.values(), key=entry_order)
    return FileDump(name, KIND, found, problems, read_section, about)


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


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


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
