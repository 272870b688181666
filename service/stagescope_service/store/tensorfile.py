"""Tensors in safetensors files: written whole or not at all, read without trust.

The format is https://github.com/huggingface/safetensors: 8 bytes with the header's length, a JSON
header `{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}`, the data without holes.
It is written here, and not by its library, because that copies every tensor once more and has no
bfloat16 for numpy. bfloat16 travels as uint16 and is a real BF16 in the file, so torch and every
other reader of safetensors sees it as what it is.

Our metadata is one JSON text under `stagescope`; the row offsets of packed tensors are tensors
named `{name}.row_offsets`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

import numpy as np

from stagescope.errors import InvalidTensor, NotFound, StoreError
from stagescope_service.store.columns import dump_json

WireTensor: TypeAlias = (
    "tuple[str, tuple[int, ...], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]"
)
"""(dtype tag, shape, numpy buffer, row offsets int64 [rows + 1] or None); see `schema`."""

MOST_HEADER_BYTES: Final = 16 << 20
MOST_BYTES: Final = 16 << 30

_CODES: Final = {
    "float64": ("F64", "<f8"), "float32": ("F32", "<f4"), "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"), "int64": ("I64", "<i8"), "int32": ("I32", "<i4"),
    "int16": ("I16", "<i2"), "int8": ("I8", "|i1"), "uint8": ("U8", "|u1"), "bool": ("BOOL", "|b1"),
}  # fmt: skip
_TAGS: Final = {code: (tag, np.dtype(kind)) for tag, (code, kind) in _CODES.items()}
_OFFSETS: Final = ".row_offsets"


class TensorFile(NamedTuple):
    """What a file holds."""

    tensors: dict[str, WireTensor]
    metadata: dict[str, Any]


class Written(NamedTuple):
    """What was written: where, how many bytes, and `sha256:...` (empty where not asked for)."""

    path: Path
    bytes: int
    checksum: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, WireTensor],
    metadata: Mapping[str, Any] | None = None,
    *,
    durable: bool = True,
) -> Written:
    """Write a safetensors file that is there whole or not at all, also after a power cut.

    Args:
        path: the file; its directory is made. A file that is there is replaced.
        tensors: by name, each of any dtype of `schema.DTYPE_BYTES`, any shape.
        metadata: anything that JSON can say, read back by `read_tensors`.
        durable: False neither waits for the disk nor computes the checksum.

    Raises:
        InvalidTensor: a dtype, shape or name that cannot be written.
        StoreError: the disk refused; says what to do. Nothing is left behind.
    """
    header, buffers, size = _layout(tensors, metadata or {})
    digest = hashlib.sha256() if durable else None
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for piece in (header, *buffers):
                    _write_all(file, piece)
                    if digest is not None:
                        digest.update(piece)
                if durable:
                    os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durable:
            sync_directory(path.parent)
    return Written(path, size, f"sha256:{digest.hexdigest()}" if digest is not None else "")


def size_of(tensors: Mapping[str, WireTensor], metadata: Mapping[str, Any] | None = None) -> int:
    """Return the bytes of the file that `write_tensors` would write."""
    return _layout(tensors, metadata or {})[2]


def read_tensors(path: Path, *, most_bytes: int = MOST_BYTES) -> TensorFile:
    """Read a safetensors file of anybody's.

    Nothing of it is trusted: the header's length, its JSON, dtypes, shapes and offsets are held
    against the file's own size before anything is allocated.

    Args:
        path: the file.
        most_bytes: a larger file is refused.

    Returns:
        Tensors as read-only views of one buffer, and the metadata (a foreign file's metadata are
        its strings).

    Raises:
        NotFound: there is no such file.
        InvalidTensor: not a safetensors file, truncated, or of a dtype unknown here.
        StoreError: the disk refused.
    """
    with disk_errors(path):
        try:
            file = path.open("rb")
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}") from error
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise InvalidTensor(f"{path} has {size} bytes", expected=f"at most {most_bytes}")
            header, start = _read_header(file, path, size)
            entries = _check_entries(header, path, size - start)
            data = np.empty(size - start, np.uint8)
            if file.readinto(data.data) != size - start:
                raise InvalidTensor(f"{path} was truncated while it was read")
    data.flags.writeable = False
    return _assemble(data, entries, _read_metadata(header, path))


def check_file(path: Path) -> int:
    """Return the bytes of a whole safetensors file after a look at its header alone.

    Raises:
        InvalidTensor: truncated or not a safetensors file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, start = _read_header(file, path, size)
        _check_entries(header, path, size - start)
    return size


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `StoreError` with advice where the disk refuses."""
    try:
        yield
    except OSError as error:
        advice = "check that its directory may be written by this user, and its disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free space on its disk, lower the ring's size, or give another data_dir"
        raise StoreError(f"{path}: {error.strerror or error}", advice=advice) from error


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(file: Any, piece: Any) -> None:
    view = memoryview(piece)
    while view.nbytes:  # one write takes 2 GB at most
        view = view[file.write(view) :]


def _layout(
    tensors: Mapping[str, WireTensor], metadata: Mapping[str, Any]
) -> tuple[bytes, list[Any], int]:
    """Return the header with its length before it, the tensors' bytes in order, and the sum."""
    flat: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    for name, (tag, shape, values, offsets) in tensors.items():
        flat[name] = (tag, _buffer(name, tag, shape, values))
        if offsets is not None:
            companion = np.ascontiguousarray(offsets, np.dtype("<i8"))
            if name + _OFFSETS in tensors:
                raise InvalidTensor(f"tensor {name + _OFFSETS!r} beside a packed {name!r}")
            flat[name + _OFFSETS] = ("int64", companion)
    ours = {"packed": [name for name, tensor in tensors.items() if tensor[3] is not None]}
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",  # what transformers asks for before it opens a file
            "stagescope": dump_json({**ours, "metadata": dict(metadata)}),
        }
    }
    position, buffers = 0, list[Any]()
    # The widest first, so that every tensor is aligned to its own items.
    for name, (tag, values) in sorted(flat.items(), key=lambda item: -item[1][1].itemsize):
        if name == "__metadata__":
            raise InvalidTensor("a tensor named '__metadata__'", expected="another name")
        end = position + values.nbytes
        header[name] = {
            "dtype": _CODES[tag][0],
            "shape": list(values.shape),
            "data_offsets": [position, end],
        }
        buffers.append(values.reshape(-1).view(np.uint8).data)
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, buffers, 8 + len(text) + position


