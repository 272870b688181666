"""Directories of msprobe's dumps: full tensors by operator.

The directory of a rank holds `dump.json`, its sidecars and, if tensors were dumped,
`dump_tensor_data/{operator}.{direction}.{which}.pt`, one tensor per file.
At level debug it holds `debug.json`.
`stagescope_service.dumps.msprobe` reads the operator statistics (`stagescope operators`).

The names on a directory's path give its step, stage and rank. msprobe itself writes
`{dump_path}/step{N}/{rankR | procPID | pidPID}/dump.json`. Each user chooses the `dump_path` above
it:

* `step_{N}/{stage}[/part]/step0/rankR`: this project's captures and verl's. msprobe's own counter
  stays 0.
* `{stage}/step{N}/rankR`: msprobe's guides for slime and verl, and ModelArts' collector.
* `{stage}/{PID}/step{N}/rankR`: several engines below one stage.
* `step{N}/rankR`: no stage.

If a capture of this project wrote DONE.json, that file states the place. Other names, such as a PID
or a host, matter only if two directories would otherwise have the same place. Then they become
part of the stage's name. No two directories ever share a place.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from stagescope_service.dumps.formats.columns import Columns
from stagescope_service.dumps.formats.content import read_content
from stagescope_service.dumps.formats.listing import (
    FileDump,
    Format,
    ListedFile,
    file_dump,
    files_below,
    unknown_file,
)
from stagescope_service.dumps.msprobe.operators import read_done
from stagescope_service.dumps.records import (
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
    RankDump,
)
from stagescope_wire.errors import NotFound
from stagescope_wire.schema import STAGES, Part

_RANK: Final = re.compile(r"rank[_-]?(\d{1,9})\Z")
_STEP: Final = re.compile(r"(?:global_)?step[_-]?(\d{1,18}|unknown)\Z")
_PART: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\Z")
_PROCESS: Final = re.compile(r"(?:proc|pid|rank)?[_-]?\d+\Z")
"""A name that numbers a process, and so names no stage."""
_FIRST_STEP: Final = "step0"
_NAMED_STAGES: Final = frozenset(
    {*STAGES, "generate_sequence", "generate_sequences", "actor_generate_sequences",
     "compute_log_prob", "old_log_prob", "ref_log_prob", "actor_train", "update_actor",
     "update_critic"}
)  # fmt: skip
"""Stages that identify a dump's own directory: any other name may belong to the run."""


class Places(NamedTuple):
    """The places of a dump's directories.

    Attributes:
        ranks: the directories in their order, each with its own place.
        notes: facts that the names lack and this module decided, one sentence each.
        problems: directories that are left out because another has their place.
    """

    ranks: list[RankDump]
    notes: list[str]
    problems: list[DumpProblem]


class _PathFacts(NamedTuple):
    """Facts that the names on the path of a directory give.

    Attributes:
        location: the place, each field as far as the names give it.
        process: the name of the directory of a process whose rank is unknown.
        others: names that give none of these facts.
        inside: the path below the dump's root.
    """

    directory: Path
    location: Location
    process: str
    others: tuple[str, ...]
    inside: str

    @property
    def place(self) -> Location:
        """The place, in step 0 if the names give none."""
        return self.location._replace(step=self.location.step or 0)

    def placed(self, **fields: Any) -> _PathFacts:
        """Return it with other fields of its location."""
        return self._replace(location=self.location._replace(**fields))


def find_places(root: Path, directories: Iterable[Path]) -> Places:
    """Return the places of directories below `root`, no two alike.

    Args:
        root: the directory that was named. Its name and those above it give a step and a stage only
            in the layouts that cannot be mistaken.
        directories: each holds the files of one rank.
    """
    notes: dict[str, None] = {}
    named = _with_ranks([_facts_of(root.absolute(), each) for each in directories], notes)
    problems: list[DumpProblem] = []
    beside: dict[object, _PathFacts] = {}
    for each in named:
        # Two spellings of a rank, `rank0` and `rank00`: no other name distinguishes them.
        first = beside.setdefault((each.directory.parent, each.place), each)
        if first is not each:
            problems.append(_refused(each, first.directory))
    ranks: list[RankDump] = []
    taken: dict[Location, Path] = {}
    for each in _with_distinct_stages([*beside.values()], notes):
        if each.location.step is None:
            notes[f"{each.inside or each.directory.name} names no step: taken as step 0"] = None
        other = taken.setdefault(each.place, each.directory)
        if other is each.directory:
            ranks.append(RankDump(each.directory, each.place))
        else:
            problems.append(_refused(each, other))
    return Places(ranks, [*notes], problems)


def _refused(each: _PathFacts, other: Path) -> DumpProblem:
    message = (
        f"{each.directory} and {other} are both of {each.place}. Only {other} is read. Rename "
        "one of them"
    )
    return DumpProblem(each.directory, "refused", message)


