"""The collectives that a process recorded: dumps of torch.distributed's flight recorder.

gloo, NCCL and HCCL write the same layout, as JSON or as a pickle of plain values. `parse` reads
both; no pickle can name a class or call anything. `recorded` takes the newest calls of each group.

`RankRecord.wire()` is how a probe sends them with its stacks.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import pickle
import pickletools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from stagescope_wire.errors import Forbidden, InvalidInput
from stagescope_wire.nonfinite import Json, JsonObject

MAX_BYTES: Final = 64 << 20
"""Largest dump that is read; one of 2000 calls is 1 MB of JSON."""
MAX_CALLS: Final = 16
"""Newest calls of each group that are kept."""
MAX_GROUPS: Final = 256
MAX_RANKS: Final = 16_384
"""Most ranks of a group."""
_MAX_TENSORS: Final = 8
_MAX_TEXT: Final = 200
_TOO_NEW_NS: Final = 1 << 62

State: TypeAlias = Literal["recorded", "off", "none"]
RECORDED: Final = "recorded"
OFF: Final = "off"
NONE: Final = "none"
"""`off`: this torch has no recorder; `none`: the process has no process group."""

_ADVICE: Final = "copy the file again; it was cut off, or another program wrote it"
_PLAIN: Final = frozenset(
    {
        "PROTO", "STOP", "MARK", "FRAME", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT",
        "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
        "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_LIST", "APPEND",
        "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT",
        "DICT", "SETITEM", "SETITEMS", "POP", "POP_MARK", "DUP", "PUT", "BINPUT", "LONG_BINPUT",
        "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
    }
)  # fmt: skip
"""Opcodes that make dicts, lists, tuples, texts and numbers, and nothing else."""
_MAX_OPCODES: Final = 10_000_000
"""A dump of 2000 calls with their frames has 200 000."""
_PUTS: Final = ("PUT", "BINPUT", "LONG_BINPUT")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of a collective, or of a send or receive."""

    sequence: int
    """Number in its group, of collectives or of sends and receives."""
    operation: str
    """Such as `all_reduce`, or `send 0->1` with ranks of the group."""
    is_p2p: bool
    done: bool
    inputs: tuple[tuple[int, ...], ...] = ()
    """Shapes."""
    outputs: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    """Of inputs, then of outputs."""
    seconds: float | None = None
    """Seconds since it was called; None: not known."""
    place: str | None = None
    """The line that called it; None: the dump has no frames."""
    order: int = 0
    """Number among all calls of the process."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupRecord:
    """The newest calls of a process in one process group."""

    name: str
    description: str
    ranks: tuple[int, ...] | None
    """Global ranks; None: the dump does not say."""
    entered: int
    """Sequence number of its last collective; 0: none."""
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RankRecord:
    """What a process recorded."""

    state: State
    rank: int | None = None
    """Global rank in torch.distributed; None: not known."""
    groups: tuple[GroupRecord, ...] = ()

    def wire(self) -> dict[str, Json]:
        """Return it as built-in types."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def of_wire(cls, value: object) -> RankRecord | None:
        """Return what a process sent; None where it sent none or it has another form."""
        try:
            return cls._of_wire(value) if isinstance(value, Mapping) else None
        except (TypeError, ValueError, KeyError):
            return None

    @classmethod
    def _of_wire(cls, value: JsonObject) -> RankRecord:
        groups = [
            GroupRecord(
                name=_text(group["name"]),
                description=_text(group["description"]),
                ranks=_ranks(group["ranks"]),
                entered=int(group["entered"]),
                calls=tuple(
                    Call(
                        sequence=int(call["sequence"]),
                        operation=_text(call["operation"]),
                        is_p2p=call["is_p2p"] is True,
                        done=call["done"] is True,
                        inputs=_shapes(call["inputs"]),
                        outputs=_shapes(call["outputs"]),
                        dtypes=_texts(call["dtypes"]),
                        seconds=None if call["seconds"] is None else float(call["seconds"]),
                        place=None if call["place"] is None else _text(call["place"]),
                        order=int(call["order"]),
                    )
                    for call in group["calls"][-2 * MAX_CALLS :]
                ),
            )
            for group in value["groups"][:MAX_GROUPS]
        ]
        state: State = (
            OFF if value["state"] == OFF else NONE if value["state"] == NONE else RECORDED
        )
        return cls(state, None if value["rank"] is None else int(value["rank"]), tuple(groups))


