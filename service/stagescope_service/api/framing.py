"""The body of `POST /events`: a JSON header and the tensors' bytes, for processes without Ray.

`application/vnd.stagescope.events` is

    8 bytes   length N of the header, little-endian
    N bytes   JSON {"sender": [...], "events": [[...], ...], "payloads": {"<seq>": payload}}
    the rest  safetensors (absent where no payload has a tensor)

with payload = `{"tensors": {name: {"dtype", "shape", "offsets": bool}}, "strings", "meta"}`. The
bytes of tensor `name` of event `seq` are the safetensors entry `{seq}/{name}`, its row offsets
(int64) `{seq}/{name}/offsets`. bfloat16 may be stored as BF16 or U16. `application/json` holds
the header alone. Non-finite numbers in JSON are the strings "nan", "inf", "-inf".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
import safetensors

from stagescope.wire.errors import InvalidInput, InvalidTensor, TooLarge
from stagescope.wire.schema import DTYPE_BYTES, SCHEMA, Sender
from stagescope_service.api.encoding import decode, unspell

MEDIA_TYPE: Final = "application/vnd.stagescope.events"
_LENGTH: Final = struct.Struct("<Q")

_STORED: Final[Mapping[str, tuple[str, ...]]] = {
    "float64": ("F64",), "float32": ("F32",), "bfloat16": ("BF16", "U16"), "float16": ("F16",),
    "int64": ("I64",), "int32": ("I32",), "int16": ("I16",), "int8": ("I8",), "uint8": ("U8",),
    "bool": ("BOOL", "U8"),
}  # fmt: skip
"""dtype tag -> the safetensors dtypes in which its bytes may be stored."""

_MAX_DIMENSIONS: Final = 8


class Batch(NamedTuple):
    """What a request to `/events` carries."""

    sender: tuple[Any, ...]
    events: list[tuple[Any, ...]]
    payloads: dict[int, dict[str, Any]]


def parse(body: bytes, *, framed: bool, max_json: int, max_events: int) -> Batch:
    """Read a body; nothing in it is trusted.

    Args:
        body: the request's body, whole.
        framed: header and tensors; False: JSON alone.
        max_json: most bytes of the JSON.
        max_events: most events.

    Raises:
        TooLarge: more JSON or more events than that.
        InvalidInput: lengths, JSON or tensors that do not fit together.
        InvalidEvent: not a sender.
    """
    header, stored = _split(body, max_json) if framed else (body, b"")
    if len(header) > max_json:
        raise TooLarge(f"JSON of {len(header)} bytes", expected=f"at most {max_json} bytes")
    said = decode(header, what="the header" if framed else "the body")
    if not isinstance(said, dict) or not isinstance(said.get("events"), list):
        raise InvalidInput(
            "the batch cannot be read",
            expected='an object {"sender": [...], "events": [[...], ...], "payloads": {...}}',
        )
    events = said["events"]
    if len(events) > max_events:
        raise TooLarge(
            f"{len(events)} events in one batch",
            expected=f"at most {max_events}",
            advice="send them in several batches",
        )
    sender = said.get("sender")
    Sender.parse(sender)
    assert isinstance(sender, list)
    tensors = dict(_tensors(stored))
    payloads = _payloads(said.get("payloads") or {}, tensors, _sequence_numbers(events))
    if tensors:
        raise InvalidInput(
            f"tensors {sorted(tensors)[:5]} belong to no payload of the header",
            expected="entries named {seq}/{name} or {seq}/{name}/offsets",
        )
    return Batch(tuple(sender), [_event(event) for event in events], payloads)


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
            f"the header is said to have {length} bytes, {len(body) - _LENGTH.size} follow",
            expected="its length in bytes as 8 bytes, little-endian",
        )
    return body[_LENGTH.size : end], body[end:]


def _event(event: Any) -> tuple[Any, ...]:
    """Return an event as it travels; one that cannot be read is the coordinator's to refuse."""
    if not isinstance(event, list):
        return (event,)
    if len(event) > 5 and isinstance(event[5], dict):
        fields = event[5]
        scalars = fields.get("scalars")
        if isinstance(scalars, dict):
            fields["scalars"] = {name: unspell(value) for name, value in scalars.items()}
    return tuple(event)