def _facts_of(root: Path, directory: Path) -> _PathFacts:
    directory = directory.absolute()
    names = directory.parts
    below = len(root.parts)
    rank, last = _RANK.match(names[-1]), len(names) - 1
    found = _PathFacts(
        directory,
        Location(rank=int(rank[1]) if rank else None),
        process="" if rank or _STEP.match(names[-1]) else names[-1],
        others=tuple(names[below:last]),
        inside="/".join(names[below:]),
    )
    if (done := _written_place(directory)) is not None:
        return found._replace(location=done)
    steps = [index for index in range(last + 1) if _STEP.match(names[index])]
    inner = next((index for index in reversed(steps) if index >= min(below, last - 1)), None)
    if inner is None:
        return _with_stage(found, names[below:last], names[last - 1])
    outer = _outer_step(names, steps, inner, below)
    if outer is None:
        found = found.placed(step=_number_of(names[inner]))
        found = _with_stage(found, names[below:inner], names[inner - 1])
    else:
        found = _in_step(found, names, outer, inner, below)
    return found._replace(others=(*found.others, *names[inner + 1 : last]))


def _with_stage(found: _PathFacts, inside: Sequence[str], outside: str) -> _PathFacts:
    """Return a place with the stage among names.

    Args:
        found: the place.
        inside: the names below the root that are above the step.
        outside: the name above the step, which may be the root's own, or one above it.
    """
    at = _stage_among(inside)
    if at is None:
        stage = outside if outside in _NAMED_STAGES and not inside else None
        return found.placed(stage=stage)._replace(others=tuple(inside))
    return found.placed(stage=inside[at])._replace(others=(*inside[:at], *inside[at + 1 :]))


def _in_step(
    found: _PathFacts, names: Sequence[str], outer: int, inner: int, below: int
) -> _PathFacts:
    """Return the place in `step_{N}[/{stage}][/part]/step0/rankR`."""
    between = [name for name in names[outer + 1 : inner] if not _PART.match(name)]
    parts = [match for name in names[outer + 1 : inner] if (match := _PART.match(name))]
    above = names[below:outer]
    if between:
        found = found.placed(stage=between[0])._replace(others=(*above, *between[1:]))
    else:
        found = _with_stage(found, above, names[outer - 1])
    counter = () if names[inner] == _FIRST_STEP else (names[inner],)
    part = Part(*map(int, parts[-1].groups())) if parts else Part()
    found = found.placed(step=_number_of(names[outer]), part=part)
    return found._replace(others=(*found.others, *counter))


def _outer_step(names: Sequence[str], steps: Sequence[int], inner: int, below: int) -> int | None:
    """Return the index of the trainer's step above msprobe's own, None without one.

    Names above the root count only if at most a stage and its part are between.
    """
    for index in reversed(steps[: steps.index(inner)]):
        between = names[index + 1 : inner]
        near = len(between) == 1 or (len(between) == 2 and _PART.match(between[1]))
        if index >= below or (near and names[index].startswith("step_")):
            return index
    return None


def _number_of(step: str) -> int | None:
    match = _STEP.match(step)
    return None if match is None or match[1] == "unknown" else int(match[1])


def _written_place(directory: Path) -> Location | None:
    done = read_done(directory)
    if done is None:
        return None
    step, stage, role, rank = (done.get(name) for name in ("step", "stage", "role", "rank"))
    part = _PART.match(str(done.get("part")))
    if not isinstance(stage, str) or not isinstance(role, str) or part is None:
        return None
    if not isinstance(rank, int) or not isinstance(step, int | None):
        return None
    return Location(step, stage, role, rank, Part(*map(int, part.groups())))


def _stage_among(names: Sequence[str]) -> int | None:
    """Return the index of the stage: a known name, else the innermost that is no process."""
    named = [index for index, name in enumerate(names) if name in _NAMED_STAGES]
    named = named or [index for index, name in enumerate(names) if not _PROCESS.match(name)]
    return named[-1] if named else None


def _with_ranks(named: Sequence[_PathFacts], notes: dict[str, None]) -> list[_PathFacts]:
    """Return them with a rank each: processes without one are numbered by stage.

    A process keeps its number in all steps of a stage. Where no step has two of them side by side,
    they are one rank that was started again.
    """
    stages: defaultdict[str | None, list[_PathFacts]] = defaultdict(list)
    for each in named:
        stages[each.location.stage].append(each)
    numbers: dict[tuple[str | None, str], int] = {}
    for stage, members in stages.items():
        unknown = [each for each in members if each.location.rank is None]
        ranks = [each.location.rank for each in members if each.location.rank is not None]
        first = 1 + max(ranks, default=-1)
        together: defaultdict[object, set[str]] = defaultdict(set)
        for each in unknown:
            together[each.location, each.others].add(each.process)
        alone = all(len(processes) == 1 for processes in together.values())
        for index, process in enumerate(sorted({each.process for each in unknown}, key=_natural)):
            rank = first if alone else first + index
            numbers[stage, process] = rank
            if process not in ("", "rank"):
                of_stage = f" of {stage}" if stage else ""
                notes[f"{process}{of_stage} names no rank: shown as rank {rank}"] = None
    return [
        each
        if each.location.rank is not None
        else each.placed(rank=numbers[each.location.stage, each.process])
        for each in named
    ]


