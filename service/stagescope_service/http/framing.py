"""Parses the body of `POST /events`, which processes without Ray send.

The body is a JSON header and the bytes of tensors.

`application/vnd.stagescope.events` is

    8 bytes   length N of the header, little-endian
    N bytes   JSON {"sender": [...], "events": [[...], ...], "payloads": {"<seq>": payload}}
    the rest  safetensors (absent where no payload has a tensor)

where payload = `{"tensors": {name: {"dtype", "shape", "offsets": bool}}, "strings", "meta"}`. The
bytes of tensor `name` of event `seq` are the safetensors entry `{seq}/{name}`, its row offsets
(int64) are `{seq}/{name}/offsets`. bfloat16 may be stored as BF16 or U16. A body of type
`application/json` is the header alone. Non-finite numbers in JSON are the strings "nan", "inf" and
"-inf". Strict JSON cannot hold some headers (NaN, a lone surrogate, an int of hundreds of digits).
These are read as `stagescope_wire.nonfinite` spells them, so one event loses no others.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypedDict, TypeGuard

import numpy as np
import safetensors

from stagescope_service.views.encoding import decode, parse_nonfinite
from stagescope_wire.errors import InvalidInput, InvalidTensor, TooLarge
from stagescope_wire.framing import WirePayload
from stagescope_wire.nonfinite import MAX_DEPTH, Json, spell
from stagescope_wire.schema import SCHEMA, Sender
from stagescope_wire.tensorfile import Array, WireTensor
from stagescope_wire.tensors import DTYPE_BYTES

MEDIA_TYPE: Final = "application/vnd.stagescope.events"
_LENGTH: Final = struct.Struct("<Q")

_STORAGE_DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "float64": ("F64",), "float32": ("F32",), "bfloat16": ("BF16", "U16"), "float16": ("F16",),
    "int64": ("I64",), "int32": ("I32",), "int16": ("I16",), "int8": ("I8",), "uint8": ("U8",),
    "bool": ("BOOL", "U8"),
}  # fmt: skip
"""dtype tag -> the safetensors dtypes that its bytes may be stored as."""

_MAX_DIMENSIONS: Final = 8
_MAX_DIGITS: Final = 100
"""Most digits of an int that is parsed; a longer one stays text."""


class EventBatch(NamedTuple):
    """The content of a request to `/events`."""

    sender: tuple[object, ...]
    events: list[tuple[object, ...]]
    """Unvalidated: the coordinator parses them."""
    payloads: dict[int, WirePayload]
    """Sequence number of an event -> its payload."""


class _StoredTensor(TypedDict):
    """A safetensors entry."""

    dtype: str
    shape: list[int]
    data: bytes


def parse(body: bytes, *, framed: bool, max_json: int, max_events: int) -> EventBatch:
    """Parse an untrusted body.

    Args:
        body: the complete body of the request.
        framed: whether it is a header and tensors; False: JSON alone.
        max_json: most bytes of JSON.
        max_events: most events.

    Raises:
        TooLarge: more JSON or more events than that.
        InvalidInput: lengths, JSON or tensors that contradict each other.
        InvalidEvent: the sender cannot be parsed.
    """
    header, stored = _split(body, max_json) if framed else (body, b"")
    if len(header) > max_json:
        raise TooLarge(f"JSON of {len(header)} bytes", expected=f"at most {max_json} bytes")
    fields = _read(header, what="the header" if framed else "the body")
    events = fields.get("events") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(events, list):
        raise InvalidInput(
            "the batch cannot be read",
            expected='an object {"sender": [...], "events": [[...], ...], "payloads": {...}}',
        )
    if len(events) > max_events:
        raise TooLarge(
            f"{len(events)} events in one batch",
            expected=f"at most {max_events}",
            advice="send them in several batches",
        )
    sender = fields.get("sender")
    Sender.parse(sender)
    assert isinstance(sender, list)
    tensors = dict(_stored_tensors(stored))
    payloads = _payloads(fields.get("payloads") or {}, tensors, _sequence_numbers(events))
    if tensors:
        raise InvalidInput(
            f"tensors {sorted(tensors)[:5]} belong to no payload of the header",
            expected="entries named {seq}/{name} or {seq}/{name}/offsets",
        )
    return EventBatch(tuple(sender), [_event(event) for event in events], payloads)


def _split(body: bytes, max_json: int) -> tuple[bytes, bytes]:
    if len(body) < _LENGTH.size:
        raise InvalidInput(
            f"a body of {len(body)} bytes", expected="8 bytes of length, the header, the tensors"
        )
    (length,) = _LENGTH.unpack_from(body)
    if length > max_json:
        raise TooLarge(f"a header of {length} bytes", expected=f"at most {max_json} bytes")
    end = _LENGTH.size + length
    if end > len(body):
        raise InvalidInput(
            f"the header should have {length} bytes, and {len(body) - _LENGTH.size} follow",
            expected="its length in bytes as 8 bytes, little-endian",
        )
    return body[_LENGTH.size : end], body[end:]


def _read(text: bytes, *, what: str) -> object:
    """Return the JSON of a batch.

    Raises:
        InvalidInput: the text is not JSON.
    """
    try:
        return decode(text, what=what)
    except InvalidInput:
        fields = _read_leniently(text)
        if fields is None:
            raise
        return fields


def _read_leniently(text: bytes) -> object:
    """Return the JSON of a batch that strict JSON cannot hold; None: it is no JSON either way."""
    try:
        fields = json.loads(text, parse_int=_integer)
        events = fields.get("events") if isinstance(fields, dict) else None
        if isinstance(events, list):
            fields["events"] = [_spelled(event) for event in events]
        return spell(fields, MAX_DEPTH + 2)
    except (ValueError, RecursionError):
        return None


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MAX_DIGITS else digits


def _spelled(event: Json) -> Json:
    """Return an event as strict JSON, or an event to refuse if strict JSON cannot hold it."""
    try:
        return spell(event)
    except ValueError as error:
        return [*event[:5], f"its fields cannot be read: {error}"]


def _event(event: object) -> tuple[object, ...]:
    """Return an event as it travels by Ray; the coordinator refuses one that it cannot parse."""
    if not isinstance(event, list):
        return (event,)
    if len(event) > 5 and isinstance(event[5], dict):
        fields = event[5]
        scalars = fields.get("scalars")
        if isinstance(scalars, dict):
            fields["scalars"] = {name: parse_nonfinite(value) for name, value in scalars.items()}
    return tuple(event)


def _sequence_numbers(events: Iterable[object]) -> set[int]:
    return {
        event[2]
        for event in events
        if isinstance(event, list) and len(event) > 2 and isinstance(event[2], int)
    }


def _stored_tensors(stored: bytes) -> Iterator[tuple[str, _StoredTensor]]:
    if not stored:
        return
    try:
        yield from safetensors.deserialize(stored)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InvalidInput(
            f"the tensors cannot be read ({error})", expected="safetensors after the header"
        ) from error


def _payloads(
    fields: object, tensors: dict[str, _StoredTensor], sequence_numbers: set[int]
) -> dict[int, WirePayload]:
    """Return the payloads by sequence number; takes their tensors out of `tensors`."""
    if not isinstance(fields, dict):
        raise InvalidInput("payloads is not an object", expected='{"<seq>": payload}')
    payloads: dict[int, WirePayload] = {}
    for key, payload in fields.items():
        is_seq = key.isascii() and key.isdigit() and len(key) < 20
        if not (is_seq and int(key) in sequence_numbers):
            raise InvalidInput(
                f"payload {key!r:.50} belongs to no event of the batch",
                expected="the seq of an end event of the same batch",
            )
        payloads[int(key)] = _payload(key, payload, tensors)
    return payloads


def _payload(key: str, payload: object, tensors: dict[str, _StoredTensor]) -> WirePayload:
    expected = '{"tensors": {name: {"dtype", "shape", "offsets"}}, "strings": {}, "meta": {}}'
    if not isinstance(payload, dict):
        raise InvalidInput(f"payload {key} is {payload!r:.100}", expected=expected)
    declared, strings = payload.get("tensors") or {}, payload.get("strings") or {}
    meta = payload.get("meta") or {}
    if not all(isinstance(part, dict) for part in (declared, strings, meta)):
        raise InvalidInput(f"payload {key} cannot be read", expected=expected)
    for name, values in strings.items():
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise InvalidInput(f"strings {name!r:.100} of payload {key}", expected="a list of str")
    parsed = {
        name: _tensor(f"{key}/{name}", description, tensors)
        for name, description in declared.items()
    }
    return {"schema": SCHEMA, "tensors": parsed, "strings": strings, "meta": meta}


def _tensor(entry: str, description: object, tensors: dict[str, _StoredTensor]) -> WireTensor:
    described = description if isinstance(description, dict) else {}
    dtype, shape = described.get("dtype"), described.get("shape")
    if not isinstance(dtype, str) or dtype not in _STORAGE_DTYPES or not _is_shape(shape):
        raise InvalidTensor(
            f"tensor {entry!r:.200} is described as {described!r:.200}",
            expected=f'{{"dtype": one of {sorted(_STORAGE_DTYPES)}, "shape": [int, ...]}}',
        )
    buffer = _buffer(entry, dtype, tensors)
    if math.prod(shape) != buffer.size:
        raise InvalidTensor(
            f"tensor {entry!r:.200} has shape {shape} and {buffer.size} elements",
            expected="as many elements as the shape has",
        )
    offsets = None
    if described.get("offsets"):
        offsets = _buffer(f"{entry}/offsets", "int64", tensors)
    return dtype, tuple(shape), buffer.reshape(shape), offsets


def _is_shape(shape: object) -> TypeGuard[list[int]]:
    return (
        isinstance(shape, list)
        and len(shape) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 48 for size in shape)
    )


def _buffer(entry: str, dtype: str, tensors: dict[str, _StoredTensor]) -> Array:
    """Take an entry out of `tensors` and return it as a flat array, without a copy."""
    stored = tensors.pop(entry, None)
    if stored is None:
        raise InvalidTensor(
            f"tensor {entry!r:.200} is announced but missing",
            expected=f"a safetensors entry {entry!r:.200}",
        )
    if stored["dtype"] not in _STORAGE_DTYPES[dtype]:
        raise InvalidTensor(
            f"tensor {entry!r:.200} is stored as {stored['dtype']}",
            expected=f"{' or '.join(_STORAGE_DTYPES[dtype])} for {dtype}",
        )
    data = stored["data"]
    if len(data) % DTYPE_BYTES[dtype]:
        raise InvalidTensor(f"tensor {entry!r:.200} has {len(data)} bytes", expected="whole items")
    kind = {"bfloat16": "uint16", "bool": "uint8"}.get(dtype, dtype)
    flat: Array = np.frombuffer(data, np.dtype(kind).newbyteorder("<"))
    if dtype != "bool":
        return flat
    # numpy reads any byte but 0 and 1 as a bool that is neither true nor false.
    largest = int(flat.max()) if flat.size else 0
    if largest > 1:
        raise InvalidTensor(
            f"tensor {entry!r:.200} holds the byte {largest} as a bool", expected="0 or 1"
        )
    return flat.view(np.bool_)
