"""Read and write a batch as one safetensors file; a file is untrusted input.

Tensors with rows keep their names, tensors without rows are `other/NAME`. The row lengths of a
ragged tensor are `lengths/NAME`. The rows of part I are `rows/I`. The tensors of part I that
differ from the batch's are `part/I/NAME`. Everything else is JSON in the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from stagescope_wire import nonfinite, tensorfile
from stagescope_wire.atomic_file import atomic_file
from stagescope_wire.batch.data import BatchData, BatchPart, Gap, Padding, Tensor, check_rows
from stagescope_wire.errors import InvalidInput, InvalidTensor, NotFound, StoreError
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import PART_FIELDS, Part
from stagescope_wire.tensorfile import Bytes

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
_RESERVED: Final = (LENGTHS, ROWS, PARTS, OTHERS)


def load(path: Path, kind: type[T]) -> T:
    """Open a file as a batch of class `kind`; tensors are read from disk when they are used.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: not a safetensors file, or not a batch.
        StoreError: the file cannot be read.
    """
    try:
        data = np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}") from error
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
    return parse(data.view(np.ndarray), path, kind)


def parse(data: Bytes, where: object, kind: type[T]) -> T:
    """Return the batch in the bytes of a file; its tensors are views of `data`.

    Args:
        data: the whole file.
        where: names the file in errors.
        kind: class of the batch.

    Raises:
        InvalidTensor: not a safetensors file, or not a batch.
    """
    file = tensorfile.parse(data, where)
    try:
        return _read(file.tensors, file.metadata, kind)
    except _MALFORMED as error:
        raise InvalidTensor(
            f"{where} is not a batch: {error}",
            expected="a file of `stagescope batch --output` or Batch.save",
        ) from error


def save(batch: BatchData, path: Path) -> Path:
    """Write a batch atomically.

    Raises:
        InvalidTensor: a tensor has a name that this format reserves.
        InvalidInput: `path` cannot be a file.
        StoreError: the file cannot be written.
    """
    chunks = pieces(batch)
    with atomic_file(path) as file:
        for chunk in chunks:
            file.write(chunk)
    return path


class DownloadBuffer:
    """Collects the chunks of a download in one buffer of the announced size."""

    def __init__(self) -> None:
        self.data: Bytes = np.empty(0, np.uint8)
        self._end = 0

    def write(self, chunk: bytes, size: int) -> None:
        """Append a chunk of a download of `size` bytes."""
        if not self._end:
            self.data = np.empty(size, np.uint8)
        begin, self._end = self._end, self._end + len(chunk)
        self.data[begin : self._end] = np.frombuffer(chunk, np.uint8)


def pieces(batch: BatchData) -> list[bytes | memoryview]:
    """Return the content of a file of this batch in chunks; tensors are not copied.

    Raises:
        InvalidTensor: a tensor has a name that this format reserves.
    """
    header, buffers, _ = tensorfile.encode_tensors(_wire_tensors(batch), describe(batch))
    return [header, *buffers]


def describe(batch: BatchData) -> dict[str, Json]:
    """Return the metadata of a file: everything of a batch but its arrays, as JSON values."""
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


def _describe_part(part: BatchPart) -> dict[str, Json]:
    return {
        "stage": part.stage,
        "role": part.role,
        "rank": part.rank,
        "part": [getattr(part.part, name) for name in PART_FIELDS],
        "names": list(part.names),
        "widths": dict(part.widths),
        "numbers": dict(part.numbers),
        "lengths": {name: lengths.tolist() for name, lengths in part.lengths.items()},
        "about": dict(part.about),
    }


def _wire_tensors(batch: BatchData) -> dict[str, tensorfile.WireTensor]:
    if reserved := [name for name in batch.tensors if name.startswith(_RESERVED)]:
        raise InvalidTensor(
            f"a tensor has the name {reserved[0]!r}",
            expected=f"a name that does not begin with {' or '.join(_RESERVED)}",
            advice="rename it",
        )
    flat: dict[str, tensorfile.WireTensor] = {
        name: (t.dtype, t.values.shape, t.values, None) for name, t in batch.tensors.items()
    }
    for name, other in batch.others.items():
        flat[OTHERS + name] = (other.dtype, other.values.shape, other.values, None)
    for name, lengths in batch.lengths.items():
        flat[LENGTHS + name] = ("int64", lengths.shape, lengths, None)
    for index, part in enumerate(batch.parts):
        flat[f"{ROWS}{index}"] = ("int64", part.rows.shape, part.rows, None)
        for name, own in part.own.items():
            flat[f"{PARTS}{index}/{name}"] = (own.dtype, own.values.shape, own.values, None)
    return flat


def _read(tensors: Mapping[str, tensorfile.WireTensor], metadata: JsonObject, kind: type[T]) -> T:
    if metadata.get("stagescope_batch") != FORMAT:
        raise ValueError(f"its format is {metadata.get('stagescope_batch')!r}, expected {FORMAT}")
    found = {name: Tensor(tag, values) for name, (tag, _, values, _) in tensors.items()}
    rows = _beginning_with(ROWS, found)
    own = _beginning_with(PARTS, found)
    padding = {
        name: Padding({"left": "left", "right": "right"}[side], _number(fill))
        for name, (side, fill) in metadata["padding"].items()
    }
    batch = kind(
        rows=int(metadata["rows"]),
        tensors={name: t for name, t in found.items() if not name.startswith(_RESERVED)},
        strings={name: tuple(map(str, texts)) for name, texts in metadata["strings"].items()},
        lengths={name: t.values for name, t in _beginning_with(LENGTHS, found).items()},
        padding=padding,
        others=_beginning_with(OTHERS, found),
        numbers={name: _number(value) for name, value in metadata["numbers"].items()},
        meta=_object(metadata["meta"]),
        source=_object(metadata["source"]),
        gaps=tuple(Gap(str(kind), str(message)) for kind, message in metadata["gaps"]),
        parts=tuple(
            _part(rows[str(index)], part, _beginning_with(f"{index}/", own))
            for index, part in enumerate(metadata["parts"])
        ),
    )
    return check_rows(batch)


def _beginning_with(prefix: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in found.items()
        if name.startswith(prefix)
    }


def _part(rows: Tensor, metadata: JsonObject, own: Mapping[str, Tensor]) -> BatchPart:
    if rows.dtype != "int64" or rows.values.ndim != 1:
        raise ValueError(f"the rows of a part are {rows.dtype} {rows.values.shape}")
    return BatchPart(
        stage=str(metadata["stage"]),
        role=None if metadata["role"] is None else str(metadata["role"]),
        rank=None if metadata["rank"] is None else int(metadata["rank"]),
        part=Part(*map(int, metadata["part"])),
        rows=rows.values,
        names=tuple(map(str, metadata["names"])),
        widths={str(name): int(width) for name, width in metadata["widths"].items()},
        own=own,
        numbers={name: _number(value) for name, value in metadata["numbers"].items()},
        lengths={
            str(name): np.array([*map(int, lengths)], np.int64)
            for name, lengths in metadata.get("lengths", {}).items()
        },
        about=_object(metadata.get("about", {})),
    )


def _object(value: object) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"it has {value!r:.100} instead of an object")
    return value


def _number(value: Json) -> float:
    number = nonfinite.number(value)
    if type(number) not in (int, float):
        raise ValueError(f"it has {value!r:.100} instead of a number")
    return number  # type: ignore[no-any-return]
