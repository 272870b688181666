"""Converts a dump to the events that its processes would have sent to the service.

Metrics, rounds, figures and comparison then work on it as on any run. The events are a function of
the files and the run's name: importing the same directory twice into one run counts once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from stagescope_service.dumps.formats.listing import distinct, modified_at, rank_dumps
from stagescope_service.dumps.formats.msprobe_directory import DUMP_FILES, OPERATOR_FILES
from stagescope_service.dumps.formats.nexrl import KIND as NEXRL
from stagescope_service.dumps.formats.own import KIND as OWN
from stagescope_service.dumps.formats.saved_batch import KIND as BATCH
from stagescope_service.dumps.msprobe.json_window import holds_records
from stagescope_service.dumps.records import (
    IMPORTED_CAPTURE,
    Dump,
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
    RankDump,
    mapping,
)
from stagescope_service.store.artifacts import make_directory, step_directory
from stagescope_service.store.tensorfile import WireTensor, disk_errors
from stagescope_wire import schema
from stagescope_wire.errors import InvalidInput, StagescopeError
from stagescope_wire.framing import WirePayload
from stagescope_wire.tensors import PAYLOAD_TENSORS, PER_TOKEN

STAGE_OF_SECTION: Final[Mapping[str, str]] = {
    "trajectories": "rollout_generate",
    "old_log_probs": "actor_compute_log_prob",
}
"""The stage of entries without one, by section; every other section is of `actor_update`."""
_ROLE_OF_STAGE: Final[Mapping[str, str]] = {
    "rollout_generate": "rollout",
    "critic_update": "critic",
    "compute_values": "critic",
    "compute_rm_score": "reward_model",
    "ref_compute_log_prob": "ref",
    "ref_log_prob": "ref",
    "update_critic": "critic",
    **dict.fromkeys(
        ("generate_sequence", "generate_sequences", "actor_generate_sequences"), "rollout"
    ),
}
"""Stages of other projects' dumps, too: see `formats.msprobe_directory`."""
_ROLE: Final = "actor"
_LOGGED_PREFIX: Final = "metrics/"
KEY_PREFIX: Final = "import-"
"""Prefix of the attempt key of an imported dump."""
IMPORTED: Final = "imported"
"""Key of the dump's name in the configuration of an imported attempt."""
NOTES: Final = "notes"
"""Key in `Dump.about` of the reader's own decisions, as sentences for the user who imports."""
_PARAMETER_PREFIXES: Final = {"parameters": "parameter", "gradients": "gradient"}
_NAMED: Final = 5
_WITH_PROCESSES: Final = (OWN, BATCH, NEXRL)
"""Formats that name the process that recorded a file; its first file is read twice."""
_OF_PROCESS: Final = ("data_rank", "layout")
"""Fields in this project's files about the process that recorded them."""
_SECONDS: Final = 1e-3
"""Between two events: their order is known, their times are not."""

_Wire: TypeAlias = "tuple[object, ...]"
"""An event or a sender as it travels."""
_Process: TypeAlias = "tuple[str, int]"
"""(role, rank)"""


class OperatorDump(NamedTuple):
    """msprobe's operator statistics of one rank, in a directory that the service reads.

    Attributes:
        entry: the file with its calls.
        directory: what the service reads.
        work: its place, complete.
        empty: whether msprobe recorded no call.
    """

    entry: DumpEntry
    directory: Path
    work: Location
    empty: bool


@dataclasses.dataclass(frozen=True)
class ProcessEvents:
    """Events of one process, to be sent in one batch.

    Attributes:
        sender: `Sender.wire()`.
        events: each `Event.wire()`.
        payloads: by the sequence number of the END event; see `stagescope_wire.schema`.
        problems: files of these events, or rows of them, that could not be read.
        location: of the stage whose events they are; None of a process's first and last event.
        operators: the operator dumps that they announce, each with its complete place.
    """

    sender: _Wire
    events: list[_Wire]
    payloads: Mapping[int, WirePayload]
    problems: Sequence[DumpProblem] = ()
    location: Location | None = None
    operators: Sequence[OperatorDump] = ()


