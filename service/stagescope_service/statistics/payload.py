"""A payload, read as tensors, strings and metadata.

A probe sends `{"schema", "tensors", "strings", "meta"}`, a raw caller a dict of arrays, lists or
torch tensors. torch is never imported: a tensor is recognised by its methods.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

import numpy as np

from stagescope_service.statistics.ragged import with_padded_responses
from stagescope_wire.errors import InvalidEvent, InvalidTensor
from stagescope_wire.names import storable_id
from stagescope_wire.nonfinite import Json, valid_text
from stagescope_wire.policy_versions import VERSION_NAMES, text_versions
from stagescope_wire.schema import SCHEMA
from stagescope_wire.tensorfile import WireTensor
from stagescope_wire.tensors import (
    DTYPE_BYTES,
    INTEGER_TENSORS,
    PAYLOAD_STRINGS,
    PER_TOKEN,
    ROUTE_TENSORS,
    ROUTES_REFUSED,
)

_MAX_DIMENSIONS: Final = 8


@dataclasses.dataclass(frozen=True)
class Payload:
    """Named tensors of one stage, with strings and metadata."""

    tensors: dict[str, WireTensor]
    strings: dict[str, list[str]]
    meta: dict[str, Json]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(int(tensor[2].nbytes) for tensor in self.tensors.values())


def read_value(value: object) -> Payload:
    """Read a payload.

    Raises:
        InvalidEvent: not a payload, or of an unknown schema number.
        InvalidTensor: a value is not a tensor; names it.
    """
    if not isinstance(value, Mapping):
        raise InvalidEvent(
            f"the payload is a {type(value).__name__}", expected="a dict of names to tensors"
        )
    if "schema" not in value:
        return _raw(value)
    if value["schema"] != SCHEMA:
        raise InvalidEvent(
            f"the payload has schema number {value['schema']!r}",
            expected=f"schema number {SCHEMA}",
            advice="bring the service and the job to versions that share a schema",
        )
    tensors = {
        _text(name): _checked(str(name), wire)
        for name, wire in (value.get("tensors") or {}).items()
    }
    strings = {
        _text(name): _texts(str(name), texts)
        for name, texts in (value.get("strings") or {}).items()
    }
    meta = dict(value.get("meta") or {})
    if "versions" in strings and "versions" not in tensors:
        _add_versions(strings.pop("versions"), tensors, meta)
    return Payload(with_padded_responses(tensors), strings, meta)


def _add_versions(texts: object, tensors: dict[str, WireTensor], meta: dict[str, Json]) -> bool:
    """Add versions that are texts; False if `texts` has none."""
    found = text_versions(texts)
    if found is None:
        return False
    tensors["versions"], names = found
    meta |= {VERSION_NAMES: names} if names else {}
    return True


def _texts(name: str, texts: Iterable[object]) -> list[str]:
    """Return the texts of a payload; ids as the catalogue stores them, others as they are."""
    return [*map(storable_id if name in PAYLOAD_STRINGS else _text, texts)]


def _text(value: object) -> str:
    return valid_text(str(value))


def _checked(name: str, wire: object) -> WireTensor:
    if not isinstance(wire, tuple | list) or len(wire) != 4 or wire[0] not in DTYPE_BYTES:
        raise InvalidTensor(
            f"{name} is {wire!r:.100}", expected="(dtype tag, shape, buffer, offsets or None)"
        )
    tag, shape, buffer, offsets = wire
    if not isinstance(buffer, np.ndarray) or len(shape) > _MAX_DIMENSIONS:
        raise InvalidTensor(f"{name} has no numpy buffer", expected="a numpy array")
    rows = None if offsets is None else np.asarray(offsets, np.int64)
    return str(tag), tuple(int(size) for size in shape), buffer, rows


def _raw(value: Mapping[Any, object]) -> Payload:
    tensors: dict[str, WireTensor] = {}
    strings: dict[str, list[str]] = {}
    meta: dict[str, Json] = {}
    for given, item in value.items():
        if not isinstance(given, str) or (given in PER_TOKEN and isinstance(item, str | Mapping)):
            raise InvalidTensor(
                f"the payload's {given!r:.100} is {item!r:.100}",
                expected="a name, with an array, a tensor or a list of rows",
            )
        name = valid_text(given)
        if name == "versions" and _add_versions(item, tensors, meta):
            continue
        if are_texts(item, name):
            strings[name] = _texts(name, item)
        elif item is None or isinstance(item, str | int | float | Mapping):
            meta[name] = item
        elif name in ROUTE_TENSORS:
            meta[ROUTES_REFUSED] = (
                f"{name} came in a raw call, and only a probe counts routes: record them with "
                "stage.record of the package"
            )
            with contextlib.suppress(InvalidTensor):  # a list of rows cannot be kept whole
                tensors[name] = to_wire(name, item)
        else:
            tensors[name] = to_wire(name, item)
    return Payload(with_padded_responses(tensors), strings, meta)


def are_texts(value: object, name: str) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a text a row: ids, or any list of texts."""
    if name in PAYLOAD_STRINGS:
        return isinstance(value, Sequence | np.ndarray)
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(text, str) for text in value)


def to_wire(name: str, value: object) -> WireTensor:
    """Return a raw caller's value as a tensor.

    Raises:
        InvalidTensor: not an array, a tensor, numbers, or a list of rows.
    """
    if hasattr(value, "detach"):
        return _from_torch(value)
    if isinstance(value, list | tuple) and not value:
        tag = "int64" if name in INTEGER_TENSORS else "float64"
        rows = np.zeros(1, np.int64) if name in PER_TOKEN else None
        return tag, (0,), np.empty(0, tag), rows
    if isinstance(value, list | tuple) and hasattr(value[0], "__len__"):
        parts = [_row(name, row) for row in value]
        # An empty list has no dtype of its own: it gets the dtype of the other rows.
        typed = [part for part, row in zip(parts, value, strict=True) if len(row)] or parts
        parts = [part if len(part[2]) else (typed[0][0], *part[1:]) for part in parts]
        if len({part[0] for part in parts}) != 1 or any(len(part[1]) != 1 for part in parts):
            raise InvalidTensor(
                f"{name} is a list of {[part[1] for part in parts[:4]]}",
                expected="a list of 1-D rows of one dtype",
            )
        packed = np.concatenate([part[2] for part in typed])
        offsets = np.cumsum([0, *(len(part[2]) for part in parts)], dtype=np.int64)
        return parts[0][0], packed.shape, packed, offsets
    array = np.asarray(value)
    if array.dtype.name not in DTYPE_BYTES:
        raise InvalidTensor(
            f"{name} has dtype {array.dtype}", expected=f"one of {', '.join(DTYPE_BYTES)}"
        )
    return array.dtype.name, array.shape, np.ascontiguousarray(array), None


def _row(name: str, value: object) -> WireTensor:
    tag, shape, buffer, _ = to_wire(name, value)
    return tag, shape, buffer, None


def _from_torch(value: Any) -> WireTensor:
    tensor = value.detach().cpu()
    offsets = None
    if getattr(tensor, "is_nested", False):
        offsets = np.asarray(tensor.offsets(), np.int64)
        tensor = tensor.values()
    tag = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.contiguous()
    if tag == "bfloat16":
        torch = sys.modules[type(tensor).__module__.partition(".")[0]]  # Ray has imported it
        bits = tensor.view(torch.int16).numpy().view(np.uint16)
        return tag, tuple(bits.shape), bits, offsets
    array = tensor.numpy()
    return array.dtype.name, tuple(array.shape), array, offsets
