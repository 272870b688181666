"""The wire format between training processes and the service.

Messages are tuples, lists and dicts of built-in types that begin with a schema number, so that a
service that runs for months understands jobs with other versions. Unknown fields are kept; an event
with an unknown schema number is refused alone.

A batch is `record_events(sender=Sender(...).wire(), events=[event, ...], payloads={seq: payload})`:

* sender: `(schema, incarnation, run, attempt_key, role, rank, node_id, clock_offset, clock_error,
  started, plan_revision)`
* event: `(schema, kind, seq, wall, mono, fields)`; `seq` counts from 1 inside an incarnation,
  `wall` is Unix time and `mono` the process's monotonic clock, both in seconds
* payload: one Ray object ref (or the value) of `{"schema": 1, "tensors": {name: tensor},
  "strings": {name: [str, ...]}, "meta": {...}}`, or of a raw caller `{name: ref or array}`
* tensor: `(dtype tag, shape, flat or shaped numpy buffer, offsets or None)`; bfloat16 travels as
  uint16, offsets (int64 [rows + 1]) make a packed tensor of rows (cu_seqlens, jagged, lists)

The fields of each kind are listed at the constants below, the names of tensors in `tensors`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Final, NamedTuple, TypeAlias, TypedDict

from stagescope_wire.errors import InvalidEvent, InvalidInput
from stagescope_wire.nonfinite import Json, JsonObject

WireTuple: TypeAlias = tuple[Json, ...]
"""A sender or an event as it is sent: built-in types, the schema number first."""

SCHEMA: Final = 1

# --- kinds of events, with the fields of each -----------------------------------------------
HELLO: Final = "hello"
"""world_size, data_rank, layout {LAYOUT_COLUMNS: value}, fingerprint {...}, settings {...},
resumed_from_step, pid, watchdog, launch, single.

`watchdog` is the path of the file that `stagescope_wire.stacks` describes. `launch` is a text that
differs in each start of its launcher. If `single` is True, the process knows of no other rank of
its role. Unknown fields are absent."""
BEGIN: Final = "begin"
"""work fields (WORK_FIELDS), device_time."""
END: Final = "end"
"""work fields, begin_seq, begin_wall, begin_mono, status 'ok' | 'failed', error_type,
error_message, interrupted, scalars {name: float}, payload (PAYLOAD_FIELDS) or None,
payload_dropped {reason, bytes, tensors}, device_seconds.

`begin_seq` is the seq of the matching BEGIN, since a part may be repeated. `interrupted` is True if
the exception means that a person stopped the training. `payload_dropped` is present if the process
had to drop the payload."""
LOG: Final = "log"
"""work fields (stage may be None: a scalar of the step), scalars {name: float}."""
END_STEP: Final = "end_step"
"""step."""
FINISH: Final = "finish"
"""The process leaves; it has sent everything that it announced. error_type, error_message,
interrupted of the exception that ends it."""
DROPPED: Final = "dropped"
"""what 'event' | 'payload' | 'scalar', count, bytes, reason, and, if known, work fields."""
REFUSED: Final = "refused"
"""A call with bad input in the training process: what, message, severity, work fields."""
DUMP: Final = "dump"
"""work fields, capture_id, path, state 'estimated' | 'armed' | 'complete' | 'empty' (of an import:
without a call) | 'truncated' | 'failed' | 'missed' | 'skipped', bytes, files, seconds, error, task,
level, overrides [str], estimate {...}."""
STACKS: Final = "stacks"
"""work fields of the stage that the training thread is in, request_id (with `Sender.incarnation` it
identifies the answer), source 'probe' | 'watchdog', threads [{name, ident, is_training, stack}],
truncated, collectives (`stagescope_wire.collectives.records.RankRecord`)."""

WEIGHTS: Final = "weights"
"""work fields, side (WEIGHT_SIDES), kind (WEIGHT_KINDS), tensors [(name, checksum, dtype, shape,
shard), ...], device {device_kind, device_index, device_serial}.

