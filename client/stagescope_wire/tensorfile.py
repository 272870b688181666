"""Read and write the safetensors format with numpy alone; every byte of a file is checked.

The format is https://github.com/huggingface/safetensors: 8 bytes with the header's length, a JSON
header `{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}`, and the data without
holes. This module does not use the safetensors library, because that copies every tensor once more
and has no bfloat16 for numpy. A bfloat16 tensor is uint16 in numpy and BF16 in the file, so that
torch and every other reader of safetensors reads it as bfloat16.

Our own metadata is one JSON text under `stagescope`; the row offsets of packed tensors are tensors
named `{name}.row_offsets`.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stagescope_wire.errors import InvalidTensor
from stagescope_wire.nonfinite import Json, JsonObject, spell

Array: TypeAlias = "np.ndarray[Any, Any]"
"""An array whose dtype is known only at run time, from the tag beside it."""
Bytes: TypeAlias = npt.NDArray[np.uint8]
WireTensor: TypeAlias = "tuple[str, tuple[int, ...], Array, Array | None]"
"""(dtype tag, shape, numpy buffer, row offsets int64 [rows + 1] or None); see `schema`."""

MAX_HEADER_BYTES: Final = 16 << 20

CODES: Final = {
    "float64": ("F64", "<f8"), "float32": ("F32", "<f4"), "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"), "int64": ("I64", "<i8"), "int32": ("I32", "<i4"),
    "int16": ("I16", "<i2"), "int8": ("I8", "|i1"), "uint8": ("U8", "|u1"), "bool": ("BOOL", "|b1"),
}  # fmt: skip
"""dtype tag -> (the format's name of the dtype, the numpy dtype of the buffer)."""

_TAGS: Final = {code: (tag, np.dtype(kind)) for tag, (code, kind) in CODES.items()}
_OFFSETS: Final = ".row_offsets"


class TensorFile(NamedTuple):
    """The content of a file."""

    tensors: dict[str, WireTensor]
    metadata: dict[str, Json]


class TensorEntry(NamedTuple):
    """One tensor of a header: its bytes are `data[begin:end]`."""

    name: str
    tag: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_tensors(
    tensors: Mapping[str, WireTensor], metadata: JsonObject
) -> tuple[bytes, list[bytes | memoryview], int]:
    """Return the header with its length prefix, the tensors' bytes in order, and the total size.

    Raises:
        InvalidTensor: a dtype, shape or name cannot be written.
    """
    flat: dict[str, Array] = {}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    packed = [name for name, tensor in tensors.items() if tensor[3] is not None]
    for name, (tag, shape, values, offsets) in tensors.items():
        flat[name] = _buffer(name, tag, shape, values)
        shapes[name] = (tag, flat[name].shape)
        if offsets is not None:
            if name + _OFFSETS in tensors:
                raise InvalidTensor(f"tensor {name + _OFFSETS!r} beside a packed {name!r}")
            flat[name + _OFFSETS] = np.ascontiguousarray(offsets, np.dtype("<i8"))
            shapes[name + _OFFSETS] = ("int64", flat[name + _OFFSETS].shape)
    entries = plan_entries(shapes)
    header = make_header(entries, metadata, packed)
    buffers: list[bytes | memoryview] = [
        flat[entry.name].reshape(-1).view(np.uint8).data for entry in entries
    ]
    return header, buffers, len(header) + data_bytes(entries)


def plan_entries(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[TensorEntry]:
    """Return the header entries of tensors of these dtypes and shapes, in the order of their bytes.

    Raises:
        InvalidTensor: a dtype or name cannot be written.
    """
    for name, (tag, _) in shapes.items():
        if tag not in CODES:
            raise InvalidTensor(f"tensor {name!r} has dtype {tag!r}", expected=f"one of {[*CODES]}")
        if name == "__metadata__":
            raise InvalidTensor("a tensor named '__metadata__'", expected="another name")
    entries, position = list[TensorEntry](), 0
    # Widest first, so that every tensor is aligned to its item size.
    for name, (tag, shape) in sorted(
        shapes.items(), key=lambda item: -np.dtype(CODES[item[1][0]][1]).itemsize
    ):
        dtype = np.dtype(CODES[tag][1])
        end = position + math.prod(shape) * dtype.itemsize
        entries.append(TensorEntry(name, tag, dtype, tuple(shape), position, end))
        position = end
    return entries


def data_bytes(entries: Sequence[TensorEntry]) -> int:
    """Return the size of all tensors in bytes."""
    return entries[-1].end if entries else 0


def make_header(
    entries: Sequence[TensorEntry], metadata: JsonObject | None, packed: Sequence[str] = ()
) -> bytes:
    """Return the header of a file with its length prefix.

    Args:
        entries: the result of `plan_entries`.
        metadata: JSON values; None: the header has no metadata.
        packed: names of the tensors whose row offsets are among the entries.
    """
    header: dict[str, Json] = {}
    if metadata is not None:
        ours = {"packed": [*packed], "metadata": dict(metadata)}
        header["__metadata__"] = {
            "format": "pt",  # transformers checks it before it opens a file
            "stagescope": json.dumps(spell(ours), allow_nan=False, separators=(",", ":")),
        }
    for entry in entries:
        header[entry.name] = {
            "dtype": CODES[entry.tag][0],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise InvalidTensor(
            f"names, texts and metadata of a file take {len(text)} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
        )
    return struct.pack("<Q", len(text)) + text


def parse(data: Bytes, where: object) -> TensorFile:
    """Read the bytes of a file from any writer; the tensors are views of `data`.

    Args:
        data: the whole file.
        where: names the file in errors.

    Raises:
        InvalidTensor: not safetensors, truncated, or of an unknown dtype.
    """
    claimed = int.from_bytes(data[:8].tobytes(), "little")
    window = io.BytesIO(data[: 8 + min(claimed, MAX_HEADER_BYTES)].tobytes())
    header, start = read_header(window, where, data.size)
    entries = check_entries(header, where, data.size - start)
    return assemble(data[start:], entries, read_metadata(header, where), where)


def _buffer(name: str, tag: str, shape: tuple[int, ...], values: Array) -> Array:
    if tag not in CODES:
        raise InvalidTensor(f"tensor {name!r} has dtype {tag!r}", expected=f"one of {[*CODES]}")
    wanted = np.dtype(CODES[tag][1])
    if values.dtype != wanted or values.size != math.prod(shape):
        raise InvalidTensor(
            f"tensor {name!r} of {tag} {tuple(shape)} has a buffer of "
            f"{values.dtype} {values.shape}",
            expected=f"{wanted} with {math.prod(shape)} values",
        )
    return np.ascontiguousarray(values).reshape(shape)


def read_header(file: BinaryIO, where: object, size: int) -> tuple[dict[str, Json], int]:
    """Return the header of a file of `size` bytes, and the offset at which the data begin.

    Raises:
        InvalidTensor: not a header, or longer than the file or `MAX_HEADER_BYTES`.
    """
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise InvalidTensor(
            f"{where} ({size} bytes) claims a header of {length} bytes",
            expected=f"2 to {min(MAX_HEADER_BYTES, max(size - 8, 0))}: a safetensors file",
        )
    try:
        header = json.loads(file.read(length).decode())
    except (ValueError, RecursionError) as error:
        raise InvalidTensor(f"{where} has a header that is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise InvalidTensor(f"{where} has a header that is not a JSON object")
    return header, 8 + length


def check_entries(header: JsonObject, where: object, data_bytes: int) -> list[TensorEntry]:
    """Return the entries in the order of their bytes; they cover the data without holes.

    Raises:
        InvalidTensor: dtypes, shapes or offsets do not match.
    """
    entries = [
        _check_entry(name, entry, where) for name, entry in header.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise InvalidTensor(
                f"{where}: tensor {entry.name!r} begins at byte {entry.begin}",
                expected=f"{position}, where the one before ends",
            )
        position = entry.end
    if position != data_bytes:
        raise InvalidTensor(
            f"{where} holds {data_bytes} bytes of tensors",
            expected=f"{position}, as its header says",
        )
    return entries


def _check_entry(name: str, entry: object, where: object) -> TensorEntry:
    if not isinstance(entry, dict):
        raise InvalidTensor(f"{where}: entry {name!r} is not an object")
    tag, dtype = _TAGS.get(str(entry.get("dtype")), ("", np.dtype(np.uint8)))
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not tag:
        raise InvalidTensor(
            f"{where}: tensor {name!r} has dtype {entry.get('dtype')!r}",
            expected=f"one of {[*_TAGS]}",
        )
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > 32:
        raise InvalidTensor(f"{where}: tensor {name!r} has no proper shape and data_offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise InvalidTensor(
            f"{where}: tensor {name!r} of {tag} {tuple(shape)} lies in {end - begin} bytes",
            expected=f"{math.prod(shape) * dtype.itemsize}",
        )
    return TensorEntry(name, tag, dtype, shape, begin, end)


def _sizes(values: object) -> tuple[int, ...] | None:
    if not isinstance(values, list):
        return None
    for value in values:
        # `type(...) is int` excludes bool, which is a subclass of int.
        if type(value) is not int or not 0 <= value < 1 << 62:
            return None
    return tuple(values)


def read_metadata(header: JsonObject, where: object) -> dict[str, str]:
    """Return the metadata of a header.

    Raises:
        InvalidTensor: they are not strings.
    """
    found = header.get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise InvalidTensor(f"{where} has metadata that are not strings")
    return found


def _view(data: Bytes, entry: TensorEntry, where: object) -> Array:
    piece = data[entry.begin : entry.end]
    if entry.tag == "bool" and piece.size and piece.max() > 1:
        raise InvalidTensor(
            f"{where}: tensor {entry.name!r} of bool holds other bytes than 0 and 1"
        )
    try:
        values = piece.view(entry.dtype).reshape(entry.shape)
        # Another writer may not have aligned the tensor to its item size.
        return values if values.flags.aligned else values.copy()
    except ValueError as error:
        raise InvalidTensor(
            f"{where}: tensor {entry.name!r} of shape {entry.shape}: {error}"
        ) from error


def assemble(
    data: Bytes, entries: list[TensorEntry], strings: Mapping[str, str], where: object
) -> TensorFile:
    """Return the tensors of a file as views of `data`, and its metadata.

    Raises:
        InvalidTensor: bytes of a bool other than 0 and 1, or a shape too large.
    """
    arrays = {entry.name: (entry.tag, entry.shape, _view(data, entry, where)) for entry in entries}
    try:
        ours = json.loads(strings["stagescope"])
        packed, metadata = set(map(str, ours["packed"])), dict(ours["metadata"])
    except (KeyError, ValueError, TypeError, RecursionError):
        packed, metadata = set(), dict(strings)
    tensors: dict[str, WireTensor] = {}
    for name, (tag, shape, values) in arrays.items():
        if name.endswith(_OFFSETS) and name[: -len(_OFFSETS)] in packed:
            continue
        companion = arrays.get(name + _OFFSETS) if name in packed else None
        tensors[name] = (tag, shape, values, companion[2] if companion else None)
    return TensorFile(tensors, metadata)