def _buffer(
    name: str, tag: str, shape: tuple[int, ...], values: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    if tag not in _CODES:
        raise InvalidTensor(f"tensor {name!r} has dtype {tag!r}", expected=f"one of {[*_CODES]}")
    wanted = np.dtype(_CODES[tag][1])
    if values.dtype != wanted or values.size != math.prod(shape):
        raise InvalidTensor(
            f"tensor {name!r} of {tag} {tuple(shape)} has a buffer of "
            f"{values.dtype} {values.shape}",
            expected=f"{wanted} with {math.prod(shape)} values",
        )
    return np.ascontiguousarray(values).reshape(shape)


def _read_header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
        raise InvalidTensor(
            f"{path} ({size} bytes) claims a header of {length} bytes",
            expected=f"2 to {min(MOST_HEADER_BYTES, max(size - 8, 0))}: a safetensors file",
        )
    try:
        header = json.loads(file.read(length).decode())
    except (ValueError, RecursionError) as error:
        raise InvalidTensor(f"{path} has a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise InvalidTensor(f"{path} has a header that is no JSON object")
    return header, 8 + length


class _Entry(NamedTuple):
    name: str
    tag: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def _check_entries(header: dict[str, Any], path: Path, data_bytes: int) -> list[_Entry]:
    """Return the tensors in the order of their bytes, which cover the data without holes."""
    entries = [
        _check_entry(name, entry, path) for name, entry in header.items() if name != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise InvalidTensor(
                f"{path}: tensor {entry.name!r} begins at byte {entry.begin}",
                expected=f"{position}, where the one before ends",
            )
        position = entry.end
    if position != data_bytes:
        raise InvalidTensor(
            f"{path} holds {data_bytes} bytes of tensors",
            expected=f"{position}, as its header says",
        )
    return entries


def _check_entry(name: str, entry: Any, path: Path) -> _Entry:
    if not isinstance(entry, dict):
        raise InvalidTensor(f"{path}: entry {name!r} is no object")
    tag, dtype = _TAGS.get(str(entry.get("dtype")), ("", np.dtype(np.uint8)))
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not tag:
        raise InvalidTensor(
            f"{path}: tensor {name!r} has dtype {entry.get('dtype')!r}",
            expected=f"one of {[*_TAGS]}",
        )
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > 32:
        raise InvalidTensor(f"{path}: tensor {name!r} has no proper shape and data_offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise InvalidTensor(
            f"{path}: tensor {name!r} of {tag} {tuple(shape)} lies in {end - begin} bytes",
            expected=f"{math.prod(shape) * dtype.itemsize}",
        )
    return _Entry(name, tag, dtype, shape, begin, end)


def _sizes(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list):
        return None
    # bool is an int to Python and no size to anybody.
    return tuple(values) if all(type(v) is int and 0 <= v < 1 << 62 for v in values) else None


def _read_metadata(header: dict[str, Any], path: Path) -> dict[str, Any]:
    found = header.get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise InvalidTensor(f"{path} has metadata that are not strings")
    return found


def _view(data: np.ndarray[Any, Any], entry: _Entry) -> np.ndarray[Any, Any]:
    piece = data[entry.begin : entry.end]
    if entry.tag == "bool" and piece.size and piece.max() > 1:
        raise InvalidTensor(f"tensor {entry.name!r} of bool holds other bytes than 0 and 1")
    try:
        # A copy only where a foreign file did not align the tensor to its items.
        return np.require(piece.view(entry.dtype).reshape(entry.shape), requirements="A")
    except ValueError as error:
        raise InvalidTensor(f"tensor {entry.name!r} of shape {entry.shape}: {error}") from error


def _assemble(
    data: np.ndarray[Any, Any], entries: list[_Entry], strings: dict[str, Any]
) -> TensorFile:
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
