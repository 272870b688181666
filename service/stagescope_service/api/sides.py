"""What a comparison holds against each other: kept files of runs, or directories of dumps."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.render import counted
from stagescope.targets import Target as Asked
from stagescope.targets import read_target
from stagescope.wire.errors import Forbidden, InvalidInput, NotFound, StagescopeError
from stagescope.wire.keep import sections_of
from stagescope.wire.schema import PART_FIELDS, Part
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.dependencies import Dependencies, Row
from stagescope_service.api.payload_artifacts import KEEP_ADVICE, local_file, payload_artifacts
from stagescope_service.api.target import Target
from stagescope_service.compare.causes import BROKE_OFF
from stagescope_service.core.completeness import PARTIAL
from stagescope_service.core.steps import ENDED
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.listing import FileDump, entry_order, files_of
from stagescope_service.dumps.formats.own import open_files
from stagescope_service.dumps.importing import KEY_PREFIX
from stagescope_service.dumps.records import Dump, Entry, Place, Problem, Record
from stagescope_service.store.artifacts import confine

MOST_STEPS: Final = 50
"""Steps of a comparison that names none: the newest that all of its runs hold."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One side as it was asked for: an attempt of a run, or a directory or file.

    Attributes:
        name: for a reader.
        target: None of a directory.
        steps: of the run, newest first, of which payloads are kept, of an import all that it holds;
            of a directory none.
        is_chosen: whether the asker named the step.
        path: the directory or file.
        files: rows of the catalogue's artifacts of these steps, each with its step.
        logged: what stages logged in these steps, each with its place: numbers have no file of
            their own, and a stage that recorded no tensor has none at all.
        left_out: which steps of the attempt are not compared, in words; "" where all are, or the
            asker named one.
    """

    name: str
    target: Target | None = None
    steps: tuple[int, ...] = ()
    is_chosen: bool = False
    path: Path | None = None
    files: tuple[tuple[int, Row], ...] = ()
    logged: tuple[tuple[Place, tuple[tuple[str, float], ...]], ...] = ()
    left_out: str = ""

    @property
    def is_imported(self) -> bool:
        """Whether it is an attempt made of a directory, which may hold nothing but numbers."""
        return self.target is not None and self.target.attempt["key"].startswith(KEY_PREFIX)

    def mark(self) -> str:
        """Return what changes with the files: the same mark, the same answer."""
        if self.path is not None:
            found, _ = files_of(self.path)
            told = [f"{each.name} {each.bytes} {_written(each.path)}" for each in found]
        else:
            told = [f"{row['artifact_id']} {row['bytes']} {row['wall']}" for _, row in self.files]
            told += [repr(each) for each in self.logged]
        text = "\n".join([self.name, self.left_out, *sorted(told)])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def find_sides(deps: Dependencies, said: Sequence[Any]) -> list[Side]:
    """Return the sides of a comparison; runs that name no step get the steps that all hold.

    Args:
        desk: the collaborators.
        said: `run[@attempt][:step]`, or {"directory": path} in the service's roots, which may be
            a file, too.

    Raises:
        NotFound: no such run, attempt or step, or nothing of it is kept.
        Forbidden: a directory outside the roots.
        InvalidInput: neither, or a path that the filesystem does not take.
    """
    sides = [_find(deps, each) for each in said]
    free = [set(side.steps) for side in sides if side.target is not None and not side.is_chosen]
    chosen = {side.steps[0] for side in sides if side.is_chosen}
    if not free:
        return [_with_files(deps, side) for side in sides]
    common = set.intersection(*free)
    if chosen:
        common &= chosen
    if not common:
        raise NotFound(
            "the runs have kept no step in common: "
            + "; ".join(
                f"{side.name} holds {_listed(side.steps)}" for side in sides if side.target
            ),
            advice=f"name a step of each: RUN@ATTEMPT:STEP; {KEEP_ADVICE}",
        )
    newest = tuple(sorted(common, reverse=True)[:MOST_STEPS])
    found: list[Side] = []
    for side in sides:
        if side.target is not None and not side.is_chosen:
            left_out = "" if chosen else _left_out(deps, side.target, len(newest), len(common))
            side = dataclasses.replace(_of_steps(side, newest), left_out=left_out)
        found.append(_with_files(deps, side))
    return found


def open_side(deps: Dependencies, side: Side, copies: Path) -> Dump:
    """Return a side's dump; files of other nodes are copied to `copies`, which is the caller's."""
    if side.path is not None:
        return open_dump(side.path)
    assert side.target is not None
    files: dict[str, list[tuple[Path, Place]]] = {"kept": [], "ring": []}
    problems: list[Problem] = []
    for step, row in side.files:
        try:
            path = local_file(deps, row, copies)
        except StagescopeError as error:
            problems.append(Problem(Path(row["path"]), "missing", str(error)))
            continue
        files[row["kind"]].append((path, _place(row, step)))
    if side.left_out:
        problems.append(Problem(Path(side.name), "gap", side.left_out))
    dump = _with_logged(_both(side.name, files), side)
    whose = {"attempts": [f"{side.target.run}@{side.target.attempt['key']}"]}
    about = {**whose, **dump.about, **_noise_floor(deps, side), **_broke_off(side)}
    return dataclasses.replace(dump, about=about, problems=[*dump.problems, *problems])


def _find(deps: Dependencies, said: Any) -> Side:
    if isinstance(said, Mapping) and set(said) == {"directory"}:
        try:
            path = confine(str(said["directory"]), deps.settings.roots)
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
        return Side(str(path), path=path)
    asked = read_target(said)
    if asked.step is not None:
        target = deps.finder.step(asked.run, asked.attempt, asked.step)
        name = str(Asked(target.run, target.number, asked.step))
        return Side(name, target, (asked.step,), is_chosen=True)
    target = deps.finder.attempt(asked.run, asked.attempt)
    side = Side(str(Asked(target.run, target.number)), target)
    steps = deps.catalogue.kept_steps(target.attempt_id)
    if side.is_imported:
        held = deps.catalogue.steps(target.attempt_id, limit=ALL_ROWS)
        steps = sorted({*steps, *(int(row["step"]) for row in held)}, reverse=True)
    if not steps:
        raise NotFound(
            f"nothing of attempt {target.number} of {target.run} is kept", advice=KEEP_ADVICE
        )
    return dataclasses.replace(side, steps=tuple(steps))


def _left_out(deps: Dependencies, target: Target, compared: int, common: int) -> str:
    """Return which steps of an attempt are not compared, and where their numbers are."""
    held = len(deps.catalogue.steps(target.attempt_id, limit=ALL_ROWS))
    if compared >= held:
        return ""
    newest = f", the newest {compared} of these {common}" if compared < common else ""
    return (
        f"{compared} of {counted(held, 'step')} are compared: those that every side still keeps"
        f"{newest}; what was logged in the others is not (stagescope series shows it)"
    )


def _of_steps(side: Side, steps: tuple[int, ...]) -> Side:
    name = f"{side.name}:{steps[0]}" if len(steps) == 1 else side.name
    return dataclasses.replace(side, steps=steps, name=name)


def _with_files(deps: Dependencies, side: Side) -> Side:
    """Return the side with the files of its steps.

    Raises:
        NotFound: nothing of a step that was named is kept.
    """
    if side.target is None:
        return side
    found = [
        (step, row)
        for step in sorted(side.steps)
        for row in payload_artifacts(deps, side.target, step)
    ]
    logged = [each for step in side.steps for each in _logged(deps, side.target, step)]
    if not found and not (side.is_imported and logged):
        raise NotFound(f"no tensors of {side.name} are kept", advice=KEEP_ADVICE)
    return dataclasses.replace(side, files=tuple(found), logged=tuple(logged))


def _logged(
    deps: Dependencies, target: Target, step: int
) -> list[tuple[Place, tuple[tuple[str, float], ...]]]:
    """Return what each part of a stage of a rank logged in a step."""
    found: dict[Place, dict[str, float]] = {}
    rows = deps.catalogue.scalars(target.attempt_id, step, limit=ALL_ROWS)
    for row in sorted(rows, key=lambda row: row["wall"] or 0.0):
        if row["stage"] is not None:
            part = Part(*(row[name] or 0 for name in PART_FIELDS))
            place = Place(step, row["stage"], row["role"], row["rank"], part)
            found.setdefault(place, {})[row["name"]] = row["value"]
    return [(place, tuple(numbers.items())) for place, numbers in found.items()]


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _place(row: Row, step: int) -> Place:
    return Place(step, row["stage"], row["role"], row["rank"])


def _both(name: str, files: Mapping[str, Sequence[tuple[Path, Place]]]) -> FileDump:
    """Return kept files as a dump, with what they lack from the ring: both are of one payload."""
    kept, ring = (open_files(name, files[kind]) for kind in ("kept", "ring"))
    there = {(entry.section, entry.place) for entry in kept.entries}
    more = [entry for entry in ring.entries if (entry.section, entry.place) not in there]
    return dataclasses.replace(
        kept,
        entries=[*kept.entries, *more],
        problems=[*kept.problems, *ring.problems],
        about={**ring.about, **kept.about},
    )


def _with_logged(dump: FileDump, side: Side) -> FileDump:
    """Return a dump with the numbers that its files do not hold."""
    there = {(entry.section, entry.place) for entry in dump.entries}
    numbers: dict[Entry, dict[str, float]] = {}
    for place, named in side.logged:
        values = dict(named)
        for section, names in sections_of(place.stage, (), values).items():
            if (section, place) not in there:
                entry = Entry(section, place, Path(f"{section} logged in {place}"), 0, section)
                numbers[entry] = {name: values[name] for name in names}
    entries = sorted([*dump.entries, *numbers], key=entry_order)
    reader = functools.partial(_read, dump.reader, numbers)
    return dataclasses.replace(dump, entries=entries, reader=reader)


def _read(
    reader: Callable[[Entry], Record], numbers: Mapping[Entry, Mapping[str, float]], entry: Entry
) -> Record:
    held = numbers.get(entry)
    return reader(entry) if held is None else Record(entry, numbers=held)


def _noise_floor(deps: Dependencies, side: Side) -> Row:
    """Return how far the trainer is from itself, where a run's one step has measured it."""
    if side.target is None or side.target.step is None:
        return {}
    try:
        floor = deps.measures.of(side.target.attempt_id, side.target.step).noise_floor
    except NotFound:
        return {}
    if floor is None:
        return {}
    return {"noise_floor": {n: floor[f"logprob_abs_diff/{n}"] for n in ("mean", "max")}}


def _broke_off(side: Side) -> Row:
    """Return where a run's one step ended, where its attempt ended before the step did."""
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
    return f"{len(steps)} steps ({shown})" if steps else "none"


def check_sides(said: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what `a`, `b` and, where there is one, `c` are.

    Raises:
        InvalidInput: one of the first two is missing.
    """
    for name in ("a", "b"):
        if said.get(name) is None:
            raise InvalidInput(
                f"a comparison needs {name}",
                expected="RUN[@ATTEMPT][:STEP], or {'directory': PATH}",
            )
    yield from (said[name] for name in ("a", "b", "c") if said.get(name) is not None)
