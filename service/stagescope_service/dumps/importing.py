"""A directory of dumps as the events that its processes would have sent.

So that metrics, rounds, figures and comparison work on it as on any run. What is made is a function
of the files and the run's name: the same directory taken in twice into one run counts once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

from stagescope.wire import schema
from stagescope.wire.errors import StagescopeError
from stagescope_service.dumps.formats.msprobe_directory import MARKS, OPERATOR_FILES, rank_dumps
from stagescope_service.dumps.records import Dump, Entry, Place, Problem, Record
from stagescope_service.store.artifacts import make_directory, step_directory
from stagescope_service.store.tensorfile import WireTensor, disk_errors

STAGE_OF_SECTION: Final[Mapping[str, str]] = {
    "trajectories": "rollout_generate",
    "old_log_probs": "actor_compute_log_prob",
}
"""Where a file does not say the stage; every other section is of `actor_update`."""
_ROLE_OF_STAGE: Final[Mapping[str, str]] = {
    "rollout_generate": "rollout",
    "critic_update": "critic",
    "compute_values": "critic",
    "compute_rm_score": "reward_model",
    "ref_compute_log_prob": "ref",
}
_ROLE: Final = "actor"
_LOGGED: Final = "metrics/"
KEY_PREFIX: Final = "import-"
"""With which the attempt key of what was taken in begins."""
IMPORTED: Final = "imported"
"""In the configuration of an attempt that was taken in: the name of its dump."""
CAPTURE: Final = "imported"
"""The capture of dumps of operators that were taken in."""
_OF_A_PARAMETER: Final = {"parameters": "parameter", "gradients": "gradient"}
_SECONDS: Final = 1e-3
"""Between two events: their order is known, their times are not."""


class OperatorDump(NamedTuple):
    """What msprobe wrote of the operators of one rank, in a directory that the service reads."""

    entry: Entry
    directory: Path


@dataclasses.dataclass(frozen=True)
class Call:
    """Events of one process, to be sent in one batch.

    Attributes:
        sender: `Sender.wire()`.
        events: each `Event.wire()`.
        payloads: by the seq of the END event, as `stagescope.wire.schema` says.
        problems: files of it that could not be read.
    """

    sender: tuple[Any, ...]
    events: list[tuple[Any, ...]]
    payloads: dict[int, dict[str, Any]]
    problems: list[Problem] = dataclasses.field(default_factory=list)


def import_key(dump: Dump, run: str) -> str:
    """Return the attempt key of a dump in a run: of its files, so that a changed one is another.

    Otherwise a directory that grew would be taken for what was sent before. The run is in it since
    processes are named by the key: the service would take those of a second run for the first's.
    """
    files = {entry.path: entry for entry in dump.entries}
    for directory, place in rank_dumps(dump):
        for file in _operator_files(directory):
            files[file] = Entry("other", place, file, file.stat().st_size)
    told = [f"{path.resolve()} {entry.bytes} {_written(entry)}" for path, entry in files.items()]
    text = "\n".join([run, *sorted(told)])
    digest = hashlib.sha256(text.encode(errors="surrogateescape"))
    return f"{KEY_PREFIX}{digest.hexdigest()[:16]}"


def calls(
    dump: Dump,
    run: str,
    key: str,
    *,
    keep: Mapping[str, Any],
    operators: Sequence[OperatorDump] = (),
) -> Iterator[Call]:
    """Yield what the processes of a dump say, one (process, step, stage, part) at a time.

    Args:
        dump: what is taken in.
        run: name of the run.
        key: attempt key.
        keep: of the run's settings: what the service keeps of the payloads.
        operators: dumps of operators where the service can read them.

    A file that cannot be read is a problem of its call; what stands beside it goes on.
    """
    found: list[tuple[Place, Entry]] = [(_placed(entry), entry) for entry in dump.entries]
    found += [(_placed(each.entry), each.entry) for each in operators]
    placed = sorted(found, key=_order)
    processes = sorted({_process(place) for place, _ in placed})
    begun = min((_written(entry) for _, entry in placed), default=0.0)
    dumped = {each.entry: each.directory for each in operators}
    voices = {each: _Voice(run, key, *each, processes, begun, dump, keep) for each in processes}
    for voice in voices.values():
        yield voice.call([voice.hello()], {})
    for place, group in groupby(placed, key=lambda each: each[0]):
        entries = [entry for _, entry in group]
        held = [entry for entry in entries if entry not in dumped]
        directories = [dumped[entry] for entry in entries if entry in dumped]
        yield voices[_process(place)].stage(place, held, directories)
    for voice in voices.values():
        yield voice.call([voice.event(schema.FINISH)], {})


class _Voice:
    """One process of the dump: numbers its events and dates them by its files."""

    def __init__(
        self,
        run: str,
        key: str,
        role: str,
        rank: int,
        processes: Sequence[tuple[str, int]],
        begun: float,
        dump: Dump,
        keep: Mapping[str, Any],
    ) -> None:
        self._size = 1 + max(number for name, number in processes if name == role)
        self._dump = dump
        self._keep = keep
        self._wall = begun
        self._seq = 0
        incarnation = f"{key}-{role}-{rank}"
        self._sender = schema.Sender(incarnation, run, key, role, rank, started=begun)

    def event(self, kind: str, **fields: Any) -> tuple[Any, ...]:
        self._seq += 1
        self._wall += _SECONDS
        return schema.Event(kind, self._seq, self._wall, self._wall, fields).wire()

    def hello(self) -> tuple[Any, ...]:
        imported = {IMPORTED: self._dump.name, "kind": self._dump.kind, **self._dump.about}
        return self.event(
            schema.HELLO,
            world_size=self._size,
            fingerprint={"config": imported},
            settings={"keep": dict(self._keep)},
        )

    def call(
        self,
        events: list[tuple[Any, ...]],
        payloads: dict[int, dict[str, Any]],
        problems: Sequence[Problem] = (),
    ) -> Call:
        return Call(self._sender.wire(), events, payloads, [*problems])

    def stage(
        self, place: Place, entries: Sequence[Entry], directories: Sequence[Path] = ()
    ) -> Call:
        """Return the events of one stage and part, with what its files hold as one payload."""
        records, problems = self._read(entries)
        self._wall = max([self._wall, *(_written(entry) for entry in entries)])
        work = schema.Work(place.step, None, place.stage, place.part).fields()
        begin = self.event(schema.BEGIN, **work)
        begin_seq = self._seq
        dumps = [
            self.event(schema.DUMP, **work, capture_id=CAPTURE, path=str(each), state="complete")
            for each in directories
        ]
        payload, scalars = _merged(records)
        fields: dict[str, Any] = {"status": "ok", "begin_seq": begin_seq, "scalars": scalars}
        if payload["tensors"]:
            fields["payload"] = _described(payload)
        end = self.event(schema.END, **work, **fields)
        payloads = {self._seq: payload} if payload["tensors"] else {}
        return self.call([begin, *dumps, end], payloads, problems)

    def _read(self, entries: Sequence[Entry]) -> tuple[list[Record], list[Problem]]:
        records: list[Record] = []
        problems: list[Problem] = []
        for entry in entries:
            try:
                records.append(self._dump.read(entry))
            except StagescopeError as error:  # noqa: PERF203 - the other files stand
                problems.append(Problem(entry.path, error.code, str(error), entry))
        return records, problems


def _merged(records: Sequence[Record]) -> tuple[dict[str, Any], dict[str, float | int]]:
    """Put the sections of one place into one payload; the first that has a name gives it."""
    tensors: dict[str, WireTensor] = {}
    strings: dict[str, list[str]] = {}
    meta: dict[str, Any] = {}
    scalars: dict[str, float | int] = {}
    for record in records:
        prefix = _OF_A_PARAMETER.get(record.entry.section)
        for name, tensor in record.tensors.items():
            tensors.setdefault(f"{prefix}/{name}" if prefix else name, tensor)
        named = {"sample_ids": record.samples, "group_ids": record.groups, **record.row_texts}
        for name, texts in named.items():
            if texts is not None:
                strings.setdefault(name, [*texts])
        scalars = {**_scalars(record.numbers), **scalars}
        meta = {**record.about, **meta}
    payload = {"schema": schema.SCHEMA, "tensors": tensors, "strings": strings, "meta": meta}
    return payload, scalars


def _scalars(numbers: Mapping[str, float | int]) -> dict[str, float | int]:
    """Return what was logged under the names of a stage's scalars.

    NexRL's files of losses say what else a microbatch logged as `metrics`: its `metrics/entropy`
    is the scalar `entropy`, unless the file says that, too.
    """
    found: dict[str, float | int] = {}
    for name, value in numbers.items():
        bare = name.removeprefix(_LOGGED)
        found[name if bare in numbers else bare] = value
    return found


def _described(payload: Mapping[str, Any]) -> dict[str, Any]:
    tensors = payload["tensors"]
    return {
        "tensors": {
            name: [tag, list(shape), None if offsets is None else len(offsets) - 1]
            for name, (tag, shape, _, offsets) in tensors.items()
        },
        "bytes": sum(int(values.nbytes) for _, _, values, _ in tensors.values()),
        "meta": payload["meta"],
    }


def _placed(entry: Entry) -> Place:
    """Return an entry's place with a stage, a role and a rank where its file says none."""
    place = entry.place
    stage = place.stage or STAGE_OF_SECTION.get(entry.section, "actor_update")
    role = place.role or _ROLE_OF_STAGE.get(stage, _ROLE)
    if place.role is None and place.rank is None and role == _ROLE:
        # A file of the whole batch is nobody's rank: the others would be missing beside it.
        role = "driver"
    rank = 0 if place.rank is None else place.rank
    return place._replace(stage=stage, role=role, rank=rank)


