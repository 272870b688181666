"""Encode a batch of events as one HTTP body, for processes that do not join Ray.

`Content-Type: application/vnd.stagescope.events`, and the body is

    8 bytes   length N of the header, little-endian
    N bytes   JSON {"sender": [...], "events": [[...], ...], "payloads": {"<seq>": payload}}
    the rest  safetensors

with payload = `{"tensors": {name: {"dtype", "shape", "offsets": bool}}, "strings", "meta"}`. The
bytes of tensor `name` of event `seq` are the safetensors entry `{seq}/{name}`, its row offsets
(int64) `{seq}/{name}/offsets`. `stagescope_wire.nonfinite` replaces values that JSON cannot hold:
non-finite numbers, large ints, and lone surrogates in texts and names.

It uses numpy alone, so that a training image does not need safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypedDict

import numpy as np

from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import Json, JsonObject, spell, valid_text
from stagescope_wire.tensorfile import Array, WireTensor, make_header, plan_entries

MEDIA_TYPE: Final = "application/vnd.stagescope.events"
_MAX_REPR: Final = 1000
_UNWRITABLE: Final = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors raised for values without JSON: nested too deep, or that contain themselves."""


class WirePayload(TypedDict):
    """The payload of an event, as `stagescope_wire.schema` describes it."""

    schema: int
    tensors: Mapping[str, WireTensor]
    strings: Mapping[str, Sequence[str]]
    meta: JsonObject


@dataclasses.dataclass(frozen=True)
class SendResult:
    """The service's answer to a batch of events; it accepted every event that is not listed.

    The value is true if anything was refused.

    Attributes:
        refused: seq -> why the whole event was refused.
        refused_in_part: seq -> what part of the event was refused; the rest was accepted.
    """

    refused: Mapping[int, str]
    refused_in_part: Mapping[int, str]
    pause: float = 0.0
    """Seconds that an overloaded service asks to wait before the next batch."""

    def __bool__(self) -> bool:
        return bool(self.refused or self.refused_in_part)

    @classmethod
    def from_answer(cls, answer: JsonObject) -> SendResult:
        """Return the result in an answer of `POST /events`."""
        refused, in_part = (
            {int(seq): str(text) for seq, text in (answer.get(name) or {}).items()}
            for name in ("refused", "refused_in_part")
        )
        return cls(refused, in_part, float(answer.get("pause") or 0.0))


class BatchHeader(NamedTuple):
    """The sender of a batch, and the events that have a payload."""

    sender: tuple[Json, ...]
    payloads: tuple[int, ...]


def read_header(body: bytes) -> BatchHeader:
    """Read the header of a body of `pack_batch`, which is untrusted.

    Raises:
        InvalidInput: the body is no batch, or is cut off.
    """
    try:
        (length,) = struct.unpack_from("<Q", body)
        header = json.loads(body[8 : 8 + length])
        found = BatchHeader(tuple(header["sender"]), tuple(int(seq) for seq in header["payloads"]))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"the body cannot be read as a batch of events: {type(error).__name__}: {error!s:.200}",
            expected=f"a body of {MEDIA_TYPE}",
        ) from error
    return found


def pack_batch(
    sender: Sequence[Json], events: Sequence[Sequence[Json]], payloads: Mapping[int, WirePayload]
) -> bytes:
    """Return the body of one batch.

    Args:
        sender: the result of `Sender.wire()`.
        events: results of `Event.wire()`.
        payloads: by the sequence number of the END event.
    """
    described: list[str] = []
    arrays: dict[str, tuple[str, Array]] = {}
    unwritable: dict[Json, str] = {}
    for seq, payload in payloads.items():
        try:
            text, own = _describe(seq, payload)
        except _UNWRITABLE as error:  # noqa: PERF203 - the others are still sent
            unwritable[seq] = f"its payload cannot be written as JSON: {error!s:.200}"
        else:
            described.append(f'"{seq}": {text}')
            arrays |= own
    written = [_write_event(event, unwritable) for event in events]
    header = (
        f'{{"sender": {_write(sender)}, "events": [{", ".join(written)}], '
        f'"payloads": {{{", ".join(described)}}}}}'
    ).encode()
    return b"".join([struct.pack("<Q", len(header)), header, *_safetensors(arrays)])


def _describe(seq: int, payload: WirePayload) -> tuple[str, dict[str, tuple[str, Array]]]:
    """Return the JSON of a payload, and its arrays as safetensors entries."""
    arrays: dict[str, tuple[str, Array]] = {}
    tensors: dict[str, Json] = {}
    for given, (tag, shape, buffer, offsets) in payload["tensors"].items():
        name = valid_text(given)
        arrays[f"{seq}/{name}"] = (tag, np.asarray(buffer).reshape(shape))
        if offsets is not None:
            arrays[f"{seq}/{name}/offsets"] = ("int64", np.asarray(offsets, dtype=np.int64))
        tensors[name] = {"dtype": tag, "shape": list(shape), "offsets": offsets is not None}
    return _write({**payload, "tensors": tensors}), arrays


def _write_event(event: Sequence[Json], unwritable: Mapping[Json, str]) -> str:
    """Return the JSON of an event, or an event that the service refuses if it has no JSON.

    The batch's other events arrive, and the service reports a finding about this one.
    """
    seq = event[2] if len(event) > 2 else None
    reason = unwritable.get(seq) if isinstance(seq, int) else None
    if reason is None:
        try:
            return _write(event)
        except _UNWRITABLE as error:
            reason = f"its fields cannot be written as JSON: {error!s:.200}"
    return _write([*event[:5], reason])


def _write(value: object) -> str:
    return json.dumps(spell(value), allow_nan=False, default=_plain)


def _plain(value: object) -> Json:
    """Convert a value that `json` has no type for: a numpy number to a number, others to text."""
    if isinstance(value, np.generic | np.ndarray):
        return spell(value.tolist())
    if isinstance(value, set | frozenset):
        return spell(sorted(value, key=str))
    return valid_text(repr(value)[:_MAX_REPR])


def _safetensors(arrays: Mapping[str, tuple[str, Array]]) -> list[bytes]:
    if not arrays:
        return []
    entries = plan_entries({name: (tag, array.shape) for name, (tag, array) in arrays.items()})
    return [make_header(entries, None), *(arrays[each.name][1].tobytes() for each in entries)]
