"""The safetensors format in numpy alone: what a file or an answer must hold, checked byte by byte.

The format is https://github.com/huggingface/safetensors: 8 bytes with the header's length, a JSON
header `{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}`, the data without holes.
It is written here, and not by its library, because that copies every tensor once more and has no
bfloat16 for numpy. bfloat16 travels as uint16 and is a real BF16 in the file, so torch and every
other reader of safetensors sees it as what it is.

Our metadata is one JSON text under `stagescope`; the row offsets of packed tensors are tensors
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

from stagescope.wire.errors import InvalidTensor
from stagescope.wire.nonfinite import spell

WireTensor: TypeAlias = (
    "tuple[str, tuple[int, ...], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]"
)
"""(dtype tag, shape, numpy buffer, row offsets int64 [rows + 1] or None); see `schema`."""

MOST_HEADER_BYTES: Final = 16 << 20

CODES: Final = {
    "float64": ("F64", "<f8"), "float32": ("F32", "<f4"), "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"), "int64": ("I64", "<i8"), "int32": ("I32", "<i4"),
    "int16": ("I16", "<i2"), "int8": ("I8", "|i1"), "uint8": ("U8", "|u1"), "bool": ("BOOL", "|b1"),
}  # fmt: skip
"""dtype tag -> the format's name of it, and the buffer's numpy dtype."""

_TAGS: Final = {code: (tag, np.dtype(kind)) for tag, (code, kind) in CODES.items()}
_OFFSETS: Final = ".row_offsets"


class TensorFile(NamedTuple):
    """What a file holds."""

    tensors: dict[str, WireTensor]
    metadata: dict[str, Any]


class Entry(NamedTuple):
    """One tensor of a header: `data[begin:end]`."""

    name: str
    tag: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def layout(
    tensors: Mapping[str, WireTensor], metadata: Mapping[str, Any]
) -> tuple[bytes, list[Any], int]:
    """Return the header with its length before it, the tensors' bytes in order, and the sum.

    Raises:
        InvalidTensor: a dtype, shape or name that cannot be written.
    """
    flat: dict[str, np.ndarray[Any, Any]] = {}
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
    entries = place(shapes)
    header = make_header(entries, metadata, packed)
    buffers = [flat[entry.name].reshape(-1).view(np.uint8).data for entry in entries]
    return header, buffers, len(header) + data_bytes(entries)


def place(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[Entry]:
    """Return where tensors of these dtypes and shapes lie in a file, in the order of their bytes.

    Raises:
        InvalidTensor: a dtype or name that cannot be written.
    """
    for name, (tag, _) in shapes.items():
        if tag not in CODES:
            raise InvalidTensor(f"tensor {name!r} has dtype {tag!r}", expected=f"one of {[*CODES]}")
        if name == "__metadata__":
            raise InvalidTensor("a tensor named '__metadata__'", expected="another name")
    entries, position = list[Entry](), 0
    # The widest first, so that every tensor is aligned to its own items.
    for name, (tag, shape) in sorted(
        shapes.items(), key=lambda item: -np.dtype(CODES[item[1][0]][1]).itemsize
    ):
        dtype = np.dtype(CODES[tag][1])
        end = position + math.prod(shape) * dtype.itemsize
        entries.append(Entry(name, tag, dtype, tuple(shape), position, end))
        position = end
    return entries


def data_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes of all tensors."""
    return entries[-1].end if entries else 0


def make_header(
    entries: Sequence[Entry], metadata: Mapping[str, Any], packed: Sequence[str] = ()
) -> bytes:
    """Return the header of a file, its length before it.

    Args:
        entries: what `place` gave.
        metadata: anything that JSON can say.
        packed: names of tensors whose row offsets are among the entries.
    """
    ours = {"packed": [*packed], "metadata": dict(metadata)}
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",  # what transformers asks for before it opens a file
            "stagescope": json.dumps(spell(ours), allow_nan=False, separators=(",", ":")),
        }
    }
    for entry in entries:
        header[entry.name] = {
            "dtype": CODES[entry.tag][0],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        raise InvalidTensor(
            f"names, texts and metadata of a file take {len(text)} bytes",
            expected=f"at most {MOST_HEADER_BYTES}",
        )
    return struct.pack("<Q", len(text)) + text


def parse(data: np.ndarray[Any, Any], where: object) -> TensorFile:
    """Read a whole file's bytes (uint8), of anybody's: tensors are views of them.

    Raises:
        InvalidTensor: not the format, truncated, or of a dtype unknown here.
    """
    claimed = int.from_bytes(data[:8].tobytes(), "little")
    window = io.BytesIO(data[: 8 + min(claimed, MOST_HEADER_BYTES)].tobytes())
    header, start = read_header(window, where, data.size)
    entries = check_entries(header, where, data.size - start)
    return assemble(data[start:], entries, read_metadata(header, where))


def _buffer(
    name: str, tag: str, shape: tuple[int, ...], values: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
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


def read_header(file: BinaryIO, where: object, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a file of `size` bytes, and where the data begin.

    Raises:
        InvalidTensor: not a header, or longer than the file or `MOST_HEADER_BYTES`.
    """
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
        raise InvalidTensor(
            f"{where} ({size} bytes) claims a header of {length} bytes",
            expected=f"2 to {min(MOST_HEADER_BYTES, max(size - 8, 0))}: a safetensors file",
        )
    try:
        header = json.loads(file.read(length).decode())
    except (ValueError, RecursionError) as error:
        raise InvalidTensor(f"{where} has a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise InvalidTensor(f"{where} has a header that is no JSON object")
    return header, 8 + length


def check_entries(header: dict[str, Any], where: object, data_bytes: int) -> list[Entry]:
    """Return the tensors in the order of their bytes, which cover the data without holes.

    Raises:
        InvalidTensor: dtypes, shapes or offsets that do not fit.
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


def _check_entry(name: str, entry: Any, where: object) -> Entry:
    if not isinstance(entry, dict):
        raise InvalidTensor(f"{where}: entry {name!r} is no object")
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
    return Entry(name, tag, dtype, shape, begin, end)


def _sizes(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list):
        return None
    # bool is an int to Python and no size to anybody.
    return tuple(values) if all(type(v) is int and 0 <= v < 1 << 62 for v in values) else None


def read_metadata(header: dict[str, Any], where: object) -> dict[str, Any]:
    """Return the strings that the header says of the file.

    Raises:
        InvalidTensor: they are not strings.
    """
    found = header.get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise InvalidTensor(f"{where} has metadata that are not strings")
    return found


def _view(data: np.ndarray[Any, Any], entry: Entry) -> np.ndarray[Any, Any]:
    piece = data[entry.begin : entry.end]
    if entry.tag == "bool" and piece.size and piece.max() > 1:
        raise InvalidTensor(f"tensor {entry.name!r} of bool holds other bytes than 0 and 1")
    try:
        # A copy only where a foreign file did not align the tensor to its items.
        return np.require(piece.view(entry.dtype).reshape(entry.shape), requirements="A")
    except ValueError as error:
        raise InvalidTensor(f"tensor {entry.name!r} of shape {entry.shape}: {error}") from error


def assemble(
    data: np.ndarray[Any, Any], entries: list[Entry], strings: dict[str, Any]
) -> TensorFile:
    """Return the tensors of a file's data (uint8), as views, and its metadata."""
    arrays = {entry.name: (entry.tag, entry.shape, _view(data, entry)) for entry in entries}
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