`policy_version` is that of these weights; `device` holds them. The checksum is an int from 0 below
2**64, or None if it could not be computed. The shard is None, 'copy' (all ranks of the side hold
the same) or 'tp copy' (all tensor-parallel ranks do). For a DTensor it is (global shape, offsets or
None, placement, names of the mesh's dimensions), and `shape` is the local one."""

CANARY: Final = "canary"
"""work fields (policy_version: the scored version), fields of `stagescope_wire.canary.Canary`."""

KINDS: Final = frozenset(
    {HELLO, BEGIN, END, LOG, END_STEP, FINISH, DROPPED, REFUSED, DUMP, STACKS, WEIGHTS, CANARY}
)

PART_FIELDS: Final = ("occurrence", "epoch", "minibatch", "microbatch")
WORK_FIELDS: Final = ("step", "policy_version", "stage", *PART_FIELDS)
PAYLOAD_FIELDS: Final = ("tensors", "bytes", "meta", "reported")
"""tensors {name: [dtype tag, shape, rows or None]}, bytes (of all tensors), meta {...} as recorded;
reported: problems with the shapes and dtypes of its tensors are sent as REFUSED events."""

ROLES: Final = ("actor", "ref", "critic", "reward_model", "rollout")
STAGES: Final = (
    "rollout_generate", "actor_compute_log_prob", "ref_compute_log_prob", "compute_values",
    "compute_rm_score", "critic_update", "actor_update", "weight_sync",
)  # fmt: skip
STEP_SUMMARY_STAGES: Final = ("actor_compute_log_prob", "actor_update", "rollout_generate")
"""The order in which the stage of a step summary is chosen: the first that has both streams."""

DUMP_MARKER: Final = ".stagescope-dump"
"""A file in each directory that a capture created; such a directory may be read on any path."""

WEIGHT_SIDES: Final = ("trainer", "rollout")
WEIGHT_KINDS: Final = ("exchanged", "held")
"""exchanged: as sent or received, before fusion and quantisation; held: as the process holds
them."""

LAYOUT_COLUMNS: Final = (
    "cluster", "node", "host", "device_kind", "device_index", "device_serial",
    "dp_rank", "dp_size", "tp_rank", "tp_size", "pp_rank", "pp_size", "vpp_rank", "vpp_size",
    "cp_rank", "cp_size", "sp_rank", "sp_size", "ep_rank", "ep_size", "etp_rank", "etp_size",
    "engine", "engine_version", "framework", "framework_version",
)  # fmt: skip


_INT64: Final = 1 << 63
_TIMES: Final = 1e300
"""Beyond it, a number is no time."""
_SEQUENCE: Final = (tuple, list)
STEP_BOUND: Final = 10**18  # steps have at most 18 digits, in the API's paths, too
MAX_SCALAR_NAME: Final = 200  # characters
_MAX_ROLE, _MAX_KEY = 100, 500
_RUN_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


def check_run_name(run: object) -> str:
    """Return `run` if it is a valid name of a run, else raise `InvalidInput`."""
    if isinstance(run, str) and _RUN_NAME.match(run) and run not in {".", ".."}:
        return run
    raise InvalidInput(f"run name {run!r} is not valid", expected="1 to 100 of A-Z a-z 0-9 . _ -")


def check_role(role: object) -> str:
    """Return `role` if it is a valid name of a role, else raise `InvalidInput`."""
    return _check_text("role", role, _MAX_ROLE)


def check_attempt_key(key: object) -> str:
    """Return `key` if it is a valid attempt key, else raise `InvalidInput`."""
    return _check_text("attempt_key", key, _MAX_KEY)


def _check_text(what: str, value: object, most: int) -> str:
    if isinstance(value, str) and _is_name(value, most):
        return value
    expected = f"a printable text of 1 to {most} characters"
    raise InvalidInput(f"{what} {value!r:.200}", expected=expected)


@dataclasses.dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a batch; part of every batch, so that a lost `hello` loses nothing else."""

    incarnation: str
    run: str
    attempt_key: str | None
    role: str
    rank: int
    node_id: str | None = None
    clock_offset: float | None = None
    """Service's wall clock minus this process's, in seconds, from poll round trips."""
    clock_error: float | None = None
    """Half of the best round trip, in seconds: the uncertainty of the offset."""
    started: float | None = None
    """Wall clock at which this incarnation began. If two incarnations did the same work, the later
    one wins."""
    plan_revision: int | None = None
    """Revision of the sender's plan; the reply to a batch has the plan if the service's differs."""
    display_name: str | None = None
    """The run's name as the training gave it, if `run` is another text (`names.display_name`)."""

    def wire(self) -> WireTuple:
        """Return the sender as it is sent."""
        return (SCHEMA, *(getattr(self, field.name) for field in dataclasses.fields(self)))

    @classmethod
    def parse(cls, wire: object) -> Sender:
        """Parse a result of `wire()`; a later version may have appended fields.

        Raises:
            InvalidEvent: not a sender of this schema.
        """
        if not isinstance(wire, _SEQUENCE) or len(wire) < 6 or wire[0] != SCHEMA:
            raise InvalidEvent(
                f"sender {wire!r:.200} cannot be read",
                expected=f"({SCHEMA}, {', '.join(_SENDER_FIELDS)})",
            )
        values = wire[1 : len(_SENDER_FIELDS) + 1]
        try:
            return _parse_sender(*values)
        except TypeError:  # not even hashable
            parse = _parse_sender.__wrapped__
        return parse(*values)  # outside of the handler: its error is the only one


_SENDER_FIELDS: Final = tuple(field.name for field in dataclasses.fields(Sender))


@functools.lru_cache(maxsize=8192, typed=True)  # each of its batches has the same sender
def _parse_sender(*given: Json) -> Sender:
    values = dict(zip(_SENDER_FIELDS, given, strict=False))
    run, role, rank = check_run_name(values["run"]), values["role"], values["rank"]
    if not _is_name(role, _MAX_ROLE) or not _is_int(rank, 0, 1 << 31):
        raise InvalidEvent(
            f"sender with role {role!r:.200} and rank {rank!r:.200}",
            expected="a role's name and a rank from 0",
        )
    for name, needed in (("incarnation", True), ("attempt_key", False), ("node_id", False)):
        value = values.get(name)
        if not (_is_name(value, _MAX_KEY) or (value is None and not needed)):
            raise InvalidEvent(
                f"sender with {name} {value!r:.200}",
                expected="a printable text of 1 to 500 characters",
            )
    for name in ("clock_offset", "clock_error", "started"):
        value = values.get(name)
        if value is not None and not _is_time(value):
            raise InvalidEvent(f"sender with {name} {value!r:.200}", expected="seconds, or None")
    value = values.get("plan_revision")
    if value is not None and not _is_int(value, 0, _INT64):
        raise InvalidEvent(
            f"sender with plan_revision {value!r:.200}", expected="an int from 0, or None"
        )
    display_name = values.get("display_name")
    if display_name is not None and not (
        isinstance(display_name, str) and len(display_name) <= _MAX_KEY
    ):
        raise InvalidEvent(
            f"sender with display_name {display_name!r:.200}",
            expected="a text of at most 500 characters, or None",
        )
    return Sender(**{**values, "run": run})


@dataclasses.dataclass(slots=True)  # frozen, it would take four times as long to make
class Event:
    """One event as the service reads it; `fields` includes those unknown to this version."""

    kind: str
    seq: int
    wall: float
    mono: float
    fields: JsonObject

    def wire(self) -> WireTuple:
        """Return the event as it is sent."""
        return (SCHEMA, self.kind, self.seq, self.wall, self.mono, dict(self.fields))

    @classmethod
    def parse(cls, wire: object) -> Event:
        """Parse one event.

        Raises:
            InvalidEvent: it is malformed, or has an unknown schema number or kind.
        """
        if not isinstance(wire, _SEQUENCE) or len(wire) < 6:
            raise InvalidEvent(
                f"event {wire!r:.200} cannot be read",
                expected="(schema, kind, seq, wall, mono, fields)",
            )
        schema, kind, seq, wall, mono, fields = wire[:6]
        if schema != SCHEMA:
            raise InvalidEvent(
                f"event {seq!r:.200} has schema number {schema!r:.200}",
                expected=f"schema number {SCHEMA}",
                advice="bring the service and the job to versions that share a schema",
            )
        if not isinstance(kind, str) or kind not in KINDS:
            raise InvalidEvent(
                f"event {seq!r:.200} is of kind {kind!r:.200}", expected=f"one of {sorted(KINDS)}"
            )
        if type(wall) is not float or type(mono) is not float:  # of another program: ints, say
            wall, mono = _as_time(wall), _as_time(mono)
        # The comparisons are false for NaN.
        times_ok = -_TIMES < wall < _TIMES and -_TIMES < mono < _TIMES
        if not (times_ok and _is_int(seq, 0, _INT64) and isinstance(fields, dict)):
            raise InvalidEvent(
                f"event {wire!r:.200} has fields of wrong types",
                expected="seq an int from 0, wall and mono finite floats, fields a dict",
            )
        return cls(kind, seq, wall, mono, fields)


class PartColumns(TypedDict):
    """The columns of a row that name a part; null where it has none."""

    occurrence: int | None
    epoch: int | None
    minibatch: int | None
    microbatch: int | None


class Part(NamedTuple):
    """A part of a stage: (occurrence, epoch, minibatch, microbatch), each from 0."""

    occurrence: int = 0
    epoch: int = 0
    minibatch: int = 0
    microbatch: int = 0

    @classmethod
    def of_columns(cls, row: PartColumns) -> Part:
        """Return the part that a row names."""
        return cls(
            row["occurrence"] or 0, row["epoch"] or 0, row["minibatch"] or 0, row["microbatch"] or 0
        )

    def __str__(self) -> str:
        return f"{self.occurrence}.{self.epoch}.{self.minibatch}.{self.microbatch}"


RankKey: TypeAlias = tuple[str, int]
"""(role, rank)."""

_FIRST_PART: Final = Part()


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A unit of work of a process: one part of one stage of one step (or policy version)."""

    step: int | None
    policy_version: int | None
    stage: str | None
    part: Part = _FIRST_PART
    key: str = dataclasses.field(init=False, repr=False, compare=False)
    """The identity of this work inside a process: `step|policy_version|stage|part`."""
    stage_key: str = dataclasses.field(init=False, repr=False, compare=False)
    """The key without the part."""
    _fields: dict[str, int | str | None] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        step = "" if self.step is None else self.step
        # If there is a step, the policy version is a property and not part of the identity.
        version = self.policy_version if self.step is None else None
        stage_key = f"{step}|{'' if version is None else version}|{self.stage or ''}"
        object.__setattr__(self, "stage_key", stage_key)
        object.__setattr__(self, "key", f"{stage_key}|{self.part}")
        values = (self.step, self.policy_version, self.stage, *self.part)
        object.__setattr__(self, "_fields", dict(zip(WORK_FIELDS, values, strict=True)))

    @classmethod
    def parse(cls, fields: JsonObject) -> Work:
        """Parse the work fields of an event.

        Raises:
            InvalidEvent: a step, version or part is not an int (of 64 bits; steps and parts from
                0), or the stage is not a name.
        """
        try:
            return _parse_work(*map(fields.get, WORK_FIELDS))
        except TypeError:  # not even hashable
            values = {name: fields.get(name) for name in WORK_FIELDS}
            raise InvalidEvent(
                f"work fields are {values!r:.400}", expected="ints and a stage's name"
            ) from None

    def fields(self) -> dict[str, int | str | None]:
        """Return the work fields of an event."""
        return self._fields.copy()


@functools.lru_cache(maxsize=8192, typed=True)  # typed, because True equals 1 but is not a step
def _parse_work(step: Json, policy_version: Json, stage: Json, *part: Json) -> Work:
    # All ranks report the same work in a step and share one object.
    if step is not None and not _is_int(step, 0, STEP_BOUND):
        raise InvalidEvent(
            f"step is {step!r:.200}", expected="an int from 0 of at most 18 digits, or None"
        )
    if policy_version is not None and not _is_int(policy_version, -_INT64, _INT64):
        raise InvalidEvent(f"policy_version is {policy_version!r:.200}", expected="an int, or None")
    for name, value in zip(PART_FIELDS, part, strict=True):
        if value is not None and not _is_int(value, 0, _INT64):
            raise InvalidEvent(f"{name} is {value!r:.200}", expected="an int from 0, or None")
    if isinstance(stage, str):  # refused, what it recorded would be lost
        stage = _printable(stage)
    if stage is not None and not _is_name(stage, 200):
        raise InvalidEvent(
            f"stage is {stage!r:.200}", expected="a printable name of 1 to 200 characters"
        )
    return Work(step, policy_version, stage, Part(*(value or 0 for value in part)))


def _printable(text: str) -> str:
    """Return a text with escapes for characters that cannot be printed: other texts stay others."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_int(value: object, least: int, below: int) -> bool:
    # Refuse numbers here that the catalogue cannot store: later they would fail a whole batch.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int)):
        return False
    return least <= value < below


def _is_time(value: object) -> bool:
    return -_TIMES < _as_time(value) < _TIMES  # also false for NaN


def _as_time(value: object) -> float:
    """Return a time as a float; NaN if it is none."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        return math.nan
    return float(value) if -_TIMES < value < _TIMES else math.nan


def _is_name(value: object, most: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= most and value.isprintable()


_TARGET: Final = re.compile(r"(?s)(?P<run>.+?)(?:@(?P<attempt>\d{1,9}))?(?::(?P<step>\d{1,18}))?")


class Target(NamedTuple):
    """A run, an attempt of it (None: the newest) and a step (None: not specified).

    The run is any text that a question accepts: its stored name, or as it was given.
    """

    run: str
    attempt: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        attempt = "" if self.attempt is None else f"@{self.attempt}"
        return f"{self.run}{attempt}{'' if self.step is None else f':{self.step}'}"


def read_target(text: object) -> Target:
    """Parse `qwen3-8b`, `qwen3-8b@2`, `qwen3-8b:5` or `qwen3-8b@2:5`.

    Raises:
        InvalidInput: no text, or an empty one.
    """
    match = _TARGET.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidInput(
            f"{text!r:.200} names no run", expected="RUN[@ATTEMPT][:STEP], such as qwen3-8b@2:5"
        )
    numbers = match.group("attempt", "step")
    attempt, step = (None if number is None else int(number) for number in numbers)
    return Target(match["run"], attempt, step)