def _sequence_numbers(events: list[Any]) -> set[int]:
    return {
        event[2]
        for event in events
        if isinstance(event, list) and len(event) > 2 and isinstance(event[2], int)
    }


def _tensors(stored: bytes) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not stored:
        return
    try:
        yield from safetensors.deserialize(stored)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InvalidInput(
            f"the tensors cannot be read ({error})", expected="safetensors after the header"
        ) from error


def _payloads(said: Any, tensors: dict[str, Any], known: set[int]) -> dict[int, dict[str, Any]]:
    if not isinstance(said, dict):
        raise InvalidInput("payloads is not an object", expected='{"<seq>": payload}')
    found: dict[int, dict[str, Any]] = {}
    for key, payload in said.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) in known):
            raise InvalidInput(
                f"payload {key!r:.50} belongs to no event of the batch",
                expected="the seq of an end event of the same batch",
            )
        found[int(key)] = _payload(key, payload, tensors)
    return found


def _payload(key: str, payload: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    expected = '{"tensors": {name: {"dtype", "shape", "offsets"}}, "strings": {}, "meta": {}}'
    if not isinstance(payload, dict):
        raise InvalidInput(f"payload {key} is {payload!r:.100}", expected=expected)
    said, strings = payload.get("tensors") or {}, payload.get("strings") or {}
    meta = payload.get("meta") or {}
    if not all(isinstance(part, dict) for part in (said, strings, meta)):
        raise InvalidInput(f"payload {key} cannot be read", expected=expected)
    for name, values in strings.items():
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise InvalidInput(f"strings {name!r:.100} of payload {key}", expected="a list of str")
    read = {name: _tensor(f"{key}/{name}", about, tensors) for name, about in said.items()}
    return {"schema": SCHEMA, "tensors": read, "strings": strings, "meta": meta}


def _tensor(entry: str, about: Any, tensors: dict[str, Any]) -> tuple[Any, ...]:
    about = about if isinstance(about, dict) else {}
    dtype, shape = about.get("dtype"), about.get("shape")
    if not isinstance(dtype, str) or dtype not in _STORED or not _is_shape(shape):
        raise InvalidTensor(
            f"tensor {entry!r:.200} is described as {about!r:.200}",
            expected=f'{{"dtype": one of {sorted(_STORED)}, "shape": [int, ...]}}',
        )
    buffer = _buffer(entry, dtype, tensors)
    if math.prod(shape) != buffer.size:
        raise InvalidTensor(
            f"tensor {entry!r:.200} has shape {shape} and {buffer.size} elements",
            expected="as many elements as the shape says",
        )
    offsets = None
    if about.get("offsets"):
        offsets = _buffer(f"{entry}/offsets", "int64", tensors)
    return dtype, tuple(shape), buffer.reshape(shape), offsets


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(shape, list)
        and len(shape) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 48 for size in shape)
    )


def _buffer(entry: str, dtype: str, tensors: dict[str, Any]) -> np.ndarray[Any, Any]:
    stored = tensors.pop(entry, None)
    if stored is None:
        raise InvalidTensor(
            f"tensor {entry!r:.200} is announced and not there",
            expected=f"a safetensors entry {entry!r:.200}",
        )
    if stored["dtype"] not in _STORED[dtype]:
        raise InvalidTensor(
            f"tensor {entry!r:.200} is stored as {stored['dtype']}",
            expected=f"{' or '.join(_STORED[dtype])} for {dtype}",
        )
    data = stored["data"]
    if len(data) % DTYPE_BYTES[dtype]:
        raise InvalidTensor(f"tensor {entry!r:.200} has {len(data)} bytes", expected="whole items")
    kind = {"bfloat16": "uint16", "bool": "uint8"}.get(dtype, dtype)
    flat = np.frombuffer(data, np.dtype(kind).newbyteorder("<"))
    if dtype != "bool":
        return flat
    # Any other byte seen as numpy's bool is neither true nor false.
    if flat.size and int(flat.max()) > 1:
        raise InvalidTensor(
            f"tensor {entry!r:.200} holds the byte {int(flat.max())} as a bool", expected="0 or 1"
        )
    return flat.view(np.bool_)
