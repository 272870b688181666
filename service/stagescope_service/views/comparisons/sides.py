"""The sides of a comparison: payload files of runs, or directories of dumps."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope_service.compare.causes import BROKE_OFF
from stagescope_service.core.completeness import PARTIAL
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.listing import FileDump, entry_order, files_of
from stagescope_service.dumps.formats.own import open_files
from stagescope_service.dumps.importing import KEY_PREFIX
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, DumpProblem, Location
from stagescope_service.store.artifacts import confine
from stagescope_service.store.tables import ArtifactRow
from stagescope_service.store.tables.training import ENDED
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.kept import KEEP_ADVICE, local_file, payload_artifacts
from stagescope_service.views.models.bodies import DirectoryFields
from stagescope_service.views.reading.completeness import ALL_ROWS
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_wire import schema
from stagescope_wire.errors import Forbidden, InvalidInput, NotFound, StagescopeError
from stagescope_wire.keep import sections_of
from stagescope_wire.render import counted
from stagescope_wire.schema import Part

MAX_STEPS: Final = 50
"""Steps that are compared where a comparison names none: the newest that all of its runs hold."""

Logged = tuple[tuple[str, float], ...]
"""Names and values of scalars; hashable."""


@dataclasses.dataclass(frozen=True)
class ComparedSide:
    """One side of a comparison: an attempt of a run, or a directory or file.

    Attributes:
        name: shown to the user.
        target: None for a directory.
        steps: of the run, newest first, whose payloads are kept (of an import all that it holds);
            empty for a directory.
        names_step: whether the request names the step.
        path: the directory or file.
        files: rows of the catalogue's artifacts of these steps, each with its step.
        logged: the scalars of these steps by location. They are in no file, and a stage that
            recorded no tensor has no file at all.
        left_out: text about the steps of the attempt that are not compared; "" where all are, or
            the request names one.
    """

    name: str
    target: Target | None = None
    steps: tuple[int, ...] = ()
    names_step: bool = False
    path: Path | None = None
    files: tuple[tuple[int, ArtifactRow], ...] = ()
    logged: tuple[tuple[Location, Logged], ...] = ()
    left_out: str = ""

    @property
    def is_imported(self) -> bool:
        """Whether it is an attempt made of a directory, which may hold nothing but scalars."""
        return self.target is not None and self.target.attempt["key"].startswith(KEY_PREFIX)

    def version(self) -> str:
        """Return a hash of the side's files; it changes when they do."""
        if self.path is not None:
            files, _ = files_of(self.path)
            lines = [f"{each.name} {each.bytes} {_modified(each.path)}" for each in files]
        else:
            lines = [f"{row['artifact_id']} {row['bytes']} {row['wall']}" for _, row in self.files]
            lines += [repr(each) for each in self.logged]
        text = "\n".join([self.name, self.left_out, *sorted(lines)])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def find_sides(
    deps: Dependencies, requested: Sequence[str | DirectoryFields]
) -> list[ComparedSide]:
    """Return the sides of a comparison; runs that name no step get the steps that all hold.

    Args:
        deps: the catalogue and the roots.
        requested: `run[@attempt][:step]`, or a directory or file in the service's roots.

    Raises:
        NotFound: no such run, attempt or step, or nothing of it is kept.
        Forbidden: a directory outside the roots.
        InvalidInput: a text that cannot be parsed, or a path that the filesystem refuses.
    """
    sides = [
        _find_run(deps, each) if isinstance(each, str) else _find_directory(deps, each.directory)
        for each in requested
    ]
    open_steps = [set(side.steps) for side in sides if side.target and not side.names_step]
    named = {side.steps[0] for side in sides if side.names_step}
    if not open_steps:
        return [_with_files(deps, side) for side in sides]
    common = set.intersection(*open_steps)
    if named:
        common &= named
    if not common:
        raise NotFound(
            "the runs have kept no step in common: "
            + "; ".join(
                f"{side.name} holds {_listed(side.steps)}" for side in sides if side.target
            ),
            advice=f"name a step of each: RUN@ATTEMPT:STEP; {KEEP_ADVICE}",
        )
    newest = tuple(sorted(common, reverse=True)[:MAX_STEPS])
    complete: list[ComparedSide] = []
    for side in sides:
        if side.target is not None and not side.names_step:
            left_out = "" if named else _left_out(deps, side.target, len(newest), len(common))
            name = f"{side.name}:{newest[0]}" if len(newest) == 1 else side.name
            side = dataclasses.replace(side, steps=newest, name=name, left_out=left_out)
        complete.append(_with_files(deps, side))
    return complete


