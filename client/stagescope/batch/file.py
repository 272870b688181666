"""A batch as one safetensors file: how its parts are named in it, and how it is read without trust.

Tensors have their own names, those of no rows `other/NAME`; `lengths/NAME` are the rows' lengths
of a ragged one, `rows/I` the rows of part I and `part/I/NAME` what is its own. The rest is JSON in
the metadata.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import numpy as np

from stagescope import tensorfile
from stagescope.batch.data import BatchData, BatchPart, Gap, Padding, Tensor, check_rows
from stagescope.wire import nonfinite
from stagescope.wire.errors import InvalidInput, InvalidTensor, NotFound, StoreError
from stagescope.wire.schema import Part

Array = np.ndarray[Any, Any]
T = TypeVar("T", bound=BatchData)

FORMAT: Final = 1
_MALFORMED: Final = (
    LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
    InvalidInput,
)  # fmt: skip
LENGTHS: Final = "lengths/"
ROWS: Final = "rows/"
PARTS: Final = "part/"
OTHERS: Final = "other/"
_TAKEN: Final = (LENGTHS, ROWS, PARTS, OTHERS)


def load(path: Path, kind: type[T]) -> T:
    """Open a file as a `kind` of batch; its tensors are read when they are used.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: no safetensors file, or no batch.
        StoreError: the disk refused.
    """
    try:
        data = np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    return parse(data.view(np.ndarray), path, kind)


def parse(data: Array, where: object, kind: type[T]) -> T:
    """Read the bytes (uint8) of such a file; tensors are views of them.

    Raises:
        InvalidTensor: no safetensors, or no batch.
    """
    file = tensorfile.parse(data, where)
    try:
        return _read(file.tensors, file.metadata, kind)
    except _MALFORMED as error:
        raise InvalidTensor(
            f"{where} holds no batch: {error}",
            expected="a file of `stagescope batch --output` or Batch.save",
        ) from error


def save(batch: BatchData, path: Path) -> Path:
    """Write a batch, whole or not at all.

    Raises:
        InvalidTensor: a tensor whose name this format uses itself.
        InvalidInput: no file can be there.
        StoreError: the disk refused.
    """
    whole = pieces(batch)
    with whole_file(path) as file:
        for piece in whole:
            file.write(piece)
    return path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to be written that is there whole or not at all.

    Raises:
        InvalidInput: something else is there, such as a directory or a device; or its directory is
            not there, and a mistyped one is not made.
        StoreError: the disk refused.
    """
    if path.exists() and not path.is_file():
        # Its place would be taken by a file: /dev/null, too, for whoever may.
        raise InvalidInput(f"{path} is there and no file", expected="the name of a file")
    if not path.parent.is_dir():
        raise InvalidInput(f"{path.parent} is no directory", expected="one that is there")
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}", advice="check its directory and its disk"
        ) from error


class Blob:
    """Bytes as they come, in one buffer of the size that was told."""

    def __init__(self) -> None:
        self.data = np.empty(0, np.uint8)
        self._end = 0

    def write(self, piece: bytes, size: int) -> None:
        """Append a piece of `size` bytes in all."""
        if not self._end:
            self.data = np.empty(size, np.uint8)
        begin, self._end = self._end, self._end + len(piece)
        self.data[begin : self._end] = np.frombuffer(piece, np.uint8)


def pieces(batch: BatchData) -> list[bytes | memoryview]:
    """Return what a file of this batch holds, in order; tensors are not copied.

    Raises:
        InvalidTensor: a tensor whose name this format uses itself.
    """
    header, buffers, _ = tensorfile.layout(_flat(batch), describe(batch))
    return [header, *buffers]


def describe(batch: BatchData) -> dict[str, Any]:
    """Return everything of a batch but its arrays, as JSON can say it."""
    return {
        "stagescope_batch": FORMAT,
        "rows": batch.rows,
        "strings": {name: list(texts) for name, texts in batch.strings.items()},
        "padding": {name: list(padding) for name, padding in batch.padding.items()},
        "numbers": dict(batch.numbers),
        "meta": dict(batch.meta),
        "source": dict(batch.source),
        "gaps": [list(gap) for gap in batch.gaps],
        "parts": [_describe_part(part) for part in batch.parts],
    }


