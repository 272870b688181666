"""This project's own files: payloads that captures, the configuration or the ring kept.

`{run}/{attempt key}/step_N/{stage}[/part]/{role}_rank{r}_{identity}_{seq}.safetensors` (one file
per payload), or the files that the catalogue lists. Each section of a file is an entry. The file
lists its sections (`store.kept`), else its stage does (`stagescope_wire.keep`). Each has the masks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from stagescope_service.dumps.formats.listing import (
    FileDump,
    Format,
    entry_order,
    files_of,
    missing_parts,
    modified_at,
    unknown_file,
)
from stagescope_service.dumps.formats.msprobe_directory import (
    find_places,
    operator_files,
    rank_directories,
)
from stagescope_service.dumps.formats.own_file import KIND as KIND
from stagescope_service.dumps.formats.own_file import (
    ROW_OFFSETS,
    complete_place,
    read_section,
    sections_in,
)
from stagescope_service.dumps.records import DumpEntry, DumpProblem, Location, mapping
from stagescope_service.store.tensorfile import describe_file
from stagescope_wire.errors import InvalidInput, NotFound, StagescopeError
from stagescope_wire.schema import Part

_FILE: Final = re.compile(r"(.{1,150})_rank(\d{1,9})_[0-9a-f]{12}_\d+\Z")
_STEP: Final = re.compile(r"step_(\d{1,18}|unknown)\Z")
_PART: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\Z")

_WorkKey: TypeAlias = "tuple[int | None, str | None, str | None]"
"""(step, stage, role)"""


def _is_own(name: str) -> bool:
    return name.endswith(".safetensors") and _FILE.match(Path(name).stem) is not None


def open_own(path: Path, step: int | None) -> FileDump:
    """List kept files below a directory, from a stage's to a run's; reads headers only."""
    found, problems = files_of(path)
    kept = [each for each in found if _is_own(each.name)]
    recognized = {each.name for each in kept} | operator_files(each.name for each in found)
    problems += [
        unknown_file(each, "this project's dumps") for each in found if each.name not in recognized
    ]
    if not kept:
        raise NotFound(f"{path} holds no kept tensors", expected="*.safetensors of a run's steps")
    files = ((each.path, place_of_path(each.path)) for each in kept)
    dump = open_files(str(path), [each for each in files if step in (None, each[1].step)])
    attempts = dump.about.get("attempts")
    if isinstance(attempts, list) and len(attempts) > 1:
        raise InvalidInput(
            f"{path} holds {len(attempts)} attempts: {', '.join(attempts[:5])}",
            expected="the directory of one attempt",
        )
    places = find_places(path, (path / each for each in rank_directories(e.name for e in found)))
    problems += [*dump.problems, *places.problems, *_missing_entries(dump.entries)]
    ranks = [each for each in places.ranks if step in (None, each.location.step)]
    return dataclasses.replace(dump, problems=problems, ranks=ranks)


def open_files(name: str, files: Iterable[tuple[Path, Location]]) -> FileDump:
    """Make a dump of given files, as the catalogue lists them; reads headers only.

    Args:
        name: of the dump, such as `run@attempt:step`.
        files: each with its place; the file's metadata fills unknown fields of the place. If two
            files have one place, the later written is read.
    """
    entries: dict[tuple[str, Location], DumpEntry] = {}
    problems: list[DumpProblem] = []
    attempts: dict[str, None] = {}
    settings: Mapping[str, object] = {}
    for path, location in sorted(files, key=lambda file: modified_at(file[0])):
        try:
            description = describe_file(path)
        except StagescopeError as error:
            problems.append(DumpProblem.from_error(path, error, DumpEntry("other", location, path)))
            continue
        job = mapping(description.metadata, "job")
        if job.get("run") is not None:
            attempts[f"{job['run']}@{job.get('attempt_key')}"] = None
        location = complete_place(location, job)
        settings = settings or mapping(job, "settings")
        shapes = (name for name in description.shapes if not name.endswith(ROW_OFFSETS))
        for section in sections_in(description.metadata, shapes):
            entry = DumpEntry(section, location, path, path.stat().st_size, section)
            older = entries.get((section, location))
            if older is not None:
                problems.append(_superseded(older, entry))
            entries[section, location] = entry
    described = {"attempts": [*attempts], "settings": dict(settings)}
    about = {name: value for name, value in described.items() if value}
    found = sorted(entries.values(), key=entry_order)
    return FileDump(name, KIND, found, problems, read_section, about)


def place_of_path(path: Path) -> Location:
    """Return the place that the path of a kept file names; see `store.artifacts`."""
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
    return Location(step, stage, role, rank, part)


def _superseded(older: DumpEntry, newer: DumpEntry) -> DumpProblem:
    return DumpProblem(
        older.path,
        "superseded",
        f"{older.path.name} and {newer.path.name} are both of {newer.location}. The newer one, "
        f"{newer.path.name}, is read",
        older,
    )


def _missing_entries(entries: Iterable[DumpEntry]) -> list[DumpProblem]:
    works: dict[_WorkKey, dict[str, dict[tuple[int, Part], DumpEntry]]] = {}
    for entry in entries:
        location = entry.location
        if location.rank is not None:
            work = (location.step, location.stage, location.role)
            of_section = works.setdefault(work, {}).setdefault(entry.section, {})
            of_section[location.rank, location.part] = entry
    problems: list[DumpProblem] = []
    for sections in works.values():
        seen = {section: set(parts) for section, parts in sections.items()}
        for section, (rank, part) in missing_parts(seen):
            like = next(iter(sections[section].values()))
            location = like.location._replace(rank=rank, part=part)
            path = like.path.with_name(f"{like.location.role}_rank{rank}")
            entry = DumpEntry(section, location, path, 0, section)
            message = f"{entry.location} has no {section} here"
            problems.append(DumpProblem(path, "missing", message, entry))
    return problems


FORMAT: Final = Format(
    KIND,
    "stagescope's (step_N/STAGE/ROLE_rankR_*.safetensors)",
    lambda found: any(_is_own(each.name) for each in found),
    open_own,
)