def open_side(deps: Dependencies, side: ComparedSide, copies: Path) -> Dump:
    """Return a side's dump; files of other nodes are fetched to the caller's directory `copies`."""
    if side.path is not None:
        return open_dump(side.path)
    assert side.target is not None
    files: dict[str, list[tuple[Path, Location]]] = {"kept": [], "ring": []}
    problems: list[DumpProblem] = []
    for step, row in side.files:
        try:
            path = local_file(deps, row, copies)
        except StagescopeError as error:
            problems.append(DumpProblem(Path(row["path"]), "missing", str(error)))
            continue
        location = Location(step, row["stage"], row["role"], row["rank"])
        files[row["kind"]].append((path, location))
    if side.left_out:
        problems.append(DumpProblem(Path(side.name), "gap", side.left_out))
    dump = _with_logged(_kept_and_ring(side.name, files), side)
    attempts = {"attempts": [f"{side.target.run}@{side.target.attempt['key']}"]}
    about = {**attempts, **dump.about, **_noise_floor(deps, side), **_broke_off(side)}
    return dataclasses.replace(dump, about=about, problems=[*dump.problems, *problems])


def _find_directory(deps: Dependencies, directory: str) -> ComparedSide:
    try:
        path = confine(directory, deps.settings.roots)
    except Forbidden as error:
        raise Forbidden(
            error.wrong,
            expected=error.expected,
            advice="`stagescope import DIRECTORY --run NAME` makes a run of it, which can be "
            "compared; or add a root to the service's allowed_roots",
        ) from error
    try:
        path.exists()
    except OSError as error:  # such as a name that is too long for the filesystem
        raise InvalidInput(
            f"path {str(path)!r:.200} cannot be used: {error.strerror}",
            expected="a directory, or a file, that the service can open",
        ) from error
    return ComparedSide(str(path), path=path)


def _find_run(deps: Dependencies, text: str) -> ComparedSide:
    requested = schema.read_target(text)
    if requested.step is not None:
        target = deps.finder.step(requested.run, requested.attempt, requested.step)
        name = str(schema.Target(target.run, target.number, requested.step))
        return ComparedSide(name, target, (requested.step,), names_step=True)
    target = deps.finder.attempt(requested.run, requested.attempt)
    side = ComparedSide(str(schema.Target(target.run, target.number)), target)
    steps = deps.catalogue.kept_steps(target.attempt_id)
    if side.is_imported:
        rows = deps.catalogue.steps(target.attempt_id, limit=ALL_ROWS)
        steps = sorted({*steps, *(row["step"] for row in rows)}, reverse=True)
    if not steps:
        raise NotFound(
            f"nothing of attempt {target.number} of {target.run} is kept", advice=KEEP_ADVICE
        )
    return dataclasses.replace(side, steps=tuple(steps))


def _left_out(deps: Dependencies, target: Target, compared: int, common: int) -> str:
    """Return how many steps of an attempt are not compared, and where their numbers are."""
    count = len(deps.catalogue.steps(target.attempt_id, limit=ALL_ROWS))
    if compared >= count:
        return ""
    newest = f", the newest {compared} of these {common}" if compared < common else ""
    return (
        f"{compared} of {counted(count, 'step')} are compared: those that every side still keeps"
        f"{newest}; what was logged in the others is not (stagescope series shows it)"
    )