class TrainedSamples:
    """Which samples of a step's rollout are in its training, by the names of both."""

    def __init__(self) -> None:
        self._rollout: dict[int, set[str]] = {}
        self._training: dict[int, set[str]] = {}
        self._unnamed: set[int] = set()
        """Steps whose training has rows without names: they may be any sample's."""

    def add(self, batch: ProcessEvents) -> None:
        """Add the samples of a stage's payloads."""
        if batch.location is None or batch.location.step is None:
            return
        is_rollout = batch.location.stage == STAGE_OF_SECTION["trajectories"]
        if batch.location.stage in schema.STAGES:
            sides = self._rollout if is_rollout else self._training
            for payload in batch.payloads.values():
                names = payload["strings"].get("sample_ids")
                if names is not None:
                    sides.setdefault(batch.location.step, set()).update(names)
                elif not is_rollout and _has_rows(payload):
                    self._unnamed.add(batch.location.step)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each step whose training lacks samples of its rollout."""
        for step, sampled in sorted(self._rollout.items()):
            if step in self._unnamed:
                continue
            lacking = sorted(sampled - self._training.get(step, sampled))
            if lacking:
                named = ", ".join(lacking[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
                yield (
                    f"step {step}: {len(lacking)} of {len(sampled)} samples of the rollout are in "
                    f"no file of the training ({named}). The trainer filtered them out, or files "
                    "of other ranks are missing. If a path has no rank in it, the ranks overwrite "
                    "each other's file"
                )


def _has_rows(payload: WirePayload) -> bool:
    of_rows = {*PAYLOAD_TENSORS, *PER_TOKEN}
    return any(
        name in of_rows or offsets is not None
        for name, (_, _, _, offsets) in payload["tensors"].items()
    )


def import_key(dump: Dump, run: str) -> str:
    """Return the attempt key of a dump in a run, derived from the run and the state of its files.

    A directory that grew thus becomes another attempt, and is not mistaken for the earlier import.
    The key includes the run because it names processes: otherwise a second run's processes would be
    mistaken for the first's.
    """
    files = {entry.path: entry for entry in dump.entries}
    for directory, location in rank_dumps(dump):
        for file in _operator_files(directory):
            files[file] = DumpEntry("other", location, file, file.stat().st_size)
    states = [
        f"{path.resolve()} {entry.bytes} {modified_at(entry.path)}" for path, entry in files.items()
    ]
    text = "\n".join([run, *sorted(states)])
    digest = hashlib.sha256(text.encode(errors="surrogateescape"))
    return f"{KEY_PREFIX}{digest.hexdigest()[:16]}"


def is_of_no_step(entry: DumpEntry) -> bool:
    """Return whether a file has a step below 0, which no run has.

    NexRL's `compute_log_prob` does not know the step: it dumps its forward passes as step -1.
    """
    return entry.location.step is not None and entry.location.step < 0


def import_events(
    dump: Dump,
    run: str,
    key: str,
    *,
    keep: Mapping[str, object],
    operators: Sequence[OperatorDump] = (),
    display_name: str | None = None,
) -> Iterator[ProcessEvents]:
    """Yield the events of a dump's processes, one (process, step, stage, part) at a time.

    Args:
        dump: the dump to import.
        run: name of the run.
        key: attempt key.
        keep: keep policy of the run: the payloads that the service keeps.
        operators: operator dumps in directories that the service reads.
        display_name: the text that people see for the run.

    A file that cannot be read becomes a problem of its events; the other files are still imported.
    Entries that `is_of_no_step` are passed over.
    """
    entries = [entry for entry in dump.entries if not is_of_no_step(entry)]
    entries += [each.entry for each in operators]
    items = sorted(((_complete_location(entry), entry) for entry in entries), key=_sort_key)
    processes = sorted({_process(location) for location, _ in items})
    started = min((modified_at(entry.path) for _, entry in items), default=0.0)
    of_entry = {each.entry: each for each in operators}
    replays: dict[_Process, _ProcessReplay] = {}
    for role, rank in processes:
        world_size = 1 + max(number for name, number in processes if name == role)
        sender = schema.Sender(
            f"{key}-{role}-{rank}", run, key, role, rank, started=started, display_name=display_name
        )
        replays[role, rank] = _ProcessReplay(dump, sender, world_size, wall=started)
    files = [
        item for item in reversed(items) if dump.kind in _WITH_PROCESSES and item[1] not in of_entry
    ]
    first = {_process(location): entry for location, entry in files}
    for process, replay in replays.items():
        yield replay.hello(keep, first.get(process))
    for location, group in itertools.groupby(items, key=lambda item: item[0]):
        held = [entry for _, entry in group]
        tensors = [entry for entry in held if entry not in of_entry]
        dumps = [of_entry[entry] for entry in held if entry in of_entry]
        yield replays[_process(location)].stage(location, tensors, dumps)
    for replay in replays.values():
        yield replay.finish()


@dataclasses.dataclass
class _ProcessReplay:
    """One process of the dump: numbers its events and dates them by its files."""

    dump: Dump
    sender: schema.Sender
    world_size: int
    wall: float
    seq: int = 0

    def hello(self, keep: Mapping[str, object], first: DumpEntry | None) -> ProcessEvents:
        """Return the event that registers the process, with the fields from its first file."""
        about = {name: value for name, value in self.dump.about.items() if name != NOTES}
        imported = {IMPORTED: self.dump.name, "kind": self.dump.kind, **about}
        records, _ = self._read([] if first is None else [first])
        job = mapping(records[0].about, "job") if records else {}
        known = {name: job[name] for name in _OF_PROCESS if job.get(name) is not None}
        hello = self._event(
            schema.HELLO,
            world_size=self.world_size,
            fingerprint={"config": imported},
            settings={**mapping(job, "settings"), "keep": dict(keep)},
            **known,
        )
        return ProcessEvents(self.sender.wire(), [hello], {})

    def stage(
        self,
        location: Location,
        entries: Sequence[DumpEntry],
        operators: Sequence[OperatorDump],
    ) -> ProcessEvents:
        """Return the events of one stage and part, with the contents of its files as a payload."""
        entries, alike = distinct(entries, location)
        records, problems = self._read(entries)
        problems = [*alike, *problems]
        self.wall = max([self.wall, *(modified_at(entry.path) for entry in entries)])
        versions = (mapping(each.about, "job").get("policy_version") for each in records)
        version = next((each for each in versions if type(each) is int), None)
        work = schema.Work(location.step, version, location.stage, location.part).fields()
        begin = self._event(schema.BEGIN, **work)
        begin_seq = self.seq
        dumps = [
            self._event(
                schema.DUMP,
                **work,
                capture_id=IMPORTED_CAPTURE,
                path=str(each.directory),
                state="empty" if each.empty else "complete",
            )
            for each in operators
        ]
        payload, scalars = _merge(records)
        has_rows = bool(payload["tensors"] or payload["strings"])
        described = {"payload": _describe(payload)} if has_rows else {}
        end = self._event(
            schema.END, **work, status="ok", begin_seq=begin_seq, scalars=scalars, **described
        )
        payloads = {self.seq: payload} if has_rows else {}
        events = [begin, *dumps, end]
        return ProcessEvents(self.sender.wire(), events, payloads, problems, location, operators)

    def finish(self) -> ProcessEvents:
        """Return the event that ends the process."""
        return ProcessEvents(self.sender.wire(), [self._event(schema.FINISH)], {})

    def _event(self, kind: str, **fields: object) -> _Wire:
        self.seq += 1
        self.wall += _SECONDS
        return schema.Event(kind, self.seq, self.wall, self.wall, fields).wire()

    def _read(self, entries: Sequence[DumpEntry]) -> tuple[list[DumpContents], list[DumpProblem]]:
        records: list[DumpContents] = []
        problems: list[DumpProblem] = []
        for entry in entries:
            try:
                records.append(record := self.dump.read(entry))
                problems += record.problems
            except StagescopeError as error:  # noqa: PERF203 - the other files are still read
                problems.append(DumpProblem(entry.path, error.code, str(error), entry))
        return records, problems


def _merge(records: Sequence[DumpContents]) -> tuple[WirePayload, dict[str, float | int]]:
    """Merge the sections of one place into a payload and scalars; the first of a name counts."""
    tensors: dict[str, WireTensor] = {}
    strings: dict[str, list[str]] = {}
    meta: dict[str, object] = {}
    scalars: dict[str, float | int] = {}
    for record in records:
        prefix = _PARAMETER_PREFIXES.get(record.entry.section)
        for name, tensor in record.tensors.items():
            tensors.setdefault(f"{prefix}/{name}" if prefix else name, tensor)
        row_texts = {"sample_ids": record.samples, "group_ids": record.groups, **record.row_texts}
        for name, texts in row_texts.items():
            if texts is not None:
                strings.setdefault(name, [*texts])
        scalars = {**_scalars(record.numbers), **scalars}
        meta = {**_meta(record), **meta}
    payload: WirePayload = {
        "schema": schema.SCHEMA, "tensors": tensors, "strings": strings, "meta": meta,
    }  # fmt: skip
    return payload, scalars


def _meta(record: DumpContents) -> dict[str, object]:
    """Return the metadata of a record's payload; this project's files keep theirs."""
    described = {name: value for name, value in record.about.items() if name not in ("meta", "job")}
    return {**described, **mapping(record.about, "meta")}


def _scalars(numbers: Mapping[str, float | int]) -> dict[str, float | int]:
    """Return the numbers of a record under the names of a stage's scalars.

    NexRL's loss files hold the other numbers of a microbatch as `metrics`: its `metrics/entropy` is
    the scalar `entropy`, unless the file also holds that.
    """
    found: dict[str, float | int] = {}
    for name, value in numbers.items():
        bare = name.removeprefix(_LOGGED_PREFIX)
        found[name if bare in numbers else bare] = value
    return found


def _describe(payload: WirePayload) -> dict[str, object]:
    tensors = payload["tensors"]
    return {
        "tensors": {
            name: [tag, list(shape), None if offsets is None else len(offsets) - 1]
            for name, (tag, shape, _, offsets) in tensors.items()
        },
        "bytes": sum(int(values.nbytes) for _, _, values, _ in tensors.values()),
        "meta": payload["meta"],
    }


def _complete_location(entry: DumpEntry) -> Location:
    location = entry.location
    stage = location.stage or STAGE_OF_SECTION.get(entry.section, "actor_update")
    role = location.role or _ROLE_OF_STAGE.get(stage.partition("/")[0], _ROLE)
    if location.role is None and location.rank is None and role == _ROLE:
        # A file of the complete batch belongs to no rank: the others would count as missing.
        role = "driver"
    rank = 0 if location.rank is None else location.rank
    return location._replace(stage=stage, role=role, rank=rank)


def _process(location: Location) -> _Process:
    assert location.role is not None
    assert location.rank is not None
    return location.role, location.rank


def _sort_key(items: tuple[Location, DumpEntry]) -> tuple[object, ...]:
    location, entry = items
    stages = {name: index for index, name in enumerate(schema.STAGES)}
    step = (location.step is None, location.step or 0)
    stage = stages.get(location.stage or "", len(stages))
    place = (location.stage, location.role, location.rank, location.part)
    return (*step, stage, *place, str(entry.path))


def copy_operator_dumps(
    found: Sequence[RankDump], run: str, key: str, data_dir: Path | None
) -> list[OperatorDump]:
    """Return the ranks' operator dumps in directories that the service reads.

    Their JSON files are copied to the service's data directory, each dump to its own directory. The
    service writes a table beside them and reads nothing outside its roots. If that directory is not
    on this machine, nothing is copied.

    Args:
        found: directories of ranks, with their places.
        run, key: the run and the attempt key.
        data_dir: the service's data directory; None if it is not on this machine.

    Raises:
        InvalidInput: two dumps have one place.
        StoreError: the disk reported an error.
    """
    dumps: dict[Location, OperatorDump] = {}
    targets: set[Path] = set()
    for directory, location in found:
        files = _operator_files(directory)
        size = sum(each.stat().st_size for each in files)
        entry = DumpEntry("other", location, files[0], size, IMPORTED_CAPTURE)
        work = _complete_location(entry)
        if work in dumps:
            raise InvalidInput(
                f"{directory} and {dumps[work].entry.path.parent} are both of {work}",
                expected="one dump of a step, stage, rank and part",
                advice="import one of them into another run",
            )
        target = directory.absolute()
        if data_dir is not None:
            step = step_directory(data_dir, run, key, work.step, work.stage or "", work.part)
            # Names of stages may be equal as names of directories.
            bases = (step / f"again_{number}" if number else step for number in itertools.count())
            target = next(
                path
                for base in bases
                if (path := base / "step0" / f"rank{work.rank}") not in targets
            )
            targets.add(target)
            make_directory(target)
            for file in files:
                with disk_errors(target):
                    shutil.copyfile(file, target / file.name)
        empty = not any(holds_records(file) for file in files if file.name in DUMP_FILES)
        dumps[work] = OperatorDump(entry, target, work, empty)
    return [*dumps.values()]


def _operator_files(directory: Path) -> list[Path]:
    """Return the files of operators of a rank's directory; the files with calls come first."""
    return [directory / name for name in OPERATOR_FILES if (directory / name).is_file()]