def _with_distinct_stages(named: Sequence[_PathFacts], notes: dict[str, None]) -> list[_PathFacts]:
    """Return them; where two places are alike, the stage includes the names without a meaning."""
    found = list(named)
    for _ in range(2):
        counts = Counter(each.place for each in found)
        alike = {place.stage for place, count in counts.items() if count > 1}
        if not alike:
            break
        found = [_with_others(each) if each.location.stage in alike else each for each in found]
        # Places that are still alike differ in the spelling of a step: `step1` and `step01`.
        found = [each._replace(others=tuple(each.inside.split("/")[:-1])) for each in found]
    stages = {each.location.stage or "" for each in found}
    for stage in sorted(stages - {each.location.stage or "" for each in named}):
        notes[f"{stage}: a stage of its own, as another directory has its steps and ranks"] = None
    return found


def _with_others(each: _PathFacts) -> _PathFacts:
    return each.placed(stage="/".join(filter(None, (each.location.stage, *each.others))) or None)


def _natural(name: str) -> tuple[int, str]:
    digits = "".join(character for character in name if character.isdecimal())
    return int(digits or 0), name


KIND: Final = "msprobe"
DUMP_FILES: Final = ("dump.json", "debug.json")
OPERATOR_FILES: Final = (*DUMP_FILES, "stack.json", "construct.json", "DONE.json")
"""Files of a rank's directory that hold the statistics of its operators."""
TENSOR_FOLDER: Final = "dump_tensor_data"

_SETTINGS: Final = re.compile(r"(?:.*[_-])?config(?:uration)?s?(?:[_-].*)?\.(?:json|ya?ml)\Z")
"""Configuration of msprobe: users and collectors keep it beside its dump."""
_TABLE: Final = "operators.parquet"
_GRADIENT: Final = ".parameters_grad."


def rank_directories(names: Iterable[str]) -> list[str]:
    """Return the directories that hold a rank's dump, derived from file names."""
    found = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in DUMP_FILES}
    return sorted(found)


def operator_files(names: Iterable[str]) -> set[str]:
    """Return the names that belong to a dump of msprobe's: its settings and our table, too."""
    names = [*names]
    directories = set(rank_directories(names))
    found = set()
    for name in names:
        if name.rpartition("/")[2] == _TABLE or _SETTINGS.match(name.rpartition("/")[2]):
            found.add(name)
        folder = name.rpartition("/")[0]
        inner = folder.removesuffix(TENSOR_FOLDER).removesuffix("/")
        if folder in directories or (folder.endswith(TENSOR_FOLDER) and inner in directories):
            found.add(name)
    return found


def open_msprobe(path: Path, step: int | None) -> FileDump:
    """List the full tensors of a dump of msprobe's at any level, and its ranks' statistics."""
    found, problems = files_below(path)
    directories = rank_directories(each.name for each in found)
    if not directories:
        raise NotFound(
            f"{path} holds no dump of msprobe's", expected="dump.json in directories of ranks"
        )
    recognized = operator_files(each.name for each in found)
    problems += [
        unknown_file(each, "a dump of msprobe's") for each in found if each.name not in recognized
    ]
    places = find_places(path, (path / each for each in directories))
    of_directory = {each.directory: each.location for each in places.ranks}
    tensors = [
        each
        for each in found
        if each.name in recognized and each.path.parent.name == TENSOR_FOLDER
        and each.path.suffix in (".pt", ".json")
    ]  # fmt: skip
    entries = [*filter(None, (_entry_of(each, of_directory) for each in tensors))]
    about = {
        "operators_are_read_by": "stagescope operators, and the comparison of operators",
        **({"notes": places.notes} if places.notes else {}),
    }
    problems += places.problems
    ranks = [each for each in places.ranks if step in (None, each.location.step)]
    dump = file_dump(path, KIND, entries, problems, read_entry, step)
    return dataclasses.replace(dump, about=about, ranks=ranks)


def _entry_of(found: ListedFile, places: Mapping[Path, Location]) -> DumpEntry | None:
    location = places.get(found.path.parent.parent.absolute())
    if location is None:
        return None
    section = "gradients" if _GRADIENT in found.path.stem else "other"
    return DumpEntry(section, location, found.path, found.bytes, found.path.stem)


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one tensor; see `records.Dump.read`."""
    found = Columns()
    found.add(entry.key, read_content(entry.path))
    return found.contents(entry)


FORMAT: Final = Format(
    KIND,
    "msprobe's (stepN/rankR/dump.json)",
    lambda found: bool(rank_directories(each.name for each in found)),
    open_msprobe,
)