def _with_files(deps: Dependencies, side: ComparedSide) -> ComparedSide:
    """Return the side with the files and scalars of its steps.

    Raises:
        NotFound: nothing of a named step is kept.
    """
    if side.target is None:
        return side
    files = [
        (step, row)
        for step in sorted(side.steps)
        for row in payload_artifacts(deps, side.target, step)
    ]
    logged = [each for step in side.steps for each in _logged(deps, side.target, step)]
    if not files and not (side.is_imported and logged):
        raise NotFound(f"no tensors of {side.name} are kept", advice=KEEP_ADVICE)
    return dataclasses.replace(side, files=tuple(files), logged=tuple(logged))


def _logged(deps: Dependencies, target: Target, step: int) -> list[tuple[Location, Logged]]:
    """Return the scalars of each part of a stage on each rank in a step."""
    by_location: dict[Location, dict[str, float]] = {}
    rows = deps.catalogue.scalars(target.attempt_id, step, limit=ALL_ROWS)
    for row in sorted(rows, key=lambda row: row["wall"]):
        if row["stage"] is not None:
            part = Part.of_columns(row)
            location = Location(step, row["stage"], row["role"], row["rank"], part)
            by_location.setdefault(location, {})[row["name"]] = row["value"]
    return [(location, tuple(scalars.items())) for location, scalars in by_location.items()]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _kept_and_ring(name: str, files: Mapping[str, Sequence[tuple[Path, Location]]]) -> FileDump:
    """Return a dump of the kept files, completed by entries of the ring's files."""
    kept, ring = (open_files(name, files[kind]) for kind in ("kept", "ring"))
    in_kept = {(entry.section, entry.location) for entry in kept.entries}
    missing = [entry for entry in ring.entries if (entry.section, entry.location) not in in_kept]
    return dataclasses.replace(
        kept,
        entries=[*kept.entries, *missing],
        problems=[*kept.problems, *ring.problems],
        about={**ring.about, **kept.about},
    )


def _with_logged(dump: FileDump, side: ComparedSide) -> FileDump:
    """Return a dump with entries for the scalars that its files do not hold."""
    in_files = {(entry.section, entry.location) for entry in dump.entries}
    scalars: dict[DumpEntry, dict[str, float]] = {}
    for location, logged in side.logged:
        values = dict(logged)
        for section, names in sections_of(location.stage, (), values).items():
            if (section, location) not in in_files:
                path = Path(f"{section} logged in {location}")
                entry = DumpEntry(section, location, path, 0, section)
                scalars[entry] = {name: values[name] for name in names}
    entries = sorted([*dump.entries, *scalars], key=entry_order)
    reader = functools.partial(_read, dump.reader, scalars)
    return dataclasses.replace(dump, entries=entries, reader=reader)


def _read(
    reader: Callable[[DumpEntry], DumpContents],
    scalars: Mapping[DumpEntry, Mapping[str, float]],
    entry: DumpEntry,
) -> DumpContents:
    values = scalars.get(entry)
    return reader(entry) if values is None else DumpContents(entry, numbers=values)


def _noise_floor(deps: Dependencies, side: ComparedSide) -> JsonObject:
    """Return the mismatch of the trainer with itself, where the side is one measured step."""
    if side.target is None or side.target.step is None:
        return {}
    try:
        measured = deps.step_summaries.measure(side.target.attempt_id, side.target.step)
    except NotFound:
        return {}
    floor = measured.noise_floor
    if floor is None:
        return {}
    return {"noise_floor": {n: floor[f"logprob_abs_diff/{n}"] for n in ("mean", "max")}}


def _broke_off(side: ComparedSide) -> JsonObject:
    """Return where the attempt ended, if it ended inside the step that the side is."""
    if side.target is None or side.target.step is None:
        return {}
    attempt, step = side.target.attempt, side.target.step
    if (step["close_reason"], step["completeness"]) != (ENDED, PARTIAL):
        return {}
    text = f"attempt {attempt['number']} ended inside step {step['step']}"
    if attempt["end_reason"] is not None:
        text += f" ({attempt['end_reason']})"
    stages = dict.fromkeys(each["stage"] for each in step["missing"] or ())
    return {BROKE_OFF: f"{text}; not finished: {', '.join(stages)}" if stages else text}


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(steps)[-8:]))
    return f"{counted(len(steps), 'step')} ({shown})" if steps else "none"