def parse(data: bytes) -> JsonObject:
    """Return the content of a dump, of JSON or of a pickle.

    Raises:
        InvalidInput: it is too large, cut off, or no dump.
        Forbidden: it is a pickle of more than plain values.
    """
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"a dump of {len(data)} bytes", expected=f"at most {MAX_BYTES}")
    if data.lstrip()[:1] == b"{":
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _refused(f"JSON that does not parse ({error!s:.100})") from error
    else:
        found = _unpickled(data)
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list):
        raise _refused("no dump of a flight recorder: no dict with a list of entries")
    if not {"entries", "pg_config", "pg_status"} & found.keys():
        raise _refused("no dump of a flight recorder: neither entries nor groups")
    return found


def _refused(what: str) -> InvalidInput:
    return InvalidInput(
        what, expected="a dump of torch.distributed's flight recorder", advice=_ADVICE
    )


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, _: object) -> object:
        raise pickle.UnpicklingError("it names a persistent object")


def _unpickled(data: bytes) -> object:
    # The opcodes are read first: a large index of the memo alone would take all memory.
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name not in _PLAIN:
                raise Forbidden(
                    f"a pickle with {opcode.name}, which may run code: it was not loaded",
                    expected="a pickle of plain values, as a flight recorder writes",
                )
            if number > _MAX_OPCODES:
                raise InvalidInput(
                    f"a pickle of more than {_MAX_OPCODES} values", expected="fewer calls"
                )
            if opcode.name in _PUTS and not 0 <= int(str(argument)) <= number:
                raise _refused(f"a pickle that stores its value {number} at {argument!r:.30}")
        return _PlainUnpickler(io.BytesIO(data)).load()
    except (Forbidden, InvalidInput):
        raise
    except Exception as error:  # what is no pickle may raise anything
        raise _refused(f"a pickle that does not parse ({error!s:.100})") from error


def recorded(
    documents: Iterable[JsonObject],
    *,
    rank: int | None,
    ranks: Mapping[str, Sequence[int]] | None = None,
    now_ns: int | None = None,
) -> RankRecord:
    """Return the newest calls of each group, of the dumps of one process.

    Malformed entries are left out.

    Args:
        documents: what `parse` returned: one dump for each kind of backend.
        rank: its global rank.
        ranks: name of a group -> its global ranks, where the dumps lack them.
        now_ns: when the dumps were taken, Unix nanoseconds; None: not known.
    """
    documents, groups = [*documents], dict[str, GroupRecord]()
    for document in documents:
        for group in _groups(document, ranks or {}, now_ns):
            known = groups.get(group.name)
            if known is None or not known.calls:
                groups[group.name] = group
            elif group.calls:  # two backends of one group, such as cpu:gloo,cuda:nccl
                calls = tuple(sorted((*known.calls, *group.calls), key=lambda call: call.order))
                entered = max(known.entered, group.entered)
                groups[group.name] = dataclasses.replace(known, calls=calls, entered=entered)
    return RankRecord(RECORDED if documents else OFF, rank, tuple(groups.values())[:MAX_GROUPS])


def _groups(
    document: JsonObject, ranks: Mapping[str, Sequence[int]], now_ns: int | None
) -> Iterable[GroupRecord]:
    entries = [each for each in document.get("entries") or [] if isinstance(each, Mapping)]
    status, config = _mapping(document.get("pg_status")), _mapping(document.get("pg_config"))
    by_group: dict[str, list[JsonObject]] = {}
    for entry in entries:
        named = entry.get("process_group")
        if isinstance(named, list | tuple) and named:
            by_group.setdefault(_text(named[0]), []).append(entry)
    for name in by_group.keys() | {_text(each) for each in config} | ranks.keys():
        if not name:
            continue
        its, known = by_group.get(name, []), _mapping(config.get(name))
        description = _text(its[-1]["process_group"][-1] if its else known.get("desc") or "")
        calls = [call for entry in _newest(its) if (call := _call(entry, now_ns)) is not None]
        state = _mapping(status.get(str(its[-1].get("pg_id")))) if its else {}
        last = [_integer(state.get("last_enqueued_collective"))]
        last += [call.sequence for call in calls if not call.is_p2p]
        members = ranks.get(name)
        yield GroupRecord(
            name,
            description,
            _ranks(known.get("ranks")) if members is None else tuple(sorted(members)),
            max(0, *(each for each in last if each is not None), 0),
            tuple(sorted(calls, key=lambda call: call.order)),
        )