def _process(place: Place) -> tuple[str, int]:
    assert place.role is not None
    assert place.rank is not None
    return place.role, place.rank


def _order(placed: tuple[Place, Entry]) -> tuple[Any, ...]:
    place, entry = placed
    stages = {name: at for at, name in enumerate(schema.STAGES)}
    step = (place.step is None, place.step or 0)
    known = stages.get(place.stage or "", len(stages))
    return (*step, known, place.stage, place.role, place.rank, place.part, str(entry.path))


def place_operators(
    found: Sequence[tuple[Path, Place]], run: str, key: str, data_dir: Path | None
) -> list[OperatorDump]:
    """Return the ranks' dumps of operators where a service reads them.

    Their JSON files are copied into its data directory, for it writes a table beside them and reads
    nothing outside its roots. Where that directory is not here, they stay where they are.

    Args:
        found: directories of ranks, with their places.
        run, key: whose they become.
        data_dir: the service's.

    Raises:
        StoreError: the disk refused.
    """
    placed = []
    for directory, place in found:
        size = sum(each.stat().st_size for each in _operator_files(directory))
        entry = Entry("other", place, directory / MARKS[0], size, CAPTURE)
        target = directory.absolute()
        if data_dir is not None:
            at = _placed(entry)
            step = step_directory(data_dir, run, key, at.step, at.stage or "", at.part)
            target = step / "step0" / f"rank{at.rank}"
            make_directory(target)
            for file in _operator_files(directory):
                with disk_errors(target):
                    shutil.copyfile(file, target / file.name)
        placed.append(OperatorDump(entry, target))
    return placed


def _operator_files(directory: Path) -> list[Path]:
    return [directory / name for name in OPERATOR_FILES if (directory / name).is_file()]


def _written(entry: Entry) -> float:
    """Return when a file was written, in Unix seconds; 0 where it is gone."""
    try:
        return entry.path.stat().st_mtime
    except OSError:
        return 0.0