def _describe_part(part: BatchPart) -> dict[str, Any]:
    at = part.part
    return {
        "stage": part.stage,
        "role": part.role,
        "rank": part.rank,
        "part": [at.occurrence, at.epoch, at.minibatch, at.microbatch],
        "names": list(part.names),
        "widths": dict(part.widths),
        "numbers": dict(part.numbers),
    }


def _flat(batch: BatchData) -> dict[str, tensorfile.WireTensor]:
    if taken := [name for name in batch.tensors if name.startswith(_TAKEN)]:
        raise InvalidTensor(f"a tensor named {taken[0]!r}", expected=f"no name of {_TAKEN}")
    flat: dict[str, tensorfile.WireTensor] = {
        name: (t.dtype, t.values.shape, t.values, None) for name, t in batch.tensors.items()
    }
    for name, other in batch.others.items():
        flat[OTHERS + name] = (other.dtype, other.values.shape, other.values, None)
    for name, lengths in batch.lengths.items():
        flat[LENGTHS + name] = ("int64", lengths.shape, lengths, None)
    for at, part in enumerate(batch.parts):
        flat[f"{ROWS}{at}"] = ("int64", part.rows.shape, part.rows, None)
        for name, own in part.own.items():
            flat[f"{PARTS}{at}/{name}"] = (own.dtype, own.values.shape, own.values, None)
    return flat


def _read(
    tensors: Mapping[str, tensorfile.WireTensor], said: Mapping[str, Any], kind: type[T]
) -> T:
    if said.get("stagescope_batch") != FORMAT:
        raise ValueError(f"its format is {said.get('stagescope_batch')!r}, expected {FORMAT}")
    columns: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    lengths: dict[str, Array] = {}
    rows: dict[int, Tensor] = {}
    of_parts: dict[int, dict[str, Tensor]] = {}
    for name, (tag, _, values, _) in tensors.items():
        if name.startswith(LENGTHS):
            lengths[name.removeprefix(LENGTHS)] = values
        elif name.startswith(ROWS):
            rows[int(name.removeprefix(ROWS))] = Tensor(tag, values)
        elif name.startswith(PARTS):
            at, _, own = name.removeprefix(PARTS).partition("/")
            of_parts.setdefault(int(at), {})[own] = Tensor(tag, values)
        elif name.startswith(OTHERS):
            others[name.removeprefix(OTHERS)] = Tensor(tag, values)
        else:
            columns[name] = Tensor(tag, values)
    padding = {
        name: Padding({"left": "left", "right": "right"}[side], _number(fill))
        for name, (side, fill) in said["padding"].items()
    }
    batch = kind(
        rows=int(said["rows"]),
        tensors=columns,
        strings={name: tuple(map(str, texts)) for name, texts in said["strings"].items()},
        lengths=lengths,
        padding=padding,
        others=others,
        numbers={name: _number(value) for name, value in said["numbers"].items()},
        meta=_object(said["meta"]),
        source=_object(said["source"]),
        gaps=tuple(Gap(str(kind), str(message)) for kind, message in said["gaps"]),
        parts=tuple(
            _part(rows[at], part, of_parts.get(at, {})) for at, part in enumerate(said["parts"])
        ),
    )
    return check_rows(batch)


def _part(rows: Tensor, said: Mapping[str, Any], own: Mapping[str, Tensor]) -> BatchPart:
    if rows.dtype != "int64" or rows.values.ndim != 1:
        raise ValueError(f"the rows of a part are {rows.dtype} {rows.values.shape}")
    return BatchPart(
        stage=str(said["stage"]),
        role=None if said["role"] is None else str(said["role"]),
        rank=None if said["rank"] is None else int(said["rank"]),
        part=Part(*map(int, said["part"])),
        rows=rows.values,
        names=tuple(map(str, said["names"])),
        widths={str(name): int(width) for name, width in said["widths"].items()},
        own=own,
        numbers={name: _number(value) for name, value in said["numbers"].items()},
    )


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it has {value!r:.100} where an object is")
    return value


def _number(value: Any) -> float:
    found = nonfinite.number(value)
    if type(found) not in (int, float):
        raise ValueError(f"it has {value!r:.100} where a number is")
    return found  # type: ignore[no-any-return]