def _newest(entries: list[JsonObject]) -> list[JsonObject]:
    """Return the newest entries, and the oldest that are not done: the others wait behind them."""
    newest, older = entries[-MAX_CALLS:], entries[:-MAX_CALLS]
    waiting = (entry for entry in older if not _is_done(entry))
    return [*itertools.islice(waiting, MAX_CALLS), *newest]


def _is_done(entry: JsonObject) -> bool:
    # gloo keeps no states. An NCCL call that is retired and not completed has timed out.
    if entry.get("state") == "completed":
        return True
    return entry.get("retired") is True and _text(entry.get("profiling_name")).startswith("gloo:")


def _call(entry: JsonObject, now_ns: int | None) -> Call | None:
    operation = _text(entry.get("profiling_name")).rpartition(":")[2]
    is_p2p = entry.get("is_p2p") is True or operation.split(" ")[0] in ("send", "recv")
    sequence = _integer(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
    if not operation or sequence is None or operation == "coalesced":
        return None
    created = _integer(entry.get("time_created_ns"))
    is_known = now_ns is not None and created is not None and 0 < created < _TOO_NEW_NS
    return Call(
        sequence, operation, is_p2p, _is_done(entry),
        _shapes(entry.get("input_sizes")), _shapes(entry.get("output_sizes")),
        (*_texts(entry.get("input_dtypes")), *_texts(entry.get("output_dtypes"))),
        max(now_ns - created, 0) / 1e9 if is_known else None,  # type: ignore[operator]
        _place(entry.get("frames")), _integer(entry.get("record_id")) or 0,
    )  # fmt: skip


# --- lines of code ------------------------------------------------------------------------
_LIBRARIES: Final = ("/site-packages/torch/", "/site-packages/torch_npu/", "/site-packages/ray/")
_OURS: Final = "/stagescope_workers/"


def is_users(path: str) -> bool:
    """Return whether a file is the training's: neither Python's own nor torch's, Ray's, ours."""
    path = path.replace("\\", "/").replace("/dist-packages/", "/site-packages/")
    if path.startswith("<") or _OURS in path or any(each in path for each in _LIBRARIES):
        return False
    return "/lib/python3" not in path or "/site-packages/" in path


def place_text(function: str, path: str, line: int) -> str:
    """Return a line of code as text: `save_checkpoint (trainer.py:212)`."""
    return f"{function} ({path.replace(chr(92), '/').rpartition('/')[2]}:{line})"


def _place(frames: object) -> str | None:
    """Return the innermost line of the training, of frames that begin with the innermost."""
    found = [
        (
            _text(each.get("name")),
            _text(each.get("filename"), 1000),
            _integer(each.get("line")) or 0,
        )
        for each in (frames if isinstance(frames, list | tuple) else [])[:200]
        if isinstance(each, Mapping)
    ]
    own = [each for each in found if is_users(each[1])] or found
    return place_text(*own[0]) if own else None


# --- values of unknown form ---------------------------------------------------------------
def _mapping(value: object) -> JsonObject:
    return value if isinstance(value, Mapping) else {}


def _integer(value: object) -> int | None:
    if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and abs(value) < _TOO_NEW_NS else None


def _text(value: object, most: int = _MAX_TEXT) -> str:
    return value[:most] if isinstance(value, str) else str(value) if type(value) is int else ""


def _texts(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list | tuple) else ()
    return tuple(_text(each, 40) for each in values[: 2 * _MAX_TENSORS])


def _shapes(value: object) -> tuple[tuple[int, ...], ...]:
    values = value if isinstance(value, list | tuple) else ()
    return tuple(
        tuple(size for each in shape[:16] if (size := _integer(each)) is not None)
        for shape in values[:_MAX_TENSORS]
        if isinstance(shape, list | tuple)
    )


def _ranks(value: object) -> tuple[int, ...] | None:
    """Return ranks of a list, or of its text `[0, 1]`; None for none."""
    if isinstance(value, str):
        value = value.strip().strip("[]").split(",")[: MAX_RANKS + 1]
    if not isinstance(value, list | tuple) or len(value) > MAX_RANKS:
        return None
    found = [_integer(each.strip() if isinstance(each, str) else each) for each in value]
    return tuple(sorted({each for each in found if each is not None})) or None
