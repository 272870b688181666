"""Tensors in safetensors files: atomic writes, validated reads.

`stagescope_wire.tensorfile` implements the format; this module does the file I/O.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_wire.errors import InvalidTensor, NotFound, StoreError
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.tensorfile import (
    TensorEntry,
    TensorFile,
    WireTensor,
    assemble,
    check_entries,
    encode_tensors,
    read_header,
    read_metadata,
)

__all__ = [
    "MAX_BYTES", "Description", "TensorFile", "WireTensor", "Written", "check_file",
    "describe_file", "disk_errors", "map_tensors", "read_tensors", "size_of", "sync_directory",
    "write_tensors",
]  # fmt: skip

MAX_BYTES: Final = 16 << 30


class Description(NamedTuple):
    """The content of a file's header: (dtype tag, shape) of each tensor and of row offsets."""

    shapes: dict[str, tuple[str, tuple[int, ...]]]
    metadata: dict[str, Json]


class Written(NamedTuple):
    """A written file: path, number of bytes, and `sha256:...` (empty if not requested)."""

    path: Path
    bytes: int
    checksum: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, WireTensor],
    metadata: JsonObject | None = None,
    *,
    durable: bool = True,
) -> Written:
    """Write a safetensors file atomically: complete or absent, even after a power failure.

    Args:
        path: the file; its directory is created. An existing file is replaced.
        tensors: by name, each of any dtype of `stagescope_wire.tensors.DTYPE_BYTES`, any shape.
        metadata: any JSON value, read back by `read_tensors`.
        durable: False neither waits for the disk nor computes the checksum.

    Raises:
        InvalidTensor: a dtype, shape or name that cannot be written.
        StoreError: the write failed, with advice. No file is left behind.
    """
    header, buffers, size = encode_tensors(tensors, metadata or {})
    digest = hashlib.sha256() if durable else None
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for piece in (header, *buffers):
                    _write_all(file, memoryview(piece))
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


def size_of(tensors: Mapping[str, WireTensor], metadata: JsonObject | None = None) -> int:
    """Return the bytes of the file that `write_tensors` would write."""
    return encode_tensors(tensors, metadata or {})[2]


def read_tensors(path: Path, *, most_bytes: int = MAX_BYTES) -> TensorFile:
    """Read a safetensors file of any origin.

    Its content is untrusted: the header's length, its JSON, dtypes, shapes and offsets are
    validated against the file's size before anything is allocated.

    Args:
        path: the file.
        most_bytes: a larger file is refused.

    Returns:
        Tensors as read-only views of one buffer, and the metadata (the plain strings of a file
        that another tool wrote).

    Raises:
        NotFound: there is no such file.
        InvalidTensor: not a safetensors file, truncated, or of an unsupported dtype.
        StoreError: the file cannot be read.
    """
    with _opened(path, most_bytes) as (file, size):
        header, start = read_header(file, path, size)
        entries = check_entries(header, path, size - start)
        data = np.empty(size - start, np.uint8)
        if file.readinto(data.data) != size - start:
            raise InvalidTensor(f"{path} was truncated while it was read")
    data.flags.writeable = False
    return assemble(data, entries, read_metadata(header, path), path)


def map_tensors(path: Path) -> TensorFile:
    """Read a file like `read_tensors`, with its tensors as views of the memory-mapped file.

    Untouched pages are not read, and a file is mapped once for all views that exist at a time.
    It must not be truncated meanwhile: our files never are, since they are written once and
    renamed.

    Raises:
        NotFound, InvalidTensor, StoreError: as `read_tensors`.
    """
    with _opened(path, MAX_BYTES) as (file, size):
        state = os.fstat(file.fileno())
        header_info = _read_header_info(path, state.st_mtime_ns, size)
        key = (state.st_dev, state.st_ino, state.st_mtime_ns, size)
        content = _mapped.get(key)
        if content is None:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            _mapped[key] = content = np.frombuffer(mapped, np.uint8)
    return assemble(content[header_info.start :], header_info.entries, header_info.strings, path)


def describe_file(path: Path) -> Description:
    """Describe the content of a file; reads only its header.

    Raises:
        NotFound, InvalidTensor, StoreError: as `read_tensors`.
    """
    with _opened(path, MAX_BYTES) as (file, size):
        header_info = _read_header_info(path, os.fstat(file.fileno()).st_mtime_ns, size)
    empty = assemble(np.empty(0, np.uint8), [], header_info.strings, path)
    shapes = {each.name: (each.tag, each.shape) for each in header_info.entries}
    return Description(shapes, empty.metadata)


_mapped: Final[weakref.WeakValueDictionary[tuple[int, ...], npt.NDArray[np.uint8]]] = (
    weakref.WeakValueDictionary()
)
"""The mapped files: (device, inode, time, size) -> their bytes."""


class _HeaderInfo(NamedTuple):
    entries: list[TensorEntry]
    start: int
    strings: dict[str, Json]


@functools.lru_cache(maxsize=256)  # callers read the files of a step several times
def _read_header_info(path: Path, _written: int, size: int) -> _HeaderInfo:
    with _opened(path, size) as (file, _):
        header, start = read_header(file, path, size)
        entries = check_entries(header, path, size - start)
        return _HeaderInfo(entries, start, read_metadata(header, path))


def check_file(path: Path) -> int:
    """Return the size of a complete safetensors file; reads only its header.

    Raises:
        InvalidTensor: truncated or not a safetensors file.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, start = read_header(file, path, size)
        check_entries(header, path, size - start)
    return size


@contextlib.contextmanager
def _opened(path: Path, most_bytes: int) -> Iterator[tuple[BufferedReader, int]]:
    with disk_errors(path):
        try:
            file = path.open("rb")
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}") from error
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > most_bytes:
                raise InvalidTensor(f"{path} has {size} bytes", expected=f"at most {most_bytes}")
            yield file, size


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `StoreError` with advice for errors of the disk."""
    try:
        yield
    except OSError as error:
        advice = "check that its directory may be written by this user, and its disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free space on its disk, lower the ring's size, or give another data_dir"
        raise StoreError(f"{path}: {error.strerror or error}", advice=advice) from error


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(file: FileIO, view: memoryview) -> None:
    while view.nbytes:  # one call writes at most 2 GB
        view = view[file.write(view) :]
